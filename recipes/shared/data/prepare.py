"""Corpus of a plan -> its prepared folder: as a job before the run folder exists, and once per host by its ranks.

The launcher runs `run_job` so that a bad corpus is refused before anything starts; ranks call `corpus_folder`.
Must never build the same corpus twice on a host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.plan import Plan
from recipes.shared.data.build import prepare
from recipes.shared.data.corpus import open_conversations
from recipes.shared.data.meta import CONVERSATIONS, read_meta
from recipes.shared.own_code import make_data


def run_job(request: dict[str, Any]) -> dict[str, Any]:
    """Prepares request["data"]; answers with its folder, vocabulary and sizes, and what to tell the user.

    Raises UserError for a bad corpus.
    """
    if request["data"]["kind"] == "custom":
        make_data(request["data"], request["source"])
        known = dict.fromkeys(("folder", "vocab_size", "train_tokens", "tokenizer"))
        return known | {"source": request["data"]["target"], "notes": []}
    folder = prepare(request["data"], request["sequence_length"], Path(request["data"]["cache_dir"]))
    meta = read_meta(folder)
    notes = []
    if meta.layout == CONVERSATIONS:
        notes = [open_conversations(folder, request["sequence_length"], request["data"]["packing"])[1].describe()]
    return {
        "folder": str(folder),
        "vocab_size": meta.vocab_size,
        "train_tokens": meta.train_tokens,
        "source": meta.source,
        "tokenizer": meta.tokenizer,
        "notes": notes,
    }


def corpus_folder(plan: Plan, ranks: Any) -> Path:
    """The prepared folder on this host. All ranks: local rank 0 of each host builds it if missing, the rest wait."""
    import torch.distributed as dist

    data, length = plan.config.data, plan.config.train.sequence_length
    if ranks.local_rank == 0:
        prepare(data, length, Path(data["cache_dir"]))
    dist.barrier()
    return prepare(data, length, Path(data["cache_dir"]))
