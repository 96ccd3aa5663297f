"""Plan -> the samples it trains on and is evaluated on, in the form in which its model reads them.

Called by recipes on every rank, and by the check of an export in a process of its own.
Must never give two ranks other samples under the same number.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launcher.errors import Problem, UserError
from launcher.plan import Plan
from recipes.shared.data.build import prepare
from recipes.shared.data.corpus import open_conversations, open_corpus
from recipes.shared.data.prepare import corpus_folder
from recipes.shared.data.samples import Samples
from recipes.shared.data.windows import Halves
from recipes.shared.hf_config import is_encoder_decoder
from recipes.shared.own_code import make_data


@dataclass(frozen=True)
class Splits:
    """Both splits, and the entropy of the training tokens where they are tokens, in nats."""

    training: Samples
    validation: Samples
    unigram_entropy: float | None
    digest: str | None
    """Of a prepared corpus; None where it is not known."""


def open_splits(plan: Plan, ranks: Any = None) -> Splits:
    """Opens the plan's data. With `ranks` all of them call it, and one process of each host prepares what is missing.

    Raises UserError for data that cannot be used.
    """
    data, length = plan.config.data, plan.config.train.sequence_length
    if data["kind"] == "custom":
        return _agreed(Splits(*make_data(data, plan.config.run.source), None, None), data, ranks)
    halves = plan.config.model.target is None and is_encoder_decoder(plan.config.model.config)
    if halves and data["kind"] == "chat":
        why = "an encoder-decoder would read the responses that it is to write"
        raise UserError(Problem("data.kind", "chat", why, "use a model that continues a sequence, or data=custom"))
    folder = prepare(data, length, Path(data["cache_dir"])) if ranks is None else corpus_folder(plan, ranks)
    if data["kind"] == "chat":
        meta, packed, padded = open_conversations(folder, length, data["packing"])
        return Splits(packed, padded, meta.unigram_entropy, meta.digest)
    meta, training, validation = open_corpus(folder, length)
    if halves:
        return Splits(Halves(training), Halves(validation), meta.unigram_entropy, meta.digest)
    return Splits(training, validation, meta.unigram_entropy, meta.digest)


def _agreed(splits: Splits, data: dict[str, Any], ranks: Any) -> Splits:
    """The splits; raises UserError on every rank where the user's function gave ranks different numbers of samples."""
    mine = (len(splits.training), len(splits.validation))
    every: list[Any] = [mine]
    if ranks is not None:
        every *= ranks.world_size
        dist.all_gather_object(every, mine)
    if len(set(every)) > 1:
        why = f"it gave the ranks different numbers of samples, {every}: it is for us to share them out"
        raise UserError(Problem("data.target", data["target"], why, "return the same samples on every rank"))
    return splits
