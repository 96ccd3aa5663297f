"""What each rank does with a model that stage 3 never partitions, with DeepSpeed's hooks on every module and without.

Run in ranks that the engine server forks, by test_resident.py.
Must never build two engines in one process.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes import pretrain
from recipes.shared import distributed, loop
from recipes.shared.engine import build_engine
from recipes.shared.model import build_model
from recipes.shared.resident import fetch_at_once, nothing_is_partitioned

STEPS = 5


def _engine(case: dict[str, Any]) -> Any:
    plan = Plan.from_json(case["plan"])
    engine = build_engine(plan, build_model(plan, distributed.initialise(plan)))
    if case["at_once"]:
        assert nothing_is_partitioned(engine)
        fetch_at_once(engine)
    return engine


def _tokens(step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    return torch.randint(0, 64, (2, 16), generator=generator)


def _whole(engine: Any) -> bool:
    return all(parameter.ds_status == ZeroParamStatus.AVAILABLE for parameter in engine.module.parameters())


def _partition(parameters: list[Any]) -> None:
    """As any code of a user's does that looks at them."""
    with deepspeed.zero.GatheredParameters(parameters):
        pass
    assert all(parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE for parameter in parameters)


def train(case: dict[str, Any]) -> dict[str, Any]:
    """A few steps; `partitioned`: parameters are partitioned in front of each forward, backward and step."""
    engine = _engine(case)
    model = engine.module
    parameters = list(model.parameters()) if case["partitioned"] else []
    hooks = [len(module._forward_hooks) for module in model.modules()]
    facts: dict[str, Any] = {"losses": [], "norms": [], "whole": []}
    for step in range(STEPS):
        tokens = _tokens(step)
        _partition(parameters)
        loss = engine(input_ids=tokens, labels=tokens).loss
        if case["partitioned"]:
            _partition(parameters)
        engine.backward(loss)
        engine.step()
        facts["losses"].append(loss.item())
        facts["norms"].append(float(engine.get_global_grad_norm()))
        facts["whole"].append(_whole(engine))
    facts["hooks"], facts["inside"] = [hooks[0], sum(hooks[1:])], len(hooks) - 1
    facts["partitioned"] = not nothing_is_partitioned(engine)
    return facts


def through_the_loop(case: dict[str, Any]) -> dict[str, Any]:
    """A run as workers run it: the steps that were taken when the loop had the model fetched at once."""
    taken: list[int] = []

    def noted(engine: Any) -> None:
        taken.append(engine.global_steps)
        fetch_at_once(engine)

    loop.fetch_at_once = noted
    pretrain.run(Plan.from_json(case["plan"]), RunDir(case["run_dir"]))
    return {"taken": taken}


def called_alone(case: dict[str, Any]) -> dict[str, Any]:
    """The output of the model without its head, and of its first layer's norm, called when nothing is whole."""
    engine = _engine(case)
    found = []
    for _ in range(2):
        _partition(list(engine.module.parameters()))
        with torch.no_grad():
            hidden = engine.module.model(input_ids=_tokens(0)).last_hidden_state
            _partition(list(engine.module.model.layers[0].input_layernorm.parameters()))
            normed = engine.module.model.layers[0].input_layernorm(hidden)
        found.append((hidden.double().sum().item(), normed.double().sum().item()))
        tokens = _tokens(0)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return {"found": found}
