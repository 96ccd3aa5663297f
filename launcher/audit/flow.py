"""A source file -> the lines where ranks part, and the layers that a model hides or never uses.

Called by `launcher.audit.scan`, beside `launcher.audit.traps`.
Must never take a condition that all ranks share for one that they do not.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from launcher.audit.source import LEAVES, Source, dotted, last, root
from launcher.audit.traps import COLLECTIVE, GATHERING, HOLD_PARAMETERS, Hit

RANKS = {"get_rank", "rank", "local_rank", "global_rank", "is_main", "is_main_process", "is_rank_zero"}


def ranks(source: Source) -> Iterator[Hit]:
    """Layers, gathers and engine calls that only some ranks come to, or not as often."""
    for node in source.nodes:
        condition = node.test if isinstance(node, ast.If) else node.iter if isinstance(node, ast.For) else None
        if isinstance(node, ast.If | ast.For) and condition is not None and _tells_ranks(condition):
            yield from _first(source, node.body, inside_model=source.in_model(node))
        elif isinstance(node, ast.IfExp) and _tells_ranks(node.test) and source.in_model(node):
            yield node, "order", "a layer"


def _tells_ranks(test: ast.AST) -> bool:
    return any(last(node) in RANKS for node in ast.walk(test) if isinstance(node, ast.Name | ast.Attribute))


def _first(source: Source, body: list[ast.stmt], inside_model: bool) -> Iterator[Hit]:
    """The first statement of a block that takes all ranks."""
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and _takes_all(node, inside_model) and not source.whole(node):
                yield node, "order", dotted(node.func)
                return


def _takes_all(call: ast.Call, inside_model: bool) -> bool:
    layer = inside_model and dotted(call.func).startswith("self.") and last(call) != "get_rank"
    return (
        layer or dotted(call.func) in ("engine", "model") or last(call) in COLLECTIVE or dotted(call.func) in GATHERING
    )


def inference(source: Source) -> Iterator[Hit]:
    """Forwards under torch.inference_mode."""
    for node in source.nodes:
        if isinstance(node, ast.With) and any(last(item.context_expr) == "inference_mode" for item in node.items):
            body: list[ast.stmt] = node.body
        elif isinstance(node, ast.FunctionDef) and any(last(mark) == "inference_mode" for mark in node.decorator_list):
            body = node.body
        else:
            continue
        for call in (inner for statement in body for inner in ast.walk(statement)):
            if isinstance(call, ast.Call) and dotted(call.func) in ("engine", "model", "self.model", "self.engine"):
                yield call, "inference_mode", dotted(call.func)


def hidden(source: Source) -> Iterator[Hit]:
    """Parameters that a model keeps where DeepSpeed does not look: in lists and closures."""
    if any(last(node) == "register_external_parameter" for node in source.nodes if isinstance(node, ast.Call)):
        return
    for model in _models(source):
        lists, names = set(), set()
        for node in ast.walk(model):
            if not isinstance(node, ast.Assign):
                continue
            for target in node.targets:
                if root(target) == "self" and isinstance(node.value, ast.List) and _holds_parameter(node.value):
                    lists.add(last(target))
                if isinstance(target, ast.Name) and last(node.value) in LEAVES and root(node.value) == "self":
                    names.add(target.id)
        for node in ast.walk(model):
            if isinstance(node, ast.Attribute) and node.attr in lists and isinstance(node.ctx, ast.Load):
                yield node, "external", dotted(node)
            elif isinstance(node, ast.Lambda):
                used = {inner.id for inner in ast.walk(node.body) if isinstance(inner, ast.Name)}
                yield from ((node, "external", name) for name in sorted(used & names))


def unused(source: Source) -> Iterator[Hit]:
    """Layers that no method of their model uses, or only to throw the gradient away."""
    for model in _models(source):
        made: dict[str, ast.Assign] = {}
        uses: dict[str, list[ast.AST]] = {}
        for node in ast.walk(model):
            if (
                isinstance(node, ast.Assign)
                and last(node.value) in HOLD_PARAMETERS
                and isinstance(node.value, ast.Call)
            ):
                made |= {last(target): node for target in node.targets if _own(target)}
            elif isinstance(node, ast.Attribute) and _own(node) and isinstance(node.ctx, ast.Load):
                uses.setdefault(node.attr, []).append(node)
        reached = any(
            last(node) in ("children", "modules", "getattr") for node in ast.walk(model) if isinstance(node, ast.Call)
        )
        outside = {node.attr for node in source.nodes if isinstance(node, ast.Attribute) and root(node) != "self"}
        for name, node in made.items():
            lost = all(_detached(source, use) for use in uses.get(name, ()))
            if lost and not reached and name not in outside:
                yield node, "no_gradient", f"self.{name}"


def _models(source: Source) -> Iterator[ast.ClassDef]:
    return (node for node in source.nodes if isinstance(node, ast.ClassDef) and node.name in source.models)


def _own(node: ast.AST) -> bool:
    """self.NAME"""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _detached(source: Source, use: ast.AST) -> bool:
    """self.layer(x).detach()"""
    call = source.parents[use]
    outer = source.parents.get(call)
    return (
        isinstance(call, ast.Call) and call.func is use and isinstance(outer, ast.Attribute) and outer.attr == "detach"
    )


def _holds_parameter(node: ast.List) -> bool:
    return any(isinstance(element, ast.Attribute) and element.attr in LEAVES for element in node.elts)


RULES: tuple[Callable[[Source], Iterator[Hit]], ...] = (ranks, inference, hidden, unused)
