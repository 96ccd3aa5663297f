"""A function in a fork of this process that dies, as of SIGKILL, at its k-th change of a file.

Used by tests of what has to survive a kill at any moment. Changes are counted by the interpreter's audit events.
Must never run the function in the process of the test.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

CHANGES = {f"os.{what}" for what in ("rename", "remove", "rmdir", "mkdir", "link", "symlink", "truncate", "chmod")}
DIED = 99


def deaths(prepare: Callable[[], None], function: Callable[[], object]) -> Iterator[int]:
    """Numbers of the changes at which `function` died, after `prepare` each; ends when it comes to its end instead."""
    number = 1
    prepare()
    while _dies(number, function):
        yield number
        number += 1
        prepare()


def _dies(number: int, function: Callable[[], object]) -> bool:
    child = os.fork()
    if child == 0:
        try:
            sys.addaudithook(_Death(number))
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, DIED), f"exit code {code}"
    return code == DIED


class _Death:
    """Ends this process instead of its `number`-th change; a file opened to be overwritten is empty by then."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        opens = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not opens and event not in CHANGES:
            return
        self.left -= 1
        if self.left == 0:
            if opens and arguments[2] & os.O_TRUNC and os.path.isfile(arguments[0]):
                os.truncate(arguments[0], 0)
            os._exit(DIED)
