"""An exported folder -> its loss on the checkpoint's fixed batch, computed by Hugging Face alone.

Run as a job by the launcher, in a process that has never seen the checkpoint.
Must never load DeepSpeed, or a model that does not fit this machine's memory.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from launcher.errors import EXIT_TRAINING, Problem, UserError
from launcher.plan import Plan
from recipes.shared.adapter_export import ADAPTER_CONFIG
from recipes.shared.checkpoint.fixed_batch import SAMPLES, tolerance
from recipes.shared.data.splits import open_splits
from recipes.shared.evaluate import on_device
from recipes.shared.hf_config import DTYPES, make_config, model_class
from recipes.shared.hf_files import CONFIG
from recipes.shared.objective import objective_of
from recipes.shared.own_code import make_model
from recipes.shared.pretrained import load_whole

ROOM = 1.3  # of the weights' bytes: they are read into memory once, and a few samples pass through


def run_job(request: dict[str, Any]) -> dict[str, Any]:
    """{"loss"} of request["folder"], or {"skipped": why}; raises UserError when it is not request["expected"].

    request: plan of the run, folder, expected, dtype, bytes of the weights. An adapter is put into the folder of
    weights that its run began with; it is skipped where that is no such folder.
    """
    plan = Plan.from_json(request["plan"])
    folder, base = Path(request["folder"]), None
    if (folder / ADAPTER_CONFIG).is_file():
        base = Path(plan.config.model.init_from or "")
        if plan.config.model.init_from is None or not (base / CONFIG).is_file():
            return {"skipped": "the run did not begin with a Hugging Face folder, into which the adapter could be put"}
    weights = request["bytes"] + sum(file.stat().st_size for file in (base.glob("*.safetensors") if base else ()))
    needed, free = int(ROOM * weights), psutil.virtual_memory().available
    if needed > free:
        return {"skipped": f"the model needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"}
    found = _loss(plan, folder, base, request["dtype"])
    expected = request["expected"]
    if not math.isclose(found, expected, rel_tol=tolerance(plan.precision, request["dtype"])):
        raise UserError(
            Problem(
                "export.verify",
                request["folder"],
                f"reloaded, the model's loss on the fixed batch is {found}; it was {expected} when it was saved",
                "the exported weights or config are another model's: report it, with the run's plan.json",
            ),
            code=EXIT_TRAINING,
        )
    return {"loss": found}


def _loaded(plan: Plan, folder: Path, dtype: str) -> Any:
    """The model in `folder`: by Hugging Face, or a module of the user's own, made and filled with its tensors."""
    section = plan.config.model
    if section.target is not None:
        model = make_model(section.target, plan.config.run.source, section.config)
        load_whole(model, folder)
        return model
    family = model_class(make_config(section.config))
    return family.from_pretrained(folder, dtype=DTYPES[dtype], local_files_only=True)


def _loss(plan: Plan, folder: Path, base: Path | None, dtype: str) -> float:
    """Mean loss in nats/token over the first SAMPLES validation samples, each by its weight."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    validation, objective = open_splits(plan).validation, objective_of(plan)
    count = min(plan.config.eval.samples, len(validation), SAMPLES)
    model = _loaded(plan, base or folder, dtype)
    if base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    model.eval()
    numbers, losses = np.arange(count), []
    with torch.no_grad():
        for number in numbers:
            batch = on_device(validation.batch(numbers[number : number + 1]), torch.device("cpu"))
            losses.append(float(objective.sample_losses(model, batch).double()))
    return float(np.average(losses, weights=validation.weights(numbers)))
