"""The yardstick: one plan trained by DeepSpeed alone, with the least a careful user would write.

Started by `benches.sides` through the stock `deepspeed` launcher with a request file; rank 0 writes the result file.
Must never log, synchronise or check anything within a step, nor use the product's loop, engine or metrics.
"""

# ruff: noqa: E402 - the checkout goes on the path first, in place of this folder

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from launcher.plan import read_plan
from recipes.shared.data.corpus import open_corpus
from recipes.shared.data.order import sample_indices
from recipes.shared.distributed import Ranks
from recipes.shared.model import build_model


def main(request_file: Path) -> None:
    """All ranks. Trains the request's plan to its last step; the accelerator is waited for at three steps only."""
    request = json.loads(request_file.read_text(encoding="utf-8"))
    plan = read_plan(Path(request["plan"]))
    batch, steps, waits = plan.batch, plan.config.run.steps, {0, request["skip"] - 1, plan.config.run.steps - 1}

    deepspeed.init_distributed()
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device(get_accelerator().device_name(local_rank))
    get_accelerator().set_device(local_rank)
    model = build_model(plan, Ranks(rank, local_rank, world_size, device))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=plan.deepspeed)
    _, training, _ = open_corpus(Path(request["corpus"]), plan.config.train.sequence_length)

    losses, step_ends, first_step_time = [], [], 0.0
    shape = (batch.gradient_accumulation_steps, world_size, batch.micro_batch_size)
    for step in range(steps):
        start = step * batch.global_batch_size
        indices = sample_indices(plan.config.run.seed, len(training), start, batch.global_batch_size).reshape(shape)
        for micro in range(batch.gradient_accumulation_steps):
            tokens = torch.from_numpy(training.tokens(indices[micro, rank])).to(device, non_blocking=True)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        if step in waits:
            get_accelerator().synchronize()
        step_ends.append(time.perf_counter())
        first_step_time = first_step_time or time.time()
        if step == request["skip"] - 1:
            Path(request["warm"]).touch()

    means = torch.stack(losses).double().view(steps, -1).mean(dim=1)
    dist.all_reduce(means)
    if rank == 0:
        result = {
            "losses": (means / world_size).tolist(),
            "step_ends": step_ends,
            "first_step_time": first_step_time,
        }
        Path(request["result"]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # as the product's workers leave: an orderly exit with torch in it was seen to abort, after the result


if __name__ == "__main__":
    main(Path(sys.argv[1]))
