"""Facts about a model that only torch can tell: its parameter count, on the meta device, cached by configuration.

Run as a job by the launcher for model families whose shapes it does not know.
Must never allocate weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from launcher.rundir import read_json, write_json


def run_job(request: dict[str, Any]) -> dict[str, Any]:
    """{"parameters": n} of request["config"]; tied weights once. Raises UserError for an unknown family."""
    key = hashlib.sha256(json.dumps(request["config"], sort_keys=True).encode()).hexdigest()[:24]
    cached = Path(request["cache"]) / f"{key}.json"
    known = read_json(cached)
    if known is not None:
        return dict(known)
    answer = {"parameters": count_parameters(request["config"])}
    cached.parent.mkdir(parents=True, exist_ok=True)
    write_json(cached, answer)
    return answer


def count_parameters(fields: dict[str, Any]) -> int:
    """Parameters of the causal language model of these Hugging Face configuration fields, each object once."""
    import torch
    from transformers import AutoModelForCausalLM

    from recipes.shared.model import make_config

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(make_config(fields))
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())
