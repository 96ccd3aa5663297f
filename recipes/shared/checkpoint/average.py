"""A checkpoint with the moving average of its weights in place of the weights.

Called by export. Torch is needed by nothing here: entries are views of the shards.
Must never mix averaged and trained weights: all that are trained are averaged, or it is an error.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from launcher.errors import Problem, UserError
from recipes.shared.checkpoint.entries import Checkpoint
from recipes.shared.checkpoint.reader import open_optimizer

KEY = "ema"  # the average's name among the optimizer's states


def averaged(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    """`checkpoint`, of `folder`, with averages for all that is trained. Raises UserError where it has none."""
    averages = {entry.name: entry for entry in open_optimizer(folder).moments.get(KEY, ())}
    missing = [entry.name for entry in checkpoint if entry.trainable and entry.name not in averages]
    if missing:
        why = f"{folder.name} has no moving average of {', '.join(missing[:3])}"
        raise UserError(
            Problem("export.weights", KEY, why, "train with ema.decay=0.999, or use export.weights=trained")
        )
    return dataclasses.replace(checkpoint, entries=tuple(averages.get(entry.name, entry) for entry in checkpoint))
