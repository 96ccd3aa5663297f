"""A Python source file -> its syntax tree with parents, and what the names in it stand for.

Used by the rules of the static audit.
Must never import or run what it reads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LEAVES = ("weight", "bias")  # what nearly every layer calls its parameters
LISTS = ("parameters", "named_parameters")
GATHERS = ("GatheredParameters", "gather.read", "gather.edit")
MODEL_BASES = ("Module", "Model", "Function")  # how the names of classes end that a model is derived from


def last(node: ast.AST | None) -> str:
    """The last name of a dotted expression or of the function that a call calls; empty for anything else."""
    node = node.func if isinstance(node, ast.Call) else node
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of attributes, calls and subscripts left out; empty when it begins with anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return dotted(node.func)
    return dotted(node.value) if isinstance(node, ast.Subscript) else ""


def root(node: ast.AST) -> str:
    """The name a dotted expression begins with."""
    return dotted(node).partition(".")[0]


@dataclass
class Source:
    """One file. `parents`: of every node; names are resolved within the function around a node."""

    path: Path
    tree: ast.Module

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """{node: the node it lies in}."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree."""
        return list(ast.walk(self.tree))

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        """What the node lies in, from the inside out."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def function(self, node: ast.AST) -> ast.AST:
        """The function around a node, or the file."""
        return next((n for n in self.above(node) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)), self.tree)

    def in_model(self, node: ast.AST) -> bool:
        """Whether a node lies in the class of a model, where DeepSpeed makes parameters whole."""
        return any(isinstance(outer, ast.ClassDef) and outer.name in self.models for outer in self.above(node))

    @cached_property
    def models(self) -> set[str]:
        """Classes of the file that are models, by their bases or by those of their bases in it."""
        classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        found: set[str] = set()
        for _ in classes:
            names = {
                n.name for n in classes for base in n.bases if last(base).endswith(MODEL_BASES) or last(base) in found
            }
            if names == found:
                break
            found = names
        return found

    def gather(self, node: ast.AST) -> ast.Call | None:
        """The gather in whose block a node lies."""
        for outer in self.above(node):
            if isinstance(outer, ast.With | ast.AsyncWith):
                calls = [item.context_expr for item in outer.items if isinstance(item.context_expr, ast.Call)]
                for call in calls:
                    if (last(call) in GATHERS or dotted(call) in GATHERS) and all(
                        inner is not call for inner in (node, *self.above(node))
                    ):
                        return call
        return None

    @cached_property
    def _built(self) -> set[tuple[ast.AST, str]]:
        """(function, name) of what is built there: such an object is whole on every rank."""
        return {
            (self.function(node), target.id)
            for node in self.nodes
            if isinstance(node, ast.Assign) and _constructs(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    @cached_property
    def _aliases(self) -> dict[tuple[ast.AST, str], ast.AST]:
        """{(function, name): expression} of names that stand for one parameter, or in turn for each of several."""
        found: dict[tuple[ast.AST, str], ast.AST] = {}
        for node in self.nodes:
            pairs: list[tuple[ast.AST, ast.AST]] = []
            if isinstance(node, ast.For | ast.comprehension):
                pairs = [(node.target, node.iter)] if last(node.iter) in LISTS else []
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and last(node.value) in LEAVES:
                pairs = [(target, node.value) for target in node.targets]
            for target, value in pairs:
                named = target.elts[-1] if isinstance(target, ast.Tuple) else target
                if isinstance(named, ast.Name):
                    found[self.function(node), named.id] = value
        return found

    def parameter(self, node: ast.AST) -> bool:
        """Whether an expression looks like a parameter that a job has not built itself."""
        origin: ast.AST = node
        if isinstance(node, ast.Name):
            alias = self._aliases.get((self.function(node), node.id))
            if alias is None:
                return False
            origin = alias
        elif not (isinstance(node, ast.Attribute) and node.attr in LEAVES):
            return False
        return not self.whole(origin)

    def whole(self, node: ast.AST) -> bool:
        """Whether an expression begins with something that was built in the same function."""
        return (self.function(node), root(node)) in self._built


def _constructs(value: ast.AST) -> bool:
    """nn.Linear(...), Net(...).eval(): the call of a class."""
    names = [part for part in dotted(value).split(".") if part] if isinstance(value, ast.Call) else []
    return any(part[0].isupper() for part in names)
