"""A valid DeepSpeed configuration -> the same with one mistake in it, by kind, from a seeded generator.

Used by the config bench. What is legal is told by the generated schema alone.
Must never yield a configuration that is valid after all: a mutation that lands on another legal key is drawn again.
"""

from __future__ import annotations

import copy
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launcher.ds_schema import levels

Tree = dict[str, Any]


@dataclass(frozen=True)
class Mutant:
    """One broken configuration: the kind of mistake, in words what was done, and the result."""

    kind: str
    what: str
    deepspeed: Tree


def mutants(bases: list[Tree], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, the kinds in turn, drawn from `bases`."""
    draw = random.Random(seed)
    makers: list[Callable[[Tree, random.Random], Mutant | None]] = [typo, moved, wrong_type, illegal]
    found: list[Mutant] = []
    while len(found) < count:
        mutant = makers[len(found) % len(makers)](copy.deepcopy(draw.choice(bases)), draw)
        if mutant is not None:
            found.append(mutant)
    return found


def typo(tree: Tree, draw: random.Random) -> Mutant | None:
    """One letter of one key dropped, doubled, changed or swapped with its neighbour; at any level."""
    block, path, name = draw.choice(list(_keys(tree)))
    at = draw.randrange(len(name))
    letter = draw.choice(string.ascii_lowercase)
    wrong = draw.choice(
        [
            name[:at] + name[at + 1 :],
            name[:at] + name[at] + name[at:],
            name[:at] + letter + name[at + 1 :],
            name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :],
        ]
    )
    if wrong in _legal(tree, path) or not wrong:
        return None
    block[wrong] = block.pop(name)
    return Mutant("typo", f"{_dotted(path, name)} -> {wrong}", tree)


def moved(tree: Tree, draw: random.Random) -> Mutant | None:
    """One key, with all below it, put into another block."""
    source, path, name = draw.choice(list(_keys(tree)))
    target_path = draw.choice([(), *(place for _, place in _blocks(tree) if place)])
    target = _at(tree, target_path)
    inside = target_path[: len(path) + 1] == (*path, name)
    if target is source or inside or name in _legal(tree, target_path) or name in target:
        return None
    target[name] = source.pop(name)
    return Mutant("moved", f"{_dotted(path, name)} -> {_dotted(target_path, name)}", tree)


def wrong_type(tree: Tree, draw: random.Random) -> Mutant | None:
    """One value replaced by one of another type."""
    block, path, name = draw.choice(list(_keys(tree)))
    value = block[name]
    others: list[Any] = ["several", [1, "two"], {"nested": 1}]
    if isinstance(value, dict):
        others = ["on", 3, [value]]
    elif isinstance(value, bool):
        others = ["perhaps", 2.5, [True]]
    elif isinstance(value, str):
        others = [["a"], {"a": 1}, 17.5]
    elif isinstance(value, list):
        others = ["0.9", {"first": 0.9}, ["a", "b"]]
    block[name] = draw.choice(others)
    return Mutant("wrong type", f"{_dotted(path, name)} = {block[name]!r}", tree)


def illegal(tree: Tree, draw: random.Random) -> Mutant | None:
    """Legal keys and values that cannot be honoured together, or not at all."""
    what, change = draw.choice(_ILLEGAL)
    before = copy.deepcopy(tree)
    change(tree)
    return Mutant("illegal combination", what, tree) if tree != before else None


def _zero(tree: Tree, stage: int, **keys: Any) -> None:
    tree["zero_optimization"] = {**tree.get("zero_optimization", {}), "stage": stage, **keys}


_ILLEGAL: list[tuple[str, Callable[[Tree], Any]]] = [
    ("offload_param below stage 3", lambda t: _zero(t, 2, offload_param={"device": "cpu"})),
    ("offload_optimizer at stage 0", lambda t: _zero(t, 0, offload_optimizer={"device": "cpu"})),
    ("nvme optimizer below stage 3", lambda t: _zero(t, 2, offload_optimizer={"device": "nvme", "nvme_path": "/d"})),
    ("nvme without a path", lambda t: _zero(t, 3, offload_optimizer={"device": "nvme"})),
    ("qwZ below stage 3", lambda t: _zero(t, 2, zero_quantized_weights=True)),
    ("qwZ without CUDA", lambda t: _zero(t, 3, zero_quantized_weights=True)),
    ("hpZ that does not divide the world", lambda t: _zero(t, 3, zero_hpz_partition_size=3)),
    ("hpZ below stage 3", lambda t: _zero(t, 1, zero_hpz_partition_size=2)),
    ("stage 4", lambda t: _zero(t, 4)),
    ("bf16 and fp16", lambda t: t.update(bf16={"enabled": True}, fp16={"enabled": True})),
    ("warm-up longer than the run", lambda t: t["scheduler"]["params"].update(warmup_num_steps=10**6)),
    ("max_grad_norm in optimizer.params", lambda t: t["optimizer"]["params"].update(max_grad_norm=1.0)),
    ("literal auto", lambda t: t.update(gradient_clipping="auto")),
    ("negative bucket", lambda t: _zero(t, 2, reduce_bucket_size=-1)),
    ("a fraction of an element", lambda t: _zero(t, 2, reduce_bucket_size=0.5)),
    ("removed block", lambda t: t.update(elasticity={"enabled": False})),
    ("obsolete flag", lambda t: _zero(t, 2, cpu_offload=True)),
    ("elastic checkpoint", lambda t: _zero(t, 1, elastic_checkpoint=True)),
]


def _blocks(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[Tree, tuple[str, ...]]]:
    yield tree, path
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _blocks(value, (*path, name))


def _keys(tree: Tree) -> Iterator[tuple[Tree, tuple[str, ...], str]]:
    for block, path in _blocks(tree):
        for name in block:
            yield block, path, name


def _legal(tree: Tree, path: tuple[str, ...]) -> set[str]:
    """Names that are legal in the block at `path`."""
    where = ".".join(("deepspeed", *path))
    return {name for level in levels(tree) if level.where == where for name in level.names()}


def _at(tree: Tree, path: tuple[str, ...]) -> Tree:
    for name in path:
        tree = tree[name]
    return tree


def _dotted(path: tuple[str, ...], name: str) -> str:
    return ".".join((*path, name))
