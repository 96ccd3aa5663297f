"""optimizer.params and scheduler.params, one shape for each type, from the signatures of the classes the engine builds.

Called by make_ds_schema.py. Must never list a parameter that the engine passes itself.
"""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import sys
import typing
from typing import Any

from ds_schema import known
from ds_schema.nodes import Node, Stale, from_annotation, from_default, from_spec, of, set_default

NOT_FROM_CONFIG = ("self", "params", "model_params", "param_groups", "optimizer")


def add_optimizers(keys: dict[str, Node], refused_values: dict[str, Any]) -> None:
    """optimizer.params[TYPE] for DeepSpeed's own types and torch's, each by the classes the engine builds."""
    for kind, classes in known.OPTIMIZERS.items():
        modes = {mode: parameters(of(name)) for mode, name in classes.items()}
        block = f"optimizer.params[{kind}]"
        named = {mode: name.rpartition(":")[2] for mode, name in classes.items()}
        keys[block] = {"type": "object", "checked": True, "classes": named}
        merge_modes(keys, block, modes)
        if kind.startswith("adam"):
            add_adam_switches(keys, block)
    block = "optimizer.params[muon]"
    keys[block] = {"type": "object", "classes": {"plain": "MuonWithAuxAdam"}}
    for name, spec in known.MUON.items():
        keys[f"{block}.{name}"] = from_spec(spec)
    add_adam_switches(keys, block)
    keys[f"{block}.foreach"] = {"type": "bool", "null": True, "default": None, "only": ["torch"]}
    import torch

    own = of("deepspeed.runtime.config:DEEPSPEED_OPTIMIZERS")
    values = []
    for name, cls in sorted(vars(torch.optim).items()):
        if not inspect.isclass(cls) or not issubclass(cls, torch.optim.Optimizer) or cls is torch.optim.Optimizer:
            continue
        if name.lower() in own:
            continue
        if step_takes(cls).get("closure") is inspect.Parameter.empty:
            refused_values["optimizer.type"][name] = ("", "its step needs a closure, and DeepSpeed passes none")
            continue
        values.append(name)
        keys[f"optimizer.params[{name}]"] = {"type": "object", "checked": True, "classes": {"plain": name}}
        merge_modes(keys, f"optimizer.params[{name}]", {"plain": parameters(cls)})
    keys["optimizer.type"] |= {"values": values}


def add_adam_switches(keys: dict[str, Node], block: str) -> None:
    """What the engine itself takes out of the parameters of Adam, AdamW and Muon."""
    for name, (spec, only) in known.ADAM_EXTRA.items():
        keys[f"{block}.{name}"] = from_spec(spec) | ({"only": list(only)} if only else {})


def merge_modes(keys: dict[str, Node], block: str, modes: dict[str, dict[str, Node]]) -> None:
    """One node for each parameter; `only` names the ways of building that take it, `defaults` where they differ."""
    for name in sorted(set().union(*modes.values())):
        nodes = {mode: nodes[name] for mode, nodes in modes.items() if name in nodes}
        first = next(iter(nodes.values()))
        if any(plain(node) != plain(first) for node in nodes.values()):
            raise Stale(f"{block}.{name} has several types: {nodes}")
        node = dict(first)
        if len(nodes) < len(modes):
            node["only"] = sorted(nodes)
        others = {m: n["default"] for m, n in nodes.items() if n.get("default") != first.get("default")}
        if others:
            node["defaults"] = others
        keys[f"{block}.{name}"] = node


def plain(node: Node) -> Node:
    return {name: value for name, value in node.items() if name != "default"}


def add_schedulers(keys: dict[str, Node], refused_values: dict[str, Any]) -> None:
    """scheduler.params[TYPE] for DeepSpeed's five and for torch's, which the engine looks up by name."""
    module = importlib.import_module(known.DEEPSPEED_SCHEDULERS)
    torch_module = importlib.import_module(known.TORCH_SCHEDULERS)
    base = torch_module.LRScheduler
    classes = {name: getattr(module, name) for name in module.VALID_LR_SCHEDULES}
    for name, cls in sorted(vars(torch_module).items()):
        if not inspect.isclass(cls) or not issubclass(cls, base) or cls is base or name.startswith("_"):
            continue
        if "metrics" in step_takes(cls):
            refused_values["scheduler.type"][name] = ("", "its step needs a metric, and DeepSpeed passes none")
        elif any(node is None for node in parameters(cls, keep_unusable=True).values()):
            refused_values["scheduler.type"][name] = ("", "it takes Python objects, which no file can hold")
        else:
            classes[name] = cls
    for name, cls in classes.items():
        keys[f"scheduler.params[{name}]"] = {"type": "object", "checked": True}
        for parameter, node in parameters(cls).items():
            keys[f"scheduler.params[{name}].{parameter}"] = node
    keys["scheduler.type"] |= {"values": list(classes)}


def step_takes(cls: Any) -> dict[str, Any]:
    """Parameter -> default of the class's step, which DeepSpeed calls without arguments."""
    return {name: parameter.default for name, parameter in inspect.signature(cls.step).parameters.items()}


def parameters(cls: Any, keep_unusable: bool = False) -> dict[str, Any]:
    """name -> node of what a class's constructor takes from the configuration.

    An optional parameter that no file can express is left out; a required one is None with `keep_unusable`.
    """
    result: dict[str, Any] = {}
    names = vars(collections.abc) | vars(typing) | vars(sys.modules[cls.__module__])
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if name in NOT_FROM_CONFIG or name in known.PASSED:
            continue
        annotation = parameter.annotation
        if isinstance(annotation, str):
            annotation = eval(annotation, dict(names))
        if name in known.PARAMETER_TYPES:
            node: Node | None = from_spec(known.PARAMETER_TYPES[name])
        elif annotation is parameter.empty:
            node = from_default(parameter.default)
        else:
            node = from_annotation(annotation)
        if node is None:
            if parameter.default is parameter.empty and keep_unusable:
                result[name] = None
            continue
        if parameter.default is parameter.empty:
            node["required"] = True
        else:
            set_default(node, parameter.default)
            if parameter.default is None:
                node["null"] = True
        if name in known.PER_GROUP:
            node |= {"or_list": True, "items": {"type": node["type"]}}
        result[name] = node
    return result
