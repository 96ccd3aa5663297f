"""Stands for DeepSpeed in the config bench: which configurations its own parser refuses.

Run as a process: a JSON list of configurations on stdin; on stdout, as the last line, a list of messages or nulls.
Must never start an engine: what is only found then has already cost a job its start.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any


def refusal(configuration: dict[str, Any]) -> str | None:
    """The first line of what DeepSpeedConfig raises for it, or None when it is accepted."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1} | configuration)
    except Exception as error:  # whatever it raises is a refusal
        return (str(error) or type(error).__name__).splitlines()[0]
    return None


def main() -> None:
    """Answers for every configuration of stdin."""
    with contextlib.redirect_stdout(sys.stderr):
        answers = [refusal(configuration) for configuration in json.load(sys.stdin)]
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
