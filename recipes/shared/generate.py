"""Prompts -> greedy continuations by an engine of any stage, the same as a single process gives.

Called by `answers` at evaluations, on every rank.
Must never let ranks run different numbers of forwards: at stage 3 each gathers weights from all, and one that stops
early leaves the others waiting for good (deepspeedai/DeepSpeed#8262).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

from recipes.shared import watch
from recipes.shared.distributed import Ranks

Ids = list[int]


def generate(
    engine: Any, ranks: Ranks, prompts: Sequence[Ids], ends: Collection[int], max_new_tokens: int, rows: int
) -> list[Ids]:
    """What follows each prompt: the likeliest token each time, up to and with the first of `ends`, or max_new_tokens.

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
            answers += _continued(engine, ranks, mine[start : start + rows], frozenset(ends), max_new_tokens)
    engine.train()
    every: list[Any] = [None] * ranks.world_size
    dist.all_gather_object(every, answers)
    return [every[number % ranks.world_size][number // ranks.world_size] for number in range(len(prompts))]


def _continued(engine: Any, ranks: Ranks, prompts: list[Ids], ends: frozenset[int], max_new_tokens: int) -> list[Ids]:
    """The answers to a rank's prompts of one round; as many forwards on every rank as the longest answer takes."""
    texts = [list(prompt) for prompt in prompts]
    live = set(range(len(texts)))
    for _ in range(max_new_tokens):
        anyone = torch.tensor(float(bool(live)), device=ranks.device)
        dist.all_reduce(anyone, op=dist.ReduceOp.MAX)
        if not anyone:
            break
        watch.at("generation")
        for row, token in _next(engine, ranks, [texts[row] for row in sorted(live)]).items():
            number = sorted(live)[row]
            texts[number].append(token)
        live = {number for number in live if texts[number][-1] not in ends}
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]


def _next(engine: Any, ranks: Ranks, texts: list[Ids]) -> dict[int, int]:
    """{row: its likeliest next token}, after one forward. What fills a row lies behind its end, where nothing looks."""
    width = max((len(text) for text in texts), default=1)
    ids = torch.zeros(max(1, len(texts)), width, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    logits = engine(input_ids=ids.to(ranks.device)).logits
    return {row: int(logits[row, len(text) - 1].argmax()) for row, text in enumerate(texts)}
