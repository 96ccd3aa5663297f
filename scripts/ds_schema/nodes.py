"""Python's and pydantic's types -> the nodes of ds_schema.json: type, default, elements, legal values.

Used by the modules beside it. Must never give a node for a type that no JSON value fits.
"""

from __future__ import annotations

import collections.abc
import enum
import importlib
import inspect
import json
import types
import typing
from pathlib import Path
from typing import Any

Node = dict[str, Any]
SCALARS = {bool: "bool", int: "int", float: "float", str: "str", Path: "str"}
LISTS = (list, tuple, collections.abc.Iterable, collections.abc.Sequence)


class Stale(Exception):
    """DeepSpeed's source and known.py disagree: a person has to decide."""


def of(name: str) -> Any:
    """The object `module:name`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def from_spec(spec: str) -> Node:
    """Node of the small language of ds_schema_known.py."""
    text, _, default = spec.partition(" = ")
    node: Node = {}
    if text.endswith("!"):
        text, node["required"] = text[:-1], True
    if text.endswith("?"):
        text, node["null"] = text[:-1], True
    kind, _, items = text.rstrip("]").partition("[")
    node["type"] = kind
    if items:
        node["items"] = {"type": items}
    if default:
        node["default"] = json.loads(default)
        if items:
            node["length"] = len(node["default"])
    return node


def from_default(default: Any) -> Node | None:
    if isinstance(default, (tuple, list)):
        node: Node = {"type": "list"} | ({"items": {"type": SCALARS[type(default[0])]}} if default else {})
        return node | ({"length": len(default)} if isinstance(default, tuple) else {})
    return {"type": SCALARS[type(default)]} if type(default) in SCALARS else None


def from_annotation(annotation: Any) -> Node | None:
    """Node of a Python annotation, None where no JSON value fits it."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in SCALARS:
        return {"type": SCALARS[annotation]}
    if model_in(annotation) is not None:
        return {"type": "object"} | ({"null": True} if type(None) in arguments else {})
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        values = sorted({item.value for item in annotation}, key=list(annotation).index)
        return {"type": SCALARS[type(values[0])], "values": values}
    if origin is typing.Literal:
        return {"type": SCALARS[type(arguments[0])], "values": list(arguments)}
    if origin in (typing.Union, types.UnionType):
        return from_union(arguments)
    if origin in LISTS or annotation in LISTS:
        node: Node = {"type": "list"}
        if arguments:
            inner = from_annotation(arguments[0])
            if inner is None:
                return None
            node["items"] = inner
        if origin is tuple and Ellipsis not in arguments:
            node["length"] = len(arguments)
        return node
    return None


def from_union(arguments: tuple[Any, ...]) -> Node | None:
    nodes = [node for node in map(from_annotation, arguments) if node is not None]
    lists = [node for node in nodes if node["type"] == "list"]
    scalars = [node for node in nodes if node["type"] != "list"]
    if len(scalars) == 1 and lists:
        nodes = [scalars[0] | {"or_list": True, "items": lists[0]["items"]}]
    if len(nodes) != 1:
        return None
    return nodes[0] | ({"null": True} if type(None) in arguments else {})


def model_in(annotation: Any) -> Any:
    """The pydantic model that a field holds, else None."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if inspect.isclass(candidate) and hasattr(candidate, "model_fields"):
            return candidate
    return None


def set_default(node: Node, default: Any) -> None:
    if isinstance(default, enum.Enum):
        default = default.value
    if isinstance(default, (tuple, list)):
        default = list(default)
    if isinstance(default, int) and not isinstance(default, bool):
        default = float(default) if node["type"] == "float" else int(default)
    if default is None:
        node["null"] = True
    node["default"] = default
