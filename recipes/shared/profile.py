"""Facts about a model that only torch can tell, on the meta device: its parameters, and what is alive when in a step.

Run as a job by the launcher, which remembers the answer. A module of the user's own is counted and not run.
Must never allocate weights, or load DeepSpeed.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from launcher.errors import Problem, UserError
from launcher.plan import Plan
from launcher.rundir import write_json
from launcher.schema import RunConfig, from_dict

LONGEST_LINE = 200


def run_job(request: dict[str, Any]) -> dict[str, Any]:
    """{"parameters": n, "timeline": what `timeline.record` gives, or null, "why": of null} of one micro-batch.

    request: config (a RunConfig's fields), micro_batch_size, precision, keeps_inputs (whether linear layers keep their
    inputs as DeepSpeed's own do at stage 3), file (where to keep the answer, or null).
    Raises UserError where no model can be built.
    """
    config: RunConfig = from_dict(RunConfig, request["config"])
    if config.model.target is not None:
        why = "the module is your own, and what its batches hold is known when data is read"
        return {"parameters": count_own(config), "timeline": None, "why": why}
    model = build(config)
    answer: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters()), "timeline": None, "why": None}
    try:
        answer["timeline"] = _timeline(config, model, request)
    except UserError:
        raise
    except Exception as error:  # a family's own code may look at values, which meta tensors lack
        answer["why"] = _reason(error)
    if request["file"] is not None:
        Path(request["file"]).parent.mkdir(parents=True, exist_ok=True)
        write_json(Path(request["file"]), answer)
    return answer


def build(config: RunConfig) -> Any:
    """The model as it is trained, with an adapter and frozen parameters, on the meta device."""
    import torch

    from recipes.shared.architecture import drawn
    from recipes.shared.groups import freeze
    from recipes.shared.lora import adapted

    plan = cast(Plan, SimpleNamespace(config=config))
    try:
        with torch.device("meta"):
            model: Any = drawn(config)
            model.tie_weights()
            model = adapted(plan, model)
    except UserError:
        raise
    except Exception as error:  # whatever the family's own code raises for fields it cannot work with
        kind, fix = config.model.config.get("model_type"), "correct the fields the message speaks of, or choose another"
        why = f"no {kind} model can be built from it: {_reason(error)}"
        raise UserError(Problem("model.config", json.dumps(config.model.config)[:200], why, f"{fix} model")) from None
    freeze(plan, model)
    return model.train()


def _timeline(config: RunConfig, model: Any, request: dict[str, Any]) -> dict[str, Any]:
    import torch

    from recipes.shared.hf_config import DTYPES
    from recipes.shared.kernels import linear_of_stage3
    from recipes.shared.timeline import record

    length, chat = config.train.sequence_length, config.data.get("kind") == "chat"
    length = length // 2 if model.config.is_encoder_decoder else length  # reads one half and writes the other
    names = ["input_ids", "labels"]
    if chat:
        names.append("position_ids" if config.data.get("packing") else "attention_mask")
    shape = (request["micro_batch_size"], length)
    kernels = linear_of_stage3() if request["keeps_inputs"] else contextlib.nullcontext()
    batch = {name: torch.zeros(shape, dtype=torch.long, device="meta") for name in names}
    for parameter in model.parameters():  # DeepSpeed casts no buffer (engine.py, _cast_module_mixed_precision)
        parameter.data = parameter.data.to(DTYPES[request["precision"]])
    with kernels:
        return record(model, batch, full=not chat, leaves=config.model.leaf_modules)


def count_own(config: RunConfig) -> int | None:
    """Parameters of the user's own module, each object once; None where its code looks at values, which meta lacks."""
    import torch

    from recipes.shared.own_code import make_model

    target, arguments = str(config.model.target), config.model.config
    try:
        with torch.device("meta"):
            model = make_model(target, config.run.source, arguments)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error).lower():
            return None
        fix = "correct model.config, its keyword arguments, or its code"
        why = f"{target} cannot be built from it: {_reason(error)}"
        raise UserError(Problem("model.config", json.dumps(arguments)[:200], why, fix)) from None
    return sum(parameter.numel() for parameter in model.parameters())


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    text = "\n".join(line[:LONGEST_LINE] for line in lines[:2])  # the library may list every family it knows
    return f"{type(error).__name__}: {text}"
