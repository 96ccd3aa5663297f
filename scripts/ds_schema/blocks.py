"""The keys of every block: pydantic models and plain dictionary reads -> nodes.

Called by make_ds_schema.py. Must never drop a key it cannot type: it stops and names it.
"""

from __future__ import annotations

import importlib
import inspect
import typing
from pathlib import Path
from typing import Any

from ds_schema import known
from ds_schema.nodes import Node, Stale, from_annotation, from_default, from_spec, model_in, of, set_default
from ds_schema.read import ABSENT, UNKNOWN, Block, Follower, Reads, occurs

MONITORS = "deepspeed.monitor.config:DeepSpeedMonitorConfig"  # its fields are blocks of the top level
ENGINES = ("DeepSpeedEngine", "PipelineEngine", "DeepSpeedHybridEngine")  # what they read, the config object has read
# Dictionaries inside pydantic models: their keys are read as elsewhere.
PLAIN_IN_MODELS = ("tensor_parallel.partition_config.", "weight_quantization.")


def follow() -> Reads:
    """Everything deepspeed.initialize and the readers of known.READERS take from the configuration."""
    import deepspeed

    root = Path(deepspeed.__file__).resolve().parent
    follower = Follower(root, of("deepspeed.runtime.config_utils:DeepSpeedConfigModel"), ENGINES)
    follower.follow(deepspeed.initialize, {"config": Block("")})
    for module, owner_name, function_name, parameter, path in known.READERS:
        owner = of(f"{module}:{owner_name}") if owner_name else None
        function = getattr(owner or importlib.import_module(module), function_name)
        function = getattr(function, "__func__", function)
        holder, _, attribute = parameter.rpartition(".")
        attributes = {attribute: Block(path)} if holder else {}
        follower.follow(function, {} if holder else {parameter: Block(path)}, owner, attributes)
    reads = follower.reads
    reads.models["bf16"] = reads.models["bfloat16"]  # precision_config.py reads the one, else the other
    del reads.models["bfloat16"]
    if reads.opaque != set(known.OPAQUE):
        raise Stale(f"reads nobody can see: {sorted(reads.opaque ^ set(known.OPAQUE))}; decide in OPAQUE")
    return reads


def add(keys: dict[str, Node], reads: Reads) -> None:
    """Every key of every block but optimizer.params and scheduler.params."""
    for path, model in reads.models.items():
        add_model(keys, path, model)
    for name, info in of(MONITORS).model_fields.items():
        add_model(keys, name, info.annotation)
    for block, module, entries in known.EXTRA:
        for name, spec in entries.items():
            keys[f"{block}.{name}"] = from_spec(spec)
            if not occurs(importlib.import_module(module), name):
                raise Stale(f"EXTRA: {name} of {block} does not occur in {module}")
    add_reads(keys, reads)


def add_model(keys: dict[str, Node], path: str, model: Any) -> None:
    """The fields of a pydantic model, under their documented names."""
    for name, info in model.model_fields.items():
        where = f"{path}.{info.alias or name}"
        if (info.json_schema_extra or {}).get("deprecated"):
            if where not in known.REFUSED:
                raise Stale(f"{where} is deprecated; name its successor in REFUSED")
            continue
        if where in known.REFUSED:
            continue
        nested = model_in(info.annotation)
        node = from_spec(known.TYPES[where]) if where in known.TYPES else from_annotation(info.annotation)
        if node is None:
            raise Stale(f"{where}: no JSON type for {info.annotation}; decide in TYPES or REFUSED")
        for limit in info.metadata:
            for attribute, word in (("ge", "min"), ("le", "max"), ("gt", "above"), ("lt", "below")):
                if getattr(limit, attribute, None) is not None:
                    node[word] = getattr(limit, attribute)
        if not info.is_required() and node["type"] != "object":
            set_default(node, info.get_default(call_default_factory=True))
        if info.alias and info.alias != name:
            node["aliases"] = [name]
        keys[where] = node
        if nested is not None:
            node |= {"checked": True, "source": source_of(nested)}
            add_model(keys, where, nested)


def add_reads(keys: dict[str, Node], reads: Reads) -> None:
    """Keys that plain dictionary reads show, where no model has them already."""
    expert = typing.get_type_hints(of("deepspeed.module_inject.auto_ep_config:AutoEPConfig"))
    inner = [*reads.defaults, *(f"{block}.*" for block, _, _ in known.EXTRA)]
    parents = {path.rpartition(".")[0].removesuffix("[]") for path in inner} | set(reads.models)
    for path, default in reads.defaults.items():
        block, _, name = path.rpartition(".")
        if path in keys or path in known.SET_BY_DEEPSPEED or {path, f"*.{name}"} & known.REFUSED.keys():
            continue
        modelled = any(path.startswith(f"{model}.") for model in reads.models) and not path.startswith(PLAIN_IN_MODELS)
        if modelled or block in known.CHOSEN_BY:
            continue
        node: Node | None
        if path in known.TYPES:
            node = from_spec(known.TYPES[path])
        elif path in parents:
            node = {"type": "object"}
        else:
            node = from_annotation(expert[name]) if block == "expert_parallel" else from_default(default)
        if node is None:
            raise Stale(f"{path}: its default {default!r} shows no type; decide in TYPES")
        if default not in (ABSENT, UNKNOWN) and node["type"] != "object":
            set_default(node, default)
        keys[path] = node


def add_objects(keys: dict[str, Node], reads: Reads) -> None:
    """An object for every block, with where it is read and who checks its keys."""
    for path in list(keys):
        parts = path.split(".")
        for size in range(1, len(parts)):
            block = ".".join(parts[:size])
            if block not in keys and not block.endswith("[]"):
                keys[block] = {"type": "object"}
    for path, reason in known.OPEN.items():
        keys[path]["open"] = reason
    for path, reason in known.FREE_KEYS.items():
        keys[path]["free_keys"] = reason
    for path, sibling in known.CHOSEN_BY.items():
        keys[path]["by"] = sibling
    for path in known.EMPTY_VARIANTS:
        keys[path] = {"type": "object"}
    for path, node in keys.items():
        if node["type"] == "object" and path in reads.sources:
            node["source"] = reads.sources[path]
    for path, model in reads.models.items():
        keys[path] |= {"checked": True, "source": source_of(model)}
    for name, info in of(MONITORS).model_fields.items():
        keys[name] |= {"checked": True, "source": source_of(info.annotation)}


def source_of(thing: Any) -> str:
    """The file that defines `thing`, below deepspeed/."""
    return str(inspect.getsourcefile(thing)).rpartition("/deepspeed/")[2]
