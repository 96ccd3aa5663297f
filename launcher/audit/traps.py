"""A source file -> the lines that would misuse partitioned parameters, as far as reading them can tell.

Called by `launcher.audit.scan`. Kinds are those of the run-time audit, recipes/shared/audit/findings.py.
Must never accuse a line inside a gather, or of a model's own forward, of reading.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from launcher.audit.source import LEAVES, LISTS, Source, dotted, last, root

Hit = tuple[ast.AST, str, str]  # node, kind, what it is about
SAFE = {
    *("dtype", "device", "requires_grad", "is_leaf", "name", "element_size", "grad_fn", "register_hook", "is_cuda"),
    *(
        "ds_shape",
        "ds_numel",
        "ds_id",
        "ds_status",
        "ds_tensor",
        "is_floating_point",
        "layout",
        "all_gather",
        "partition",
    ),
}
SIZE = {"shape", "ndim", "numel", "nelement", "size", "dim", "data_ptr", "stride", "nbytes"}
CASTS = {"half", "double", "float", "bfloat16", "to", "cpu", "cuda"}
BUFFERS = {"running_mean", "running_var", "num_batches_tracked", "config"}
MODELS = {"model", "module", "net", "network"}
COLLECTIVE = {"backward", "step", "save_checkpoint", "load_checkpoint", "GatheredParameters", "generate"}
GATHERING = {f"gather.{name}" for name in ("read", "edit", "norms", "stream", "full_gradient", "optimizer_state")}
HOLD_PARAMETERS = ("Linear", "Embedding", "Parameter", "LayerNorm", "RMSNorm", "Conv1d", "Conv2d", "GRU", "LSTM")


def parameters(source: Source) -> Iterator[Hit]:
    """What is done to an expression that looks like a parameter, outside a gather and outside a model."""
    for node in source.nodes:
        if source.parameter(node) and not source.in_model(node):
            kind = _use(source, node)
            gather = source.gather(node)
            if kind is not None and gather is None:
                yield node, kind, dotted(node)
            elif kind in ("write", "data") and _unkept(gather) and _is_written(source, node):
                yield node, "lost_edit", dotted(node)


def _use(source: Source, node: ast.AST) -> str | None:
    """The kind of trap that the expression around a parameter makes of it, None for a harmless one."""
    outer = source.parents[node]
    if isinstance(outer, ast.Attribute):
        return _attribute(source, outer)
    if isinstance(outer, ast.Subscript) and outer.value is node:
        return "write" if isinstance(outer.ctx, ast.Store) else "read"
    if isinstance(outer, ast.BinOp | ast.Compare | ast.UnaryOp | ast.AugAssign):
        return None if isinstance(outer, ast.Compare) and isinstance(outer.ops[0], ast.Is | ast.IsNot) else "read"
    if isinstance(outer, ast.Dict | ast.List | ast.Tuple):
        outer = source.parents[outer]
    if not isinstance(outer, ast.Call) or outer.func is node:
        return None
    name, called = last(outer), dotted(outer.func)
    if name in ("save", "save_file", "dump", "dumps"):
        return "save"
    if name == "len":
        return "size"
    if "init." in called and name.endswith("_"):
        return "write"
    return "read" if called.startswith(("torch.", "F.", "nn.utils.", "np.")) else None


def _attribute(source: Source, outer: ast.Attribute) -> str | None:
    if outer.attr == "requires_grad" and isinstance(outer.ctx, ast.Store):
        return "requires_grad" if _after_engine(source, outer) else None
    if outer.attr == "requires_grad_":
        return "requires_grad" if _after_engine(source, outer) else None
    if outer.attr in SAFE:
        return None
    if outer.attr == "grad":
        return "gradient"
    if outer.attr == "data":
        return "write" if isinstance(outer.ctx, ast.Store) else "data"
    if outer.attr in SIZE:
        return "size"
    return "write" if outer.attr.endswith("_") else "read"


def _is_written(source: Source, node: ast.AST) -> bool:
    """p.data.fill_(), p.data = x, p.mul_(), p[0] = x, nn.init.zeros_(p)."""
    chain = [node, *source.above(node)]
    for outer in chain[1:]:
        if isinstance(outer, ast.Attribute | ast.Subscript) and isinstance(outer.ctx, ast.Store):
            return True
        if isinstance(outer, ast.Call) and last(outer).endswith("_"):
            return True
        if isinstance(outer, ast.stmt):
            return False
    return False


def _unkept(gather: ast.Call | None) -> bool:
    """Whether a gather is DeepSpeed's own and names no modifier rank."""
    if gather is None or last(gather) != "GatheredParameters":
        return False
    return len(gather.args) < 2 and all(word.arg != "modifier_rank" for word in gather.keywords)


