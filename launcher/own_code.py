"""Targets of the user's own code (`model.target` and its like) -> a Problem for each that is not there.

Called when a plan is built. Modules are found and their text is read.
Must never import them: they load torch, and may do anything.
"""

from __future__ import annotations

import ast
import difflib
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from launcher.errors import Problem
from launcher.schema import RunConfig


def missing_code(config: RunConfig) -> list[Problem]:
    """A problem for each target that no rank could import, and for a `run.source` that nothing reads."""
    targets = {
        "model.target": config.model.target,
        "data.target": config.data.get("target"),
        "recipe.target": config.recipe.target,
    }
    wanted = {where: target for where, target in targets.items() if target is not None}
    source = config.run.source
    if source is not None and not wanted:
        why = "no target is imported from it, so it would be ignored"
        return [Problem("run.source", source, why, "add model.target=MODULE.NAME (or data.target, recipe.target)")]
    if source is not None and not Path(source).is_dir():
        return [Problem("run.source", source, "there is no such folder", "name the folder that holds the modules")]
    found = [_problem(where, str(target), source) for where, target in wanted.items()]
    return [problem for problem in found if problem is not None]


def _problem(where: str, target: str, source: str | None) -> Problem | None:
    module, _, name = target.rpartition(".")
    if not module or not all(part.isidentifier() for part in target.split(".")):
        return Problem(where, target, "a target is MODULE.NAME, or PACKAGE.MODULE.NAME", f"{where}=my_module.MyName")
    spec = _found(module, source)
    if spec is None:
        place = f"{source} or on Python's path" if source else "on Python's path"
        why = f"there is no module {module} in {place}" if source else f"there is no module {module} {place}"
        return Problem(where, target, why, "add run.source=FOLDER, or install its package on every host")
    names = _names_in(spec)
    if names is None or name in names:
        return None
    near = difflib.get_close_matches(name, names, 1) or sorted(names - set(dir(__builtins__)))[:1]
    fix = f"{where}={module}.{near[0]}" if near else f"define it in {spec.origin}"
    return Problem(where, target, f"{spec.origin} defines no {name}", fix)


def _found(module: str, source: str | None) -> ModuleSpec | None:
    """Where the module lies, its packages not imported on the way."""
    first, *rest = module.split(".")
    spec = PathFinder.find_spec(first, [source]) if source else None
    if spec is None and first not in sys.modules:
        spec = find_spec(first)
    elif spec is None:
        spec = sys.modules[first].__spec__
    name = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _names_in(spec: ModuleSpec) -> set[str] | None:
    """What the module's text binds at its top; None where that cannot be told from the text."""
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    names: set[str] = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if names & {"*", "__getattr__"} else names
