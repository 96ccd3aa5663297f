"""What each rank reads, edits and resizes through `recipes.shared.gather`, and what it finds afterwards.

Run in ranks that the engine server forks, by test_gather.py.
Must never gather a parameter in another way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from launcher.errors import UserError
from launcher.plan import Plan
from recipes.shared import distributed, gather
from recipes.shared.embeddings import resize_embeddings
from recipes.shared.engine import build_engine
from recipes.shared.model import build_model

NAME = "model.layers.0.mlp.up_proj.weight"


def _built(case: dict[str, Any]) -> Any:
    plan = Plan.from_json(case["plan"])
    return build_engine(plan, build_model(plan, distributed.initialise(plan)))


def _forward_backward(engine: Any) -> None:
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)


def _whole(parameter: torch.nn.Parameter) -> list[float]:
    with gather.read(parameter):
        return parameter.detach().flatten().tolist()


def _every(value: Any) -> list[Any]:
    """That of each rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def reading(case: dict[str, Any]) -> dict[str, Any]:
    """Everything that can be read of an engine, in a step and after it, by all ranks."""
    engine = _built(case)
    model = engine.module
    facts: dict[str, Any] = {}
    parameter = dict(model.named_parameters())[NAME]
    facts["counts"] = [gather.parameter_counts(model).total, gather.parameter_counts(model).trainable]
    facts["state before"] = gather.optimizer_state(parameter, "exp_avg") is not None
    facts["norms"] = gather.norms(model)
    facts["streamed"] = {name: list(p.shape) for name, p in gather.stream(model, 4096)}
    _forward_backward(engine)
    gradients = {name: gather.full_gradient(p) for name, p in model.named_parameters()}
    facts["gradients"] = {name: None if g is None else g.flatten().tolist() for name, g in gradients.items()}
    engine.step()
    states = {name: gather.optimizer_state(p, "exp_avg") for name, p in model.named_parameters()}
    facts["states"] = {name: None if s is None else s.flatten().tolist() for name, s in states.items()}
    facts["after"] = {name: p.detach().flatten().tolist() for name, p in gather.stream(model)}
    return {"ranks": _every(facts)}


def peak(case: dict[str, Any]) -> dict[str, Any]:
    """Most elements that were whole while the model's parameters were streamed with a limit."""
    model = _built(case).module
    whole = [sum(p.numel() for p in model.parameters()) for _ in gather.stream(model, case["at_most_bytes"])]
    left = sum(p.numel() for p in model.parameters())
    return {"most": max(whole), "left": left}


def editing(case: dict[str, Any]) -> dict[str, Any]:
    """Rank 0 writes 7 into one row of a matrix, others another number or nothing; then a step is taken."""
    engine = _built(case)
    _forward_backward(engine)
    engine.step()
    parameter = dict(engine.module.named_parameters())[NAME]
    before = _whole(parameter)
    with gather.edit([parameter]):
        if dist.get_rank() == 0 or case["all_ranks"]:
            parameter[1] = 7.0 + dist.get_rank()
    edited = _every(_whole(parameter))
    _forward_backward(engine)
    engine.step()
    return {
        "before": before,
        "edited": edited,
        "stepped": _every(_whole(parameter)),
        "width": parameter_width(parameter),
    }


def parameter_width(parameter: torch.nn.Parameter) -> int:
    return gather.shape(parameter)[1]


def writing_in_read(case: dict[str, Any]) -> dict[str, Any]:
    """Every way to write that torch can see: each has to be refused, and nothing written."""
    engine = _built(case)
    parameter = dict(engine.module.named_parameters())[NAME]
    other = torch.zeros(3)
    ways = {
        "in place": lambda: parameter.detach().mul_(2),
        "data": lambda: parameter.data.copy_(torch.zeros(gather.shape(parameter))),
        "row": lambda: parameter.data[1].fill_(1),
        "item": lambda: parameter.data.__setitem__(0, 3.0),
        "out": lambda: torch.add(parameter.data[0], 1, out=parameter.data[0]),
        "foreach": lambda: torch._foreach_add_([other, parameter.data], 1.0),
    }
    refused = {}
    for name, write in ways.items():
        try:
            with gather.read(parameter):
                write()
        except UserError as error:
            refused[name] = error.problems[0].where
    with gather.read(parameter):
        other += parameter.detach().sum()
        with gather.read([parameter]):  # within one another
            other += gather.norms(engine.module)[NAME]
        try:
            with gather.edit(parameter):
                pass
        except UserError as error:
            refused["edit in read"] = error.problems[0].where
    streamed = ""
    try:
        for _, p in gather.stream(engine.module):
            with torch.no_grad():
                p.mul_(2)
    except UserError as error:
        streamed = error.problems[0].got
    return {"refused": refused, "ways": len(ways), "streamed": streamed, "other": other.tolist()}


def resizing(case: dict[str, Any]) -> dict[str, Any]:
    """Three more tokens, then fewer than at first, then an engine and a step; then once more, too late."""
    plan = Plan.from_json(case["plan"])
    model: Any = build_model(plan, distributed.initialise(plan))
    old = _whole(model.get_input_embeddings().weight)
    seen = []
    for size in case["sizes"]:
        resize_embeddings(model, size, seed=5)
        weights = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
        seen.append(
            {
                "rows": _every(_whole(weights[0])),
                "output": _whole(weights[1]),
                "shapes": [list(gather.shape(weight)) for weight in weights],
                "here": [weight.numel() for weight in weights],
                "tied": weights[0] is weights[1],
                "vocab_size": model.config.vocab_size,
                "layers": [model.get_input_embeddings().num_embeddings, model.get_output_embeddings().out_features],
            }
        )
    engine = build_engine(plan, model)
    tokens = torch.full((2, 16), case["sizes"][-1] - 1)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    try:
        resize_embeddings(model, 70, seed=5)
        refused = ""
    except UserError as error:
        refused = error.problems[0].why
    return {"old": old, "seen": seen, "refused": refused}


def empty_parameter(case: dict[str, Any]) -> dict[str, Any]:
    """A table of no rows beside the model's layers: trained, then frozen."""
    plan = Plan.from_json(case["plan"])
    model = build_model(plan, distributed.initialise(plan))
    table = torch.nn.Parameter(torch.empty(0, 8))
    model.table = table
    try:
        build_engine(plan, model)
        said = ""
    except UserError as error:
        said = f"{error.problems[0].got}: {error.problems[0].why}"
    return {"said": said}


def held(case: dict[str, Any]) -> dict[str, Any]:
    """Bytes of parameters that each rank holds of the model it has just built, and those of the whole."""
    plan = Plan.from_json(case["plan"])
    model = build_model(plan, distributed.initialise(plan))
    shards = [p.ds_tensor for p in model.parameters()] if plan.zero_stage == 3 else list(model.parameters())
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in shards}
    return {"ranks": _every(sum(storages.values())), "whole": 4 * gather.parameter_counts(model).total}


def sparse_embedding(case: dict[str, Any]) -> dict[str, Any]:
    """An embedding that gives sparse gradients."""
    plan = Plan.from_json(case["plan"])
    model: Any = build_model(plan, distributed.initialise(plan))
    model.get_input_embeddings().sparse = True
    try:
        build_engine(plan, model)
    except UserError as error:
        return {"said": f"{error.problems[0].got}: {error.problems[0].why}"}
    return {"said": ""}
