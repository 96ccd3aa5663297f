"""A checkpoint of one layout -> an engine of another: another world size, stage, offload or precision.

Called by `load` on every rank. Each rank reads, from the mapped shards of all old ranks, just the elements that are its
own in the new layout: masters, moments, step, learning rate. Nothing is converted on disk.
Must never leave an engine half old and half new: what cannot be laid out anew is refused before anything is written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed import version
from deepspeed.runtime.utils import all_gather_dp_groups
from torch import nn

from launcher.errors import Problem, UserError
from recipes.shared import gather
from recipes.shared.checkpoint.average import KEY as AVERAGE
from recipes.shared.checkpoint.entries import Entry
from recipes.shared.checkpoint.reader import OptimizerState, open_checkpoint, open_optimizer
from recipes.shared.masters import stepping
from recipes.shared.state import TrainState

# Optimizers whose state is a step and tensors of the parameter's own shape.
SUPPORTED = {
    *("AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam"),
    *("SGD", "FusedLion", "DeepSpeedCPULion", "Adagrad", "DeepSpeedCPUAdagrad"),
}


def load(state: TrainState, folder: Path) -> None:
    """Brings the engine to the state in `folder`. All ranks; raises UserError for a state it cannot lay out anew."""
    engine = state.engine
    inner = stepping(engine)
    _refuse_unsupported(engine, type(inner).__name__, folder)
    stored, optimizer = open_checkpoint(folder), open_optimizer(folder)
    masters = {entry.name: entry for entry in stored if entry.trainable}
    wanted = {key for key in optimizer.moments if key != AVERAGE or state.plan.config.ema.decay is not None}
    moments = {key: {entry.name: entry for entry in optimizer.moments[key]} for key in sorted(wanted)}
    names = {id(parameter): name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    if set(names.values()) != masters.keys():
        odd = sorted(set(names.values()) ^ masters.keys())
        raise UserError(
            Problem(str(folder), ", ".join(odd[:5]), "the model has other trainable parameters", "resume its own model")
        )
    refuse_missing(engine.module, {entry.name for entry in stored}, folder)
    tensors = {"master": masters} | moments
    stage = engine.zero_optimization_stage()
    if stage == 3:
        _load_stage3(engine.optimizer, names, tensors, optimizer, state)
    elif stage in (1, 2):
        _load_stage12(engine.optimizer, names, tensors, optimizer, state)
    else:
        _load_stage0(engine, tensors, optimizer, state)
    _load_rest(engine, [entry for entry in stored if not entry.trainable])
    if engine.lr_scheduler is not None and optimizer.schedule:
        engine.lr_scheduler.load_state_dict(optimizer.schedule)
    engine.skipped_steps = optimizer.skipped_steps


def refuse_missing(module: nn.Module, names: set[str], folder: Path) -> None:
    """Raises UserError, by name, when the checkpoint lacks a parameter: a frozen one would keep a value drawn anew."""
    missing = [name for name, _ in module.named_parameters() if name not in names]
    if missing:
        got, why = f"{len(missing)} tensors are missing", f"the model has {', '.join(missing[:5])}, and it does not"
        raise UserError(Problem(str(folder), got, why, "choose another checkpoint"))


def _refuse_unsupported(engine: Any, kind: str, folder: Path) -> None:
    got = None
    if kind not in SUPPORTED:
        got, why = kind, "its state is not of the parameters' shapes"
    elif type(engine.optimizer).__name__ == "BF16_Optimizer":
        got, why = "bf16 at stage 1 with fp32 accumulation", "DeepSpeed keeps its state in another form"
    elif getattr(engine.optimizer, "swap_optimizer", False):
        got, why = "offload=nvme", "its state lies in swap files of its own layout"
    if got is not None:
        fix = "resume with the world size, stage, offload and precision of the checkpoint"
        raise UserError(Problem(str(folder), got, f"it cannot be laid out anew: {why}", fix))


Tensors = dict[str, dict[str, Entry]]


def _load_stage3(
    optimizer: Any, names: dict[int, str], tensors: Tensors, saved: OptimizerState, state: TrainState
) -> None:
    """Sub-groups of parameters; of each this rank has elements [rank x share, (rank + 1) x share), then zeros."""
    flats: dict[str, list[torch.Tensor]] = {key: [] for key in tensors}
    for group in optimizer.fp16_groups:
        shares = [parameter.partition_numel() for parameter in group]
        for key, entries in tensors.items():
            flat, offset = torch.zeros(sum(shares)), 0
            for parameter, share in zip(group, shares, strict=True):
                own = flat[offset : offset + share].numpy()
                entries[names[id(parameter)]].read_into(own, state.ranks.rank * share)
                offset += share
            flats[key].append(flat)
    optimizer._set_fp32_optimizer_param_groups()
    inner = _inner_state(optimizer.optimizer, flats, saved, state)
    optimizer._clear_fp32_optimizer_param_groups()
    optimizer._rigid_load_state_dict(
        {
            "loss_scaler": optimizer.loss_scaler,
            "dynamic_loss_scale": optimizer.dynamic_loss_scale,
            "overflow": False,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": flats["master"],
        }
    )
    optimizer._partition_all_parameters()  # small ones are kept whole: the copies are those of the initial weights
    if optimizer.persistent_parameters:
        optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)


def _load_stage12(
    optimizer: Any, names: dict[int, str], tensors: Tensors, saved: OptimizerState, state: TrainState
) -> None:
    """Each group is one flat vector of parameters end to end, padded at its end and cut into equal parts."""
    rank, world_size = state.ranks.rank, state.ranks.world_size
    flats: dict[str, list[torch.Tensor]] = {key: [] for key in tensors}
    for group, parameters in enumerate(optimizer.round_robin_bit16_groups):
        size = optimizer.bit16_groups_flat[group].numel() // world_size
        start = rank * size
        for key, entries in tensors.items():
            flat = torch.zeros(size)
            for parameter, offset in zip(parameters, optimizer.round_robin_bit16_offsets[group], strict=True):
                low, high = max(start, offset), min(start + size, offset + parameter.numel())
                if low < high:
                    entries[names[id(parameter)]].read_into(flat[low - start : high - start].numpy(), low - offset)
            flats[key].append(flat)
    of_ranks: list[Any] = [None] * world_size
    of_ranks[rank] = {
        "loss_scaler": optimizer.loss_scaler,
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": False,
        "clip_grad": optimizer.clip_grad,
        "ds_version": version,
        "base_optimizer_state": _inner_state(optimizer.optimizer, flats, saved, state),
        "single_partition_of_fp32_groups": flats["master"],
        "param_alignment_paddings": optimizer.round_robin_bit16_padding,
    }
    optimizer._load_legacy_checkpoint(of_ranks, load_optimizer_states=True, load_from_fp32_weights=True)
    for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
        optimizer.parallel_partitioned_bit16_groups[group][rank].data.copy_(master.data)
    all_gather_dp_groups(
        groups_flat=optimizer.bit16_groups_flat,
        partitioned_param_groups=optimizer.parallel_partitioned_bit16_groups,
        dp_process_group=optimizer.real_dp_process_group,
        start_alignment_factor=optimizer.nccl_start_alignment_factor,
        allgather_bucket_size=optimizer.allgather_bucket_size,
    )
    for group in range(len(optimizer.bit16_groups)):
        optimizer._update_model_bit16_weights(group)


def _load_stage0(engine: Any, tensors: Tensors, saved: OptimizerState, state: TrainState) -> None:
    """Whole parameters, each with a state of its own, on every rank."""
    inner = stepping(engine)
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    order = [parameter for group in inner.param_groups for parameter in group["params"]]
    for parameter in order:
        parameter.data.copy_(tensors["master"][names[id(parameter)]].read())
    flats = {key: [entries[names[id(parameter)]].read() for parameter in order] for key, entries in tensors.items()}
    inner.load_state_dict(_inner_state(inner, flats, saved, state))


def _inner_state(
    inner: torch.optim.Optimizer, flats: dict[str, list[torch.Tensor]], saved: OptimizerState, state: TrainState
) -> dict[str, Any]:
    """State dict of the optimizer inside: the plan's hyper-parameters, the checkpoint's moments, step and, under a
    schedule, learning rate."""
    template = inner.state_dict()
    scheduled = state.engine.lr_scheduler is not None
    for number, group in enumerate(template["param_groups"]):
        old = saved.groups[min(number, len(saved.groups) - 1)]
        if scheduled and "lr" in old:
            group["lr"] = old["lr"]
        if "step" in old:
            group["step"] = saved.step
    step: Any = saved.step
    if type(inner).__name__ in ("AdamW", "Adam", "Adagrad") and type(inner).__module__.startswith("torch."):
        step = torch.tensor(float(saved.step))
    numbers = [number for group in template["param_groups"] for number in group["params"]]
    template["state"] = {
        number: {"step": step} | {key: flats[key][place] for key in flats if key != "master"}
        for place, number in enumerate(numbers)
    }
    if type(inner).__name__ == "SGD":
        for values in template["state"].values():
            del values["step"]
    return dict(template)


def _load_rest(engine: Any, entries: list[Entry]) -> None:
    """Frozen parameters and buffers, with the element type the model has them in. All ranks."""
    parameters: dict[str, nn.Parameter] = dict(engine.module.named_parameters())
    buffers = dict(engine.module.named_buffers())
    for entry in entries:
        if entry.name in parameters:
            parameter = parameters[entry.name]
            with gather.edit([parameter]):
                if engine.global_rank == 0:
                    parameter.copy_(entry.read())
        elif entry.name in buffers:
            buffers[entry.name].data.copy_(entry.read())
