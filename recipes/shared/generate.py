"""Prompts -> greedy continuations by an engine of any stage, the same as a single process gives.

Called by `answers` at evaluations, on every rank.
Must never let ranks run different numbers of forwards: at stage 3 each gathers weights from all, and one that stops
early leaves the others waiting for good (deepspeedai/DeepSpeed#8262).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from recipes.shared import watch
from recipes.shared.distributed import Ranks

Ids = list[int]


@dataclass(frozen=True)
class Until:
    """Where an answer stops: with the first of `ends`, after `new` tokens, or where the model has no more positions."""

    ends: frozenset[int]
    new: int
    positions: float = math.inf


def generate(engine: Any, ranks: Ranks, prompts: Sequence[Ids], until: Until, rows: int) -> list[Ids]:
    """What follows each prompt: the likeliest token each time, and what ended it.

    All ranks, with the same prompts (each at least one token); every rank gets all answers. Rank r takes prompts r,
    r + world size, ..., up to `rows` at once; with none left it runs the forwards of the others on a token of its own.
    There is no cache: whole rows pass through the model for each token, so any model will do, at a price that is small
    beside gathering its weights.
    """
    mine = list(prompts[ranks.rank :: ranks.world_size])
    most = -(-len(prompts) // ranks.world_size)
    answers: list[Ids] = []
    engine.eval()
    with torch.no_grad():
        for start in range(0, most, rows):
            answers += _continued(engine, ranks, mine[start : start + rows], until)
    engine.train()
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, answers)
    return [every[number % ranks.world_size][number // ranks.world_size] for number in range(len(prompts))]


def _continued(engine: Any, ranks: Ranks, prompts: list[Ids], until: Until) -> list[Ids]:
    """The answers to a rank's prompts of one round; as many forwards on every rank as the longest answer takes."""
    texts = [list(prompt) for prompt in prompts]
    live = [number for number, text in enumerate(texts) if len(text) < until.positions]
    for _ in range(until.new):
        anyone = torch.tensor(float(bool(live)), device=ranks.device)
        dist.all_reduce(anyone, op=dist.ReduceOp.MAX)
        if not anyone:
            break
        watch.at("generation")
        for number, token in zip(live, _next(engine, ranks, [texts[number] for number in live]), strict=True):
            texts[number].append(token)
        live = [n for n in live if texts[n][-1] not in until.ends and len(texts[n]) < until.positions]
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _next(engine: Any, ranks: Ranks, texts: list[Ids]) -> Ids:
    """The likeliest next token of each, after one forward. A row is filled behind its end, where nothing looks."""
    width = max((len(text) for text in texts), default=1)
    ids = torch.zeros(max(1, len(texts)), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    logits = engine(input_ids=ids.to(ranks.device)).logits
    return [int(logits[row, len(text) - 1].argmax()) for row, text in enumerate(texts)]
