"""A process of the init_from bench: a rank that builds its plan's model, or one alone with `from_pretrained`.

Started by `benches.init_from`; each leaves the most anonymous memory that it ever had, imports included.
Must never hold anything beside the model.
"""

# ruff: noqa: E402 - the checkout goes on the path first, in place of this folder

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(SCRIPTS.parent), str(SCRIPTS)]

import torch

from benches.memory import PeakMemory
from launcher.plan import read_plan
from launcher.rundir import drop_shared_memory, write_json


def rank(plan_file: Path) -> None:
    """All ranks: the product's own construction."""
    from recipes.shared import distributed
    from recipes.shared.model import build_model

    plan = read_plan(plan_file)
    ranks = distributed.initialise(plan)
    with PeakMemory() as memory:
        started = time.perf_counter()
        model = build_model(plan, ranks)
        seconds = time.perf_counter() - started
    held = sum(parameter.ds_tensor.numel() for parameter in model.parameters())
    whole = sum(parameter.ds_numel for parameter in model.parameters())
    assert held <= whole / ranks.world_size + 1e6, "the model is not in shards"
    write_json(plan_file.with_name(f"answer.rank{ranks.rank}.json"), {"peak": memory.peak, "seconds": seconds})
    distributed.barrier()
    drop_shared_memory(os.environ.get("MASTER_PORT"))
    os._exit(0)


def alone(request: dict[str, str]) -> None:
    """One process: draws the weights and saves them, or loads them as Hugging Face does."""
    from transformers import AutoModelForCausalLM

    from recipes.shared.hf_config import make_config

    answer = {}
    if request["what"] == "draw":
        model = AutoModelForCausalLM.from_config(make_config(request["fields"]))  # type: ignore[arg-type]  # a dict
        model.to(torch.bfloat16).save_pretrained(request["folder"], max_shard_size="1GB")
    else:
        with PeakMemory() as memory:
            started = time.perf_counter()
            model = AutoModelForCausalLM.from_pretrained(request["folder"], dtype=torch.float32)
            total = sum(
                float(parameter.detach().sum()) for parameter in model.parameters()
            )  # whatever is mapped is read
            assert math.isfinite(total)
            answer = {"peak": memory.peak, "seconds": time.perf_counter() - started}
    write_json(Path(request["answer"]), answer)


if __name__ == "__main__":
    if sys.argv[1] == "--alone":
        alone(json.loads(Path(sys.argv[2]).read_text(encoding="utf-8")))
    else:
        rank(Path(sys.argv[1]))
