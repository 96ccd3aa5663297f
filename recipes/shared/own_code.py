"""A user's own model, data or recipe, named by a target -> the object, checked against the few lines it has to keep.

A model is a `torch.nn.Module` built from `model.config` as keyword arguments. Its `forward(**batch)` returns the mean
loss of the batch: a scalar, or an object or mapping with `loss`. A method `sample_losses(**batch)` that returns the
loss of each sample, fp32 [n], makes evaluation faster: without it samples are evaluated one at a time.
Data is a function that `data.config` is given to as keyword arguments; it returns training and validation samples as in
`recipes.shared.data.samples`, of which `weights` may be left out. A recipe is called with a plan and its run folder.
Must never import anything before a plan or a request names it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.errors import Problem, UserError
from recipes.shared.data.samples import Samples


def load(where: str, target: str, source: str | None) -> Any:
    """The object that `target`, MODULE.NAME, names; `source` is searched before what is installed, after this project.

    Raises UserError, with the cause behind it, where it cannot be imported.
    """
    if source is not None and source not in sys.path:
        sys.path.insert(1, source)
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        fix = "see the cause above in this log; run.source=FOLDER names the folder that holds the module"
        raise UserError(Problem(where, target, f"it cannot be imported: {error}", fix)) from error


def make_model(target: str, source: str | None, config: dict[str, Any]) -> Any:
    """The user's module; raises UserError for anything else."""
    from torch import nn

    model = load("model.target", target, source)(**config)
    if not isinstance(model, nn.Module):
        why = f"it gives a {type(model).__name__}, and a model is a torch.nn.Module"
        raise UserError(Problem("model.target", target, why, "name a class of modules, or a function that makes one"))
    return model


def make_data(data: dict[str, Any], source: str | None) -> tuple[Samples, Samples]:
    """Training and validation samples of the user's function; raises UserError for what has no numbered samples."""
    target = data["target"]
    made = load("data.target", target, source)(**data["config"])
    if not isinstance(made, tuple) or len(made) != 2:
        why = f"it gives a {type(made).__name__}, not training and validation samples"
        raise UserError(Problem("data.target", target, why, "return (training, validation)"))
    return _numbered(target, "training", made[0]), _numbered(target, "validation", made[1])


def _numbered(target: str, split: str, samples: Any) -> Samples:
    """The samples, with equal weights where they have none."""
    if not (hasattr(samples, "__len__") and callable(getattr(samples, "batch", None))):
        why = (
            f"the {split} samples, a {type(samples).__name__}, are not found by number: ranks that iterate have no "
            "common order, and may come to different ends"
        )
        fix = "give them __len__() and batch(indices), which returns a dict of arrays"
        raise UserError(Problem("data.target", target, why, fix))
    if len(samples) == 0 and split == "training":
        raise UserError(Problem("data.target", target, "there are no training samples", "return at least one"))
    return samples if callable(getattr(samples, "weights", None)) else _Equal(samples)


class _Equal:
    """Samples that all count the same."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def batch(self, indices: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.generic]]:
        return dict(self.samples.batch(indices))

    def weights(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        return np.ones(len(indices), dtype=np.float64)
