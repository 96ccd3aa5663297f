"""Legal words, units and limits of known.py -> into the nodes.

Called by make_ds_schema.py once every key is there. Must never leave a whole number without a unit.
"""

from __future__ import annotations

import ast
import enum
import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

from ds_schema import known
from ds_schema.nodes import Node, Stale, of


def refine(keys: dict[str, Node]) -> None:
    """Legal words, units and limits; collects every number without a unit before it stops."""
    for path, values in known.VALUES.items():
        keys[path]["values"] = list(values)
    for path, holder in known.VALUES_FROM.items():
        keys[path]["values"] = [word for word in words_of(of(holder)) if word not in known.NOT_A_TRAINING_TYPE]
    for path, holder in known.VALUES_WRITTEN_IN.items():
        keys[path]["values"] = sorted(literal(holder))
    for path, given in known.ANY_CASE.items():
        keys[path]["any_case"] = words_of(of(given) if isinstance(given, str) else given)
    for path, special in known.WORDS.items():
        keys[path]["words"] = list(special)
    for path in known.ONE_FOR_LIST:
        keys[path]["single"] = True
    keys["tensor_parallel.preset_model"]["values"] = autotp_presets()
    missing = []
    for path, node in keys.items():
        name = path.rpartition(".")[2]
        if name == "warmup_type" and path.startswith("scheduler."):
            node["values"] = list(known.WARMUP_TYPES)
        if node["type"] in ("int", "float") and "values" not in node:
            if name in known.NUMBERS:
                limit(node, known.NUMBERS[name])
            elif node["type"] == "int":
                missing.append(path)
        if name in known.ELEMENTS and node["type"] == "list":
            limit(node["items"], known.ELEMENTS[name], open_above=True)
        elif node.get("or_list"):
            node["items"] |= {word: node[word] for word in ("min", "max", "above", "below") if word in node}
    if missing:
        raise Stale(f"whole numbers without a unit: {missing}; decide in NUMBERS")


def limit(node: Node, entry: tuple[str, float | None, float | None], open_above: bool = False) -> None:
    """Puts (unit, smallest, largest) into `node` where DeepSpeed's own model sets no limit."""
    unit, smallest, largest = entry
    if unit:
        node["unit"] = unit
    if smallest is not None and "min" not in node and "above" not in node:
        node["min"] = smallest
    if largest is not None and "max" not in node and "below" not in node:
        node["below" if open_above else "max"] = largest


def words_of(holder: Any) -> list[str]:
    """The words an enum, table or list of DeepSpeed's holds; DtypeEnum's are its aliases."""
    if inspect.isclass(holder) and issubclass(holder, enum.Enum):
        held = [word for item in holder for word in getattr(item, "_all_values", (item.value,))]
        return [word for word in held if isinstance(word, str)]
    return sorted(holder) if isinstance(holder, (set, dict)) else list(holder)


def literal(name: str) -> Any:
    """The constant `module:name` as the source writes it; the module is not imported."""
    module, _, wanted = name.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == wanted:
            return ast.literal_eval(node.value)
    raise Stale(f"VALUES_WRITTEN_IN: no {name}")


def autotp_presets() -> list[str]:
    """The keys of the table inside AutoTPPresets.get_preset."""
    tree = ast.parse(inspect.getsource(importlib.import_module("deepspeed.module_inject.autotp_config")))
    function = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "get_preset")
    table = next(node for node in ast.walk(function) if isinstance(node, ast.Dict))
    return [key.value for key in table.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
