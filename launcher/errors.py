"""The user-facing errors: every problem says where, what was got, why it is refused and the fix.

Raised by every part of the product for anything a user can cause; shown by `launcher.render`.
Must never be used for our own invariants (those are `assert`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

EXIT_OK = 0
EXIT_REQUEST = 2  # the request is wrong: nothing was created or started
EXIT_DOES_NOT_FIT = 3
EXIT_PREFLIGHT = 4  # a host failed preflight
EXIT_TRAINING = 5  # training failed after it had started
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: option or file, the value found there, the reason, what to do."""

    where: str
    got: str
    why: str
    fix: str


@dataclass
class Failure:
    """The first failing rank as far as it can be told: its log holds the rest.

    `kind`: error (it raised), memory, peer (it lost another rank), killed, stall, host, launcher, limit.
    """

    rank: int | None
    host: str | None
    message: str
    log: Path
    kind: str = "error"


class UserError(Exception):
    """One or more problems of the request, reported together; `code` is the process's exit code."""

    def __init__(self, *problems: Problem, code: int = EXIT_REQUEST) -> None:
        assert problems, "a UserError without a problem says nothing"
        super().__init__("; ".join(f"{p.where}: {p.why}" for p in problems))
        self.problems = problems
        self.code = code


def raise_if(problems: list[Problem], code: int = EXIT_REQUEST) -> None:
    """Raises one UserError that holds all `problems`, or does nothing for an empty list."""
    if problems:
        raise UserError(*problems, code=code)


def format_problems(problems: tuple[Problem, ...] | list[Problem], headline: str) -> str:
    """Plain text of a problem list: `headline`, then where / got / why / fix of each."""
    lines = [headline]
    for number, problem in enumerate(problems, 1):
        lines.append(f"  {number}. {problem.where}")
        for label in ("got", "why", "fix"):
            text = getattr(problem, label).replace("\n", "\n" + " " * 11)
            lines.append(f"     {label}   {text}")
    return "\n".join(lines)
