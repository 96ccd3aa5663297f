"""A rank of the planner bench: loads DeepSpeed once, then forks a process for each plan, which measures and leaves.

Started by `benches.planner` through the stock `deepspeed` launcher with a request file. An engine is never freed, so
each plan needs a process of its own; loading what it needs would take longer than the measurement.
Must never join a process group, or touch a GPU, in the process that forks.
"""

# ruff: noqa: E402 - the checkout goes on the path first, in place of this folder

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(SCRIPTS.parent), str(SCRIPTS)]

import torch.distributed as dist
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401 - a family is imported at its first use
from deepspeed.accelerator import get_accelerator

from benches.memory_rank import measure
from launcher.rundir import drop_shared_memory, write_json

LIMIT_S = 300


def main(request_file: Path) -> None:
    """One answer a plan and rank beside the request: what `measure` found, or {"error": text}."""
    request = json.loads(request_file.read_text(encoding="utf-8"))
    rank = int(os.environ["RANK"])
    gc.freeze()
    for number, case in enumerate(request["cases"]):
        answer = request_file.with_name(f"case{number}.rank{rank}.json")
        pid = os.fork()
        if pid == 0:
            _measure(case, answer, request_file.with_name(f"store{number}"))
        _wait(pid, answer)
    sys.stdout.flush()
    os._exit(0)  # as the product's workers leave


def _measure(case: dict[str, Any], answer: Path, store: Path) -> None:
    try:
        backend = "gloo" if get_accelerator().device_name() == "cpu" else "nccl"
        world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        dist.init_process_group(backend, f"file://{store}", world_size=world_size, rank=rank)
        found = measure(case)
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    write_json(answer, found)
    drop_shared_memory(os.environ.get("MASTER_PORT"))
    os._exit(0)


def _wait(pid: int, answer: Path) -> None:
    """Waits for a measurement, which is given up when another rank's failed."""
    until = time.monotonic() + LIMIT_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        others = answer.parent.glob(f"{answer.name.split('.')[0]}.rank*.json")
        failed = any("error" in path.read_text(encoding="utf-8") for path in others)
        if failed or time.monotonic() > until:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            write_json(answer, {"error": "another rank failed, or it took too long"})
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
