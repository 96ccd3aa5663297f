"""In a rank of the elastic bench: loads a checkpoint of another layout one of the two ways, and says what it cost.

Called by `benches.rank`. Ours is the product's `restore`, theirs `engine.load_checkpoint` of a universal checkpoint.
Must never hand back a time without checksums of what was loaded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash

from benches.group import warm
from benches.memory import PeakMemory, trim
from recipes.shared.checkpoint.load import restore
from recipes.shared.distributed import barrier
from recipes.shared.state import TrainState


def work(state: TrainState, request: dict[str, Any]) -> dict[str, Any]:
    """All ranks. `universal`: the converted folder, or null for the product's own way from the plan's checkpoint."""
    assert state.plan.resume_from is not None
    universal = request["universal"]
    folder = Path(universal or state.plan.resume_from)
    if state.ranks.is_main:
        warm(folder)
    trim()
    with PeakMemory() as memory:
        barrier()
        start = time.perf_counter()
        if universal:
            loaded, _ = state.engine.load_checkpoint(str(folder.parent), tag=folder.name)
            assert loaded is not None, "DeepSpeed did not load it"
        else:
            restore(state)
        seconds = time.perf_counter() - start
    checksums = {name: checksum(tensor) for name, tensor in tensors(state.engine)}
    return {"seconds": seconds, "memory_bytes": memory.grown_bytes, "steps": steps(state.engine), "state": checksums}


def tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything a load has to bring: this rank's masters and moments, and the weights the model computes with."""
    for number, master in enumerate(masters(engine)):
        yield f"master {number}", master
        for key in ("exp_avg", "exp_avg_sq"):
            yield f"{key} {number}", engine.optimizer.optimizer.state[master][key]
    for name, parameter in engine.module.named_parameters():
        yield name, parameter.data
        if hasattr(parameter, "ds_tensor"):
            yield f"{name}, this rank's part", parameter.ds_tensor


def masters(engine: Any) -> list[torch.Tensor]:
    """This rank's flat fp32 masters, at stages 1 to 3."""
    stage3 = engine.zero_optimization_stage() == 3
    name = "fp32_partitioned_groups_flat" if stage3 else "single_partition_of_fp32_groups"
    return list(getattr(engine.optimizer, name))


def steps(engine: Any) -> list[int]:
    """Optimizer steps by the engine's count and by Adam's."""
    return [engine.global_steps, int(engine.optimizer.optimizer.state[masters(engine)[0]]["step"])]


def checksum(tensor: torch.Tensor) -> str:
    """Of the elements' bytes."""
    return xxhash.xxh3_128(tensor.detach().contiguous().view(torch.uint8).numpy()).hexdigest()
