"""A model as the planner sees it: its modules in the order of the forward, with the elements of their parameters.

Made by `launcher.planner.families`; counted, traced and multiplied by the modules beside it.
Must never know a family.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """A module of a model: its own parameters' elements, and the modules in it, in the order of the forward.

    Modules without parameters count too: DeepSpeed fetches ahead at each of them (at stage 3).
    """

    own: tuple[int, ...] = ()
    inner: tuple[Block, ...] = ()
    leaf: bool = False
    """Experts that DeepSpeed gathers as one module, whichever of them are used (zero_optimization.leaf_module)."""

    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter."""
        return self.own + tuple(size for block in self.inner for size in block.sizes())


@dataclass(frozen=True)
class Part:
    """One piece of a model, `repeats` times."""

    name: str
    repeats: int
    block: Block
    idle: int = 0
    """Of its elements, those that one token does not use: experts it is not sent to."""
    multiplied: bool = True
    """False for a table that is only looked up."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each parameter of one repeat."""
        return self.block.sizes()

    @property
    def parameters(self) -> int:
        """Elements of all repeats."""
        return self.repeats * sum(self.sizes)


@dataclass(frozen=True)
class Shapes:
    """A whole model. FLOPs need two more facts than its parameters: how wide attention is, and what a token meets."""

    parts: tuple[Part, ...]
    attention: float
    """Heads x their width, over all layers, times the share of a sample's token pairs that are scored."""
    tied_head: int = 0
    """Elements of a table that is the output layer as well: stored once, and multiplied."""
    passes: float = 1.0
    """Share of a sample's tokens that go through each part: a half where an encoder reads one half of them."""

    @property
    def parameters(self) -> int:
        """All elements, tied ones once."""
        return sum(part.parameters for part in self.parts)

    @property
    def active(self) -> int:
        """Elements that one token uses."""
        return self.parameters - sum(part.repeats * part.idle for part in self.parts)

    @property
    def multiplied(self) -> int:
        """Elements that one token is multiplied with: `active`, less looked-up tables, with a tied head."""
        used = [part.parameters - part.repeats * part.idle for part in self.parts if part.multiplied]
        return sum(used) + self.tied_head

    def sizes(self) -> list[tuple[int, int]]:
        """(elements, how many parameters have them)."""
        return [(size, part.repeats) for part in self.parts for size in part.sizes]