def _after_engine(source: Source, node: ast.AST) -> bool:
    """Whether a node lies in a function that is given an engine, or speaks of one."""
    function = source.function(node)
    given = [argument.arg for argument in function.args.args] if isinstance(function, ast.FunctionDef) else []
    return root(node) == "engine" or "engine" in given


def modules(source: Source) -> Iterator[Hit]:
    """Calls on or of a whole partitioned model: state dicts, copies, casts, lists of all parameters."""
    for node in source.nodes:
        if not isinstance(node, ast.Call) or source.in_model(node) or source.gather(node):
            continue
        name, called = last(node), dotted(node.func)
        first = node.args[0] if node.args else None
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        ours = owner is not None and _is_model(source, owner)
        if name == "state_dict" and ours and last(source.parents[node]) != "keys":
            yield node, "state_dict", called
        elif name == "load_state_dict" and ours:
            yield node, "load", called
        elif name in CASTS and ours and _after_engine(source, node):
            yield node, "write", called
        elif name == "requires_grad_" and ours and _after_engine(source, node):
            yield node, "requires_grad", called
        elif name == "no_sync":
            yield node, "no_sync", called
        elif name == "deepcopy" and first is not None and _is_model(source, first):
            yield node, "copy", dotted(first)
        elif first is not None and last(first) in LISTS and not source.whole(first):
            yield from _of_all(node, name, called)


def _of_all(node: ast.Call, name: str, called: str) -> Iterator[Hit]:
    """A call that is given model.parameters()."""
    if name.startswith("clip_grad"):
        yield node, "gradient", called
    elif name == "parameters_to_vector":
        yield node, "read", called
    elif "optim." in called and name != "step":
        yield node, "optimizer", called


def _is_model(source: Source, node: ast.AST) -> bool:
    """engine.module, engine.module.layer, model: not what was built on the spot, nor a buffer."""
    if not isinstance(node, ast.Name | ast.Attribute) or source.whole(node) or last(node) in BUFFERS:
        return False
    return bool(MODELS & set(dotted(node).split(".")))


def gathers(source: Source) -> Iterator[Hit]:
    """Gathers of what is no list of parameters."""
    for node in source.nodes:
        if isinstance(node, ast.Call) and last(node) == "GatheredParameters" and node.args:
            given = node.args[0]
            named = isinstance(given, ast.Call) and last(given) in ("dict", "named_parameters", "state_dict")
            layer = isinstance(given, ast.Attribute) and given.attr not in LEAVES and "module" in dotted(given)
            if named or layer or isinstance(given, ast.Dict):
                yield node, "empty_gather", dotted(given)


def assignments(source: Source) -> Iterator[Hit]:
    """Layers and parameters given to a model that stands already."""
    for node in source.nodes:
        if not isinstance(node, ast.Assign) or source.in_model(node):
            continue
        for target in node.targets:
            if not isinstance(target, ast.Attribute) or not _is_model(source, target.value):
                continue
            fresh = isinstance(node.value, ast.Call) and dotted(node.value.func).startswith(("nn.", "torch.nn."))
            tie = last(node.value) in LEAVES and target.attr in LEAVES
            if _after_engine(source, node) and (fresh or tie):
                yield node, "late", dotted(target)
            elif fresh:
                yield node, "unpartitioned", dotted(target)


def layers(source: Source) -> Iterator[Hit]:
    """Layers that ZeRO cannot train: sparse gradients, no elements."""
    for node in source.nodes:
        if not isinstance(node, ast.Call):
            continue
        if any(word.arg == "sparse" and _constant(word.value) is True for word in node.keywords):
            yield node, "sparse", dotted(node.func)
        sizes = node.args
        if last(node) == "Parameter" and node.args and isinstance(node.args[0], ast.Call):
            sizes = node.args[0].args
        if last(node) in HOLD_PARAMETERS and any(
            type(_constant(size)) is int and _constant(size) == 0 for size in sizes
        ):
            yield node, "zero_size", dotted(node.func)


def _constant(node: ast.AST) -> object:
    return node.value if isinstance(node, ast.Constant) else None


RULES: tuple[Callable[[Source], Iterator[Hit]], ...] = (parameters, modules, gathers, assignments, layers)
