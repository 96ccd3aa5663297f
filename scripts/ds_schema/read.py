"""Follows the configuration dictionary through DeepSpeed's source: the keys read, their defaults, the reading files.

Called by make_ds_schema.py. Source is read with `ast`; names are looked up in the imported modules.
Must never guess: a read whose key cannot be resolved is reported as opaque.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UNKNOWN = object()
ABSENT = object()
HELPERS = "runtime/config_utils.py"  # get_scalar_param and its like: a read belongs to the file that calls them


@dataclass(frozen=True)
class Block:
    """A value that is the configuration, or the part of it at `path` (dotted; `*` any key, `[]` each element)."""

    path: str

    def child(self, key: str) -> Block:
        return Block(f"{self.path}.{key}" if self.path else key)


@dataclass
class Reads:
    """What the source does with the configuration."""

    defaults: dict[str, Any] = field(default_factory=dict)  # path -> default, ABSENT where none is given
    sources: dict[str, str] = field(default_factory=dict)  # path -> file it was first seen in, below deepspeed/
    models: dict[str, type] = field(default_factory=dict)  # path -> pydantic model that takes the whole block
    opaque: set[str] = field(default_factory=set)  # "function: block" read with a key nobody can see


@dataclass
class Scope:
    """One function being followed: its names, its class's attributes and what it returns."""

    name: str
    file: str
    names: dict[str, Any]  # local name -> Block or constant
    namespace: dict[str, Any]  # globals of the function
    attributes: dict[str, Block]  # self.x -> Block, shared by the methods of one object
    owner: type | None = None
    returned: Block | None = None


