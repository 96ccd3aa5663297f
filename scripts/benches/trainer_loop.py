"""The other yardstick: one plan trained by Hugging Face's Trainer with its DeepSpeed integration.

Started by `benches.sides` as `bare_loop` is, with the same request; rank 0 writes the same result file.
Must never have the Trainer log, evaluate or save: what is timed are its steps alone.
"""

# ruff: noqa: E402 - the checkout goes on the path first, in place of this folder

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent.parent)

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import Trainer, TrainerCallback, TrainingArguments

from launcher.plan import Plan, read_plan
from recipes.shared.data.corpus import open_corpus
from recipes.shared.data.order import sample_indices
from recipes.shared.distributed import Ranks
from recipes.shared.model import build_model


class Rows:
    """The samples of the whole run in the product's own order: row j is the run's j-th."""

    def __init__(self, plan: Plan, corpus: Path) -> None:
        _, self.training, _ = open_corpus(corpus, plan.config.train.sequence_length)
        count = plan.config.run.steps * plan.batch.global_batch_size
        self.indices = sample_indices(plan.config.run.seed, len(self.training), 0, count)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.training.tokens(self.indices[row : row + 1])[0])
        return {"input_ids": tokens, "labels": tokens}


class Clock(TrainerCallback):
    """When each optimizer step ended; the accelerator is waited for at three of them only.

    `warm`: the file that says that the first `skip` steps are over.
    """

    def __init__(self, skip: int, steps: int, warm: Path) -> None:
        self.skip, self.warm = skip, warm
        self.waits = {0, skip - 1, steps - 1}
        self.step_ends: list[float] = []
        self.first_step_time = 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if len(self.step_ends) in self.waits:
            get_accelerator().synchronize()
        self.step_ends.append(time.perf_counter())
        self.first_step_time = self.first_step_time or time.time()
        if len(self.step_ends) == self.skip:
            self.warm.touch()


class Noting(Trainer):
    """A Trainer that keeps the losses it differentiates: each is its share of the step's."""

    noted: list[torch.Tensor]

    def compute_loss(self, *arguments: Any, **options: Any) -> Any:
        loss = super().compute_loss(*arguments, **options)
        self.noted.append(loss.detach())
        return loss


def arguments_of(plan: Plan) -> TrainingArguments:
    """What says to the Trainer what the plan's DeepSpeed dict says already."""
    params = plan.deepspeed["optimizer"]["params"]
    return TrainingArguments(
        output_dir=str(Path.cwd() / "unused"),
        max_steps=plan.config.run.steps,
        per_device_train_batch_size=plan.batch.micro_batch_size,
        gradient_accumulation_steps=plan.batch.gradient_accumulation_steps,
        learning_rate=params["lr"],
        adam_beta1=params["betas"][0],
        adam_beta2=params["betas"][1],
        adam_epsilon=params["eps"],
        weight_decay=params["weight_decay"],
        max_grad_norm=plan.deepspeed["gradient_clipping"],
        lr_scheduler_type="constant",
        bf16=plan.precision == "bf16",
        fp16=plan.precision == "fp16",
        train_sampling_strategy="sequential",
        seed=plan.config.run.seed,
        use_cpu=plan.cluster.accelerator == "cpu",
        deepspeed=plan.deepspeed,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )


def main(request_file: Path) -> None:
    """All ranks. Trains the request's plan to its last step."""
    request = json.loads(request_file.read_text(encoding="utf-8"))
    plan = read_plan(Path(request["plan"]))
    steps = plan.config.run.steps
    deepspeed.init_distributed()
    rank, world_size, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
    device = torch.device(get_accelerator().device_name(local_rank))
    get_accelerator().set_device(local_rank)
    model = build_model(plan, Ranks(rank, local_rank, world_size, device))
    clock = Clock(request["skip"], steps, Path(request["warm"]))
    trainer = Noting(
        model=model, args=arguments_of(plan), train_dataset=Rows(plan, Path(request["corpus"])), callbacks=[clock]
    )
    trainer.noted = []
    trainer.train()
    found = torch.stack(trainer.noted).double().view(steps, -1).sum(dim=1)
    dist.all_reduce(found)
    if rank == 0:
        losses = np.asarray(found.cpu()) / world_size
        result = {
            "losses": losses.tolist(),
            "step_ends": clock.step_ends,
            "first_step_time": clock.first_step_time,
        }
        Path(request["result"]).write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)  # as the bare loop leaves


if __name__ == "__main__":
    main(Path(sys.argv[1]))
