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
from launcher.plan import read_plan
from launcher.rundir import RunDir
from recipes.shared.checkpoint.fixed_batch import SAMPLES, tolerance
from recipes.shared.data.build import prepare
from recipes.shared.data.corpus import open_corpus
from recipes.shared.hf_config import DTYPES
from recipes.shared.losses import causal_lm_sample_losses

ROOM = 1.3  # of the weights' bytes: they are read into memory once, and a few samples pass through


def run_job(request: dict[str, Any]) -> dict[str, Any]:
    """{"loss"} of request["folder"], or {"skipped": why}; raises UserError when it is not request["expected"]."""
    needed, free = int(ROOM * request["bytes"]), psutil.virtual_memory().available
    if needed > free:
        return {"skipped": f"the model needs {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} are free"}
    plan = read_plan(RunDir(request["run_dir"]).plan)
    found = _loss(plan, Path(request["folder"]), request["dtype"])
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


def _loss(plan: Any, folder: Path, dtype: str) -> float:
    """Mean loss in nats/token over the first SAMPLES validation samples."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    data, length = plan.config.data, plan.config.train.sequence_length
    validation = open_corpus(prepare(data, length, Path(data["cache_dir"])), length)[2]
    count = min(plan.config.eval.samples, len(validation), SAMPLES)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], local_files_only=True).eval()
    with torch.no_grad():
        losses = [
            float(causal_lm_sample_losses(model, torch.from_numpy(validation.batch(np.array([number])))).double())
            for number in range(count)
        ]
    return sum(losses) / count