class Follower:
    """`follow(function, name=Block(""))` fills `reads`; `stop` names classes whose body is not entered."""

    def __init__(self, root: Path, model_base: type, stop: tuple[str, ...]) -> None:
        self.reads = Reads()
        self._root = root
        self._model_base = model_base
        self._stop = stop
        self._active: set[tuple[Any, ...]] = set()
        self._callers: list[tuple[str, str]] = []

    def follow(
        self,
        function: Callable[..., Any],
        bound: dict[str, Any],
        owner: type | None = None,
        attributes: dict[str, Block] | None = None,
    ) -> Block | None:
        """Reads `function` with its parameters `bound` to blocks or constants; gives the block it returns."""
        mark = (function.__qualname__, tuple(sorted((k, repr(v)) for k, v in bound.items())), repr(attributes))
        if mark in self._active:
            return None
        self._active.add(mark)
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        assert isinstance(tree, ast.FunctionDef), function
        defaults = {
            name: parameter.default
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is not parameter.empty
        }
        file = str(Path(inspect.getsourcefile(function) or "").resolve().relative_to(self._root))
        caller = (function.__qualname__, file)
        if file == HELPERS and self._callers:
            caller = self._callers[-1]
        scope = Scope(
            name=caller[0],
            file=caller[1],
            names=defaults | bound,
            namespace=dict(function.__globals__),
            attributes={} if attributes is None else attributes,
            owner=owner,
        )
        self._callers.append(caller)
        self._statements(tree.body, scope)
        self._callers.pop()
        self._active.discard(mark)
        return scope.returned

    # --- statements ------------------------------------------------------------------------------------------------

    def _statements(self, body: list[ast.stmt], scope: Scope) -> None:
        for node in body:
            if isinstance(node, ast.Assign):
                self._assign(node, scope)
            elif isinstance(node, ast.Return) and node.value is not None:
                value = self._value(node.value, scope)
                scope.returned = value if isinstance(value, Block) else scope.returned
            elif isinstance(node, ast.ImportFrom):
                self._import(node, scope)
            elif isinstance(node, ast.For):
                value = self._value(node.iter, scope)
                if isinstance(value, Block) and isinstance(node.target, ast.Name):
                    scope.names[node.target.id] = Block(value.path + "[]")
                self._statements([*node.body, *node.orelse], scope)
            elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.stmt):
                        self._statements([child], scope)
                    elif isinstance(child, ast.ExceptHandler):
                        self._statements(child.body, scope)
                    else:
                        self._value(child, scope)

    def _assign(self, node: ast.Assign, scope: Scope) -> None:
        value = self._value(node.value, scope)
        for target in node.targets:
            if isinstance(target, ast.Name):
                # `x = d[KEY]` in one branch and `x = {}` in the other: x is the block.
                if isinstance(value, Block) or not isinstance(scope.names.get(target.id), Block):
                    scope.names[target.id] = value
            elif isinstance(target, ast.Attribute) and isinstance(value, Block):
                scope.attributes[target.attr] = value

    def _import(self, node: ast.ImportFrom, scope: Scope) -> None:
        if node.module is None or node.level:
            return
        module = importlib.import_module(node.module)
        for alias in node.names:
            scope.namespace[alias.asname or alias.name] = getattr(module, alias.name, None)

    # --- expressions -----------------------------------------------------------------------------------------------

    def _value(self, node: ast.AST, scope: Scope) -> Any:
        """Block or constant that `node` stands for, else UNKNOWN; records every read on the way."""
        if isinstance(node, ast.Name):
            return scope.names.get(node.id, self._constant(node, scope))
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                return scope.attributes.get(node.attr, UNKNOWN)
            self._value(node.value, scope)
            return self._constant(node, scope)
        if isinstance(node, ast.Subscript):
            base = self._value(node.value, scope)
            if isinstance(base, Block) and isinstance(node.ctx, ast.Load):
                return self._read(base, node.slice, ABSENT, scope)
            return UNKNOWN
        if isinstance(node, ast.Compare):
            return self._compare(node, scope)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, (ast.BoolOp, ast.IfExp)):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.test, node.body, node.orelse]
            values = [self._value(part, scope) for part in parts]
            return next((value for value in values if isinstance(value, Block)), UNKNOWN)
        for child in ast.iter_child_nodes(node):
            self._value(child, scope)
        return self._constant(node, scope)

    def _compare(self, node: ast.Compare, scope: Scope) -> Any:
        self._value(node.left, scope)
        for operator, right in zip(node.ops, node.comparators, strict=True):
            value = self._value(right, scope)
            if isinstance(operator, (ast.In, ast.NotIn)) and isinstance(value, Block):
                self._read(value, node.left, ABSENT, scope)
        return UNKNOWN

    def _call(self, node: ast.Call, scope: Scope) -> Any:
        function = node.func
        if isinstance(function, ast.Attribute):
            base = self._value(function.value, scope)
            if isinstance(base, Block):
                return self._method_of_block(base, function.attr, node, scope)
            if isinstance(function.value, ast.Name) and function.value.id in ("self", "cls") and scope.owner:
                method = getattr(scope.owner, function.attr, None)
                if inspect.ismethod(method):
                    method = method.__func__
                return self._enter(method, node, scope, scope.owner, scope.attributes, skip_first=True)
        target = self._constant(function, scope)
        if target in (copy.copy, copy.deepcopy):
            return self._value(node.args[0], scope)
        return self._enter(target, node, scope, None, None)

    def _method_of_block(self, base: Block, name: str, node: ast.Call, scope: Scope) -> Any:
        arguments = [self._value(argument, scope) for argument in node.args]
        if name in ("get", "pop", "setdefault"):
            default = arguments[1] if len(arguments) > 1 else None
            return self._read(base, node.args[0], default, scope)
        if name in ("items", "values"):
            self.reads.opaque.add(f"{scope.name}: {base.path or 'top level'}")
            return UNKNOWN
        return base if name in ("keys", "copy") else UNKNOWN

    def _enter(
        self,
        target: Any,
        node: ast.Call,
        scope: Scope,
        owner: type | None,
        attributes: dict[str, Block] | None,
        skip_first: bool = False,
    ) -> Any:
        """Follows a call into DeepSpeed that is handed a block, or a method of an object that holds one."""
        positional = [self._value(argument, scope) for argument in node.args]
        named = {word.arg: self._value(word.value, scope) for word in node.keywords}
        if inspect.isclass(target) and issubclass(target, self._model_base):
            if isinstance(named.get(None), Block):
                self.reads.models[named[None].path] = target
            return UNKNOWN
        if inspect.isclass(target):
            owner, target, skip_first, attributes = target, target.__init__, True, {}
        holds = any(isinstance(value, Block) for value in [*positional, *named.values()]) or attributes
        if not holds or not inspect.isfunction(target) or not target.__module__.startswith("deepspeed"):
            return UNKNOWN
        if target.__code__.co_filename.startswith("<"):  # the constructor of a dataclass: no source, reads nothing
            return UNKNOWN
        if owner is not None and owner.__name__ in self._stop:
            return UNKNOWN
        parameters = list(inspect.signature(target).parameters)[1 if skip_first else 0 :]
        bound = dict(zip(parameters, positional, strict=False)) | {k: v for k, v in named.items() if k}
        known = {name: value for name, value in bound.items() if value is not UNKNOWN}
        return self.follow(target, known, owner, attributes) or UNKNOWN

    def _read(self, base: Block, key: ast.AST, default: Any, scope: Scope) -> Any:
        name = self._value(key, scope)
        if not isinstance(name, str):
            self.reads.opaque.add(f"{scope.name}: {base.path or 'top level'}")
            return UNKNOWN
        block = base.child(name)
        if self.reads.defaults.get(block.path, ABSENT) is ABSENT:
            self.reads.defaults[block.path] = default
        self.reads.sources.setdefault(block.path, scope.file)
        return block

    def _constant(self, node: ast.AST, scope: Scope) -> Any:
        """Value of an expression that depends on module constants alone."""
        if not isinstance(node, ast.expr):
            return UNKNOWN
        names = {name: value for name, value in scope.names.items() if not isinstance(value, Block)}
        used = {item.id for item in ast.walk(node) if isinstance(item, ast.Name)}
        if any(isinstance(item, ast.Call) for item in ast.walk(node)) or any(names.get(n) is UNKNOWN for n in used):
            return UNKNOWN
        try:
            return eval(compile(ast.Expression(copy.deepcopy(node)), "<constant>", "eval"), scope.namespace, names)
        except Exception:
            return UNKNOWN


def occurs(module: Any, key: str) -> bool:
    """Whether `key` is written in the source of `module`: as a string, or as a name whose value it is."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value == key:
            return True
        if isinstance(node, ast.Name) and getattr(module, node.id, None) == key:
            return True
        if isinstance(node, (ast.arg, ast.keyword)) and node.arg == key:
            return True
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == key:
            return True
    return False
