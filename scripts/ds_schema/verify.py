"""Everything known.py says, held against the installed source.

Called by make_ds_schema.py last. Must never pass an entry that is stale.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

from ds_schema import known
from ds_schema.nodes import Node, Stale
from ds_schema.read import Reads, occurs


def refusals() -> dict[str, tuple[str, str]]:
    """Old, removed and unusable keys: DeepSpeed's own tables of removed keys, and known.REFUSED."""
    config = importlib.import_module("deepspeed.runtime.config")
    removed = dict(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    removed |= {f"zero_optimization.{name}": text for name, text in config._REMOVED_ZERO_CONFIG_KEYS.items()}
    return {name: (known.INSTEAD.get(name, ""), text.strip()) for name, text in removed.items()} | known.REFUSED


def verify(keys: dict[str, Node], refused: dict[str, tuple[str, str]], reads: Reads) -> None:
    """Everything known.py says is still so; raises Stale with all that is not."""
    wrong = []
    in_shapes = {f"{path.partition('[')[0]}.{path.rpartition('.')[2]}" for path in keys if "[" in path}
    for path in sorted(
        reads.defaults.keys() - keys.keys() - refused.keys() - known.SET_BY_DEEPSPEED.keys() - in_shapes
    ):
        if f"*.{path.rpartition('.')[2]}" not in refused:
            wrong.append(f"read by DeepSpeed and missing here: {path}")
    wrong += [f"REFUSED: {path} is a legal key" for path in refused if path in keys]
    for path, (use, _) in (refused | known.REFUSED_VALUES["optimizer.type"]).items():
        target = use.partition("=")[0].replace("optimizer.params.", "optimizer.params[adamw].")
        if target and target not in keys:
            wrong.append(f"{path}: its successor {target} is not a key")
    names = {path.rpartition(".")[2] for path in keys}
    wrong += [f"NUMBERS: no key is called {name}" for name in known.NUMBERS if name not in names]
    wrong += [f"PARAMETER_TYPES: no parameter is called {n}" for n in known.PARAMETER_TYPES if n not in names]
    wrong += [f"PER_GROUP: no parameter is called {name}" for name in known.PER_GROUP if name not in names]
    wrong += [f"TYPES: {path} is not a key" for path in known.TYPES if path not in keys]
    wrong += [f"INSTEAD: {path} is not removed" for path in known.INSTEAD if path not in refused]
    wrong += engine_differs() + unused_differs(reads)
    if wrong:
        raise Stale("\n".join(wrong))


def engine_differs() -> list[str]:
    """What the engine does with optimizer.params, against POPPED, MUON and OPTIMIZERS."""
    engine = importlib.import_module("deepspeed.runtime.engine")
    config = importlib.import_module("deepspeed.runtime.config")
    popped = {
        key.value if isinstance(key, ast.Constant) else getattr(engine, ast.unparse(key))
        for key in _popped(ast.parse(inspect.getsource(engine)), "optimizer_parameters")
    }
    halves = set(engine.DeepSpeedEngine._MUON_HALF_KEYS) | set(engine.DeepSpeedEngine._ADAM_HALF_KEYS)
    wrong = []
    if popped != set(known.POPPED):
        wrong.append(f"POPPED: the engine pops {sorted(map(str, popped))}")
    if halves | {"muon_lr", "adam_lr", "per_head_muon"} != set(known.MUON):
        wrong.append(f"MUON: the engine takes {sorted(halves)}")
    if {*known.OPTIMIZERS, "muon"} != set(config.DEEPSPEED_OPTIMIZERS):
        wrong.append(f"OPTIMIZERS: DeepSpeed has {config.DEEPSPEED_OPTIMIZERS}")
    wrong += [f"{word} does not occur in the engine" for word in ("muon_lr", "adam_lr") if not occurs(engine, word)]
    if not occurs(importlib.import_module("deepspeed"), "per_head_muon"):
        wrong.append("per_head_muon does not occur in deepspeed/__init__.py")
    return wrong


def _popped(tree: ast.AST, name: str) -> list[ast.expr]:
    """The first argument of every `name.pop(...)`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call.args[0] for call in calls if ast.unparse(call.func) == f"{name}.pop"]


def unused_differs(reads: Reads) -> list[str]:
    """known.UNUSED is read into the config object and by nothing else."""
    root = Path(importlib.import_module("deepspeed").__file__ or "").parent
    own = {root / "runtime" / "config.py", root / "runtime" / "constants.py"}
    wrong = [f"UNUSED: {name} is no longer read" for name in known.UNUSED if name not in reads.defaults]
    for file in sorted(set(root.rglob("*.py")) - own):
        text = file.read_text(encoding="utf-8")
        wrong += [f"UNUSED: {name} occurs in {file.relative_to(root)}" for name in known.UNUSED if name in text]
    return wrong
