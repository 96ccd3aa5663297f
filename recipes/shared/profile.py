"""Facts about a model that only torch can tell: its parameter count, on the meta device, cached by configuration.

Run as a job by the launcher for model families whose shapes it does not know.
Must never allocate weights.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from launcher.errors import Problem, UserError
from launcher.rundir import read_json, write_json

LONGEST_LINE = 200


def run_job(request: dict[str, Any]) -> dict[str, Any]:
    """{"parameters": n} of request["config"]; tied weights once. Raises UserError where no model can be built.

    Of a module of the user's own, request["target"]: None where it cannot be made without values. Its code may change,
    so nothing is remembered.
    """
    if request.get("target") is not None:
        return {"parameters": count_own(request["target"], request["source"], request["config"])}
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
    """Parameters of the language model of these Hugging Face configuration fields, each object once."""
    import torch

    from recipes.shared.hf_config import make_config, model_class

    try:
        config = make_config(fields)
        with torch.device("meta"):
            model = model_class(config).from_config(config)
        model.tie_weights()
    except UserError:
        raise
    except Exception as error:  # whatever the family's own code raises for fields it cannot work with
        raise UserError(
            Problem(
                "model.config",
                json.dumps(fields)[:200],
                f"no {fields['model_type']} model can be built from it: {_reason(error)}",
                "correct the fields the message speaks of, or choose another model",
            )
        ) from None
    return sum(parameter.numel() for parameter in model.parameters())


def count_own(target: str, source: str | None, config: dict[str, Any]) -> int | None:
    """Parameters of the user's own module, each object once; None where its code looks at values, which meta lacks."""
    import torch

    from recipes.shared.own_code import make_model

    try:
        with torch.device("meta"):
            model = make_model(target, source, config)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error).lower():
            return None
        fix = "correct model.config, its keyword arguments, or its code"
        why = f"{target} cannot be built from it: {_reason(error)}"
        raise UserError(Problem("model.config", json.dumps(config)[:200], why, fix)) from None
    return sum(parameter.numel() for parameter in model.parameters())


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    text = "\n".join(line[:LONGEST_LINE] for line in lines[:2])  # the library may list every family it knows
    return f"{type(error).__name__}: {text}"
