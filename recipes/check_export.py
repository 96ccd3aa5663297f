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
from launcher.plan import Plan, read_plan
from launcher.rundir import RunDir
from recipes.shared.adapter import ADAPTER_CONFIG
from recipes.shared.checkpoint.fixed_batch import SAMPLES, tolerance
from recipes.shared.data.build import prepare
from recipes.shared.data.corpus import open_corpus
from recipes.shared.evaluate import on_device
from recipes.shared.hf_config import DTYPES
from recipes.shared.hf_files import CONFIG
from recipes.shared.losses import CausalLM

ROOM = 1.3  # of the weights' bytes: they are read into memory once, and a few samples pass through


def run_job(request: dict[str, Any]) -> dict[str, Any]:
    """{"loss"} of request["folder"], or {"skipped": why}; raises UserError when it is not request["expected"].

    An adapter is put into the folder of weights that its run began with; it is skipped where that is no such folder.
    """
    plan = read_plan(RunDir(request["run_dir"]).plan)
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


def _loss(plan: Plan, folder: Path, base: Path | None, dtype: str) -> float:
    """Mean loss in nats/token over the first SAMPLES validation samples."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    data, length = plan.config.data, plan.config.train.sequence_length
    validation = open_corpus(prepare(data, length, Path(data["cache_dir"])), length)[2]
    count = min(plan.config.eval.samples, len(validation), SAMPLES)
    weights = base or folder
    model: Any = AutoModelForCausalLM.from_pretrained(weights, dtype=DTYPES[dtype], local_files_only=True)
    if base is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, folder)
    model.eval()
    with torch.no_grad():
        losses = [
            float(
                CausalLM().sample_losses(model, on_device(validation.batch(np.array([number])), model.device)).double()
            )
            for number in range(count)
        ]
    return sum(losses) / count
