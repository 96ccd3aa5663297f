"""Small DeepSpeed configurations that hold one given key, for tests of the schema, the check and the values."""

from __future__ import annotations

import re
from typing import Any

from launcher.ds_schema import Key, schema


def placed(path: str, value: Any, name: str | None = None) -> dict[str, Any]:
    """A configuration with `value` at `path`, under another last name if `name` is given.

    A block of several shapes gets the sibling that chooses the right one; an optimizer's parameter that one way of
    building alone takes gets that way.
    """
    config: dict[str, Any] = {}
    node, walked = config, ""
    *blocks, last = path.split(".")
    for part in blocks:
        plain, _, shape = part.rstrip("]").partition("[")
        walked = f"{walked}.{plain}" if walked else plain
        if shape:
            node[schema().keys[walked].by] = shape
        inner: dict[str, Any] = {}
        node[called(plain)] = [inner] if part.endswith("[]") else inner
        node, walked = inner, walked + part.removeprefix(plain)
    node[name or called(last)] = value
    only = schema().keys[path].only if path in schema().keys else ()
    if only and "plain" not in only:
        if "torch" in only:
            node["torch_adam"] = True
        else:
            config["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
    return config


def shown(path: str) -> str:
    """`path` as a Problem shows it."""
    return "deepspeed." + re.sub(r"\[\w+\]", "", path).replace("[]", "[0]").replace("*", called("*"))


def leaves() -> list[Key]:
    """Every key that is not a block."""
    return [key for key in schema().keys.values() if key.type != "object"]


def legal_beside(path: str) -> set[str]:
    """Names that are legal where `path` is, `*` for any."""
    return set(schema().levels[path.rpartition(".")[0]])


def called(name: str) -> str:
    return "metric" if name == "*" else name
