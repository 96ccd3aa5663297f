"""The reference: a plain PyTorch loop in one process, no DeepSpeed, on the same model, data order and global batches.

Used by the parity tests. Reads the plan of a run; the learning rate of each step is the one the plan's schedule gives.
Must never import anything of the product's loop, engine or sharding.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from launcher.plan import Plan, read_plan
from recipes.shared.data.order import sample_indices
from recipes.shared.data.splits import open_splits
from recipes.shared.evaluate import on_device
from recipes.shared.lora import adapted
from recipes.shared.model import from_config
from recipes.shared.objective import objective_of


def initial_model(plan: Plan) -> torch.nn.Module:
    """The model as plain PyTorch builds it after seeding, with its adapter where the plan has one."""
    torch.manual_seed(plan.config.run.seed)
    return adapted(plan, from_config(plan))


def scheduled_lr(plan: Plan, step: int) -> float:
    """Learning rate of optimizer step `step` (from 1): DeepSpeed counts from -1, and warm-up starts at ratio 0."""
    lr = plan.deepspeed["optimizer"]["params"]["lr"]
    scheduler = plan.deepspeed.get("scheduler")
    if scheduler is None:
        return float(lr)
    params, position = scheduler["params"], step - 2
    warmup, total = max(2, params["warmup_num_steps"]), params["total_num_steps"]
    if position < warmup:
        return float(lr * max(position, 0) / warmup)
    progress = min(1.0, (position - warmup + 1) / max(1, total - warmup))
    low = params["cos_min_ratio"]
    return float(lr * max(0.0, low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2))


def plain_losses(run: Path) -> list[float]:
    """Loss of every optimizer step of the plain loop for the plan of `run`."""
    return [loss for loss, _ in plain_steps(read_plan(run / "plan.json"))]


def plain_steps(plan: Plan) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of every optimizer step of the plain loop."""
    config, batch = plan.config, plan.batch.global_batch_size
    training, objective = open_splits(plan).training, objective_of(plan)
    model = initial_model(plan)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    params = plan.deepspeed["optimizer"]["params"]
    optimizer = torch.optim.AdamW(
        trained,
        lr=params["lr"],
        betas=tuple(params["betas"]),
        eps=params["eps"],
        weight_decay=params["weight_decay"],
    )
    found = []
    for step in range(1, config.run.steps + 1):
        indices = sample_indices(config.run.seed, len(training), (step - 1) * batch, batch)
        for group in optimizer.param_groups:
            group["lr"] = scheduled_lr(plan, step)
        loss = objective.loss(model, on_device(training.batch(indices), torch.device("cpu")))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, plan.deepspeed["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), float(norm)))
    return found
