"""What the model answers to held-out prompts at each evaluation: records in the run's generations.jsonl.

Called by the loop on every rank, where `eval.generate` asks for it.
Must never stop a run because an answer cannot be shown: the text is for people, ids are kept beside it.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

from recipes.shared.data.layouts import Padded
from recipes.shared.data.meta import DataMeta
from recipes.shared.distributed import say
from recipes.shared.generate import Until, generate
from recipes.shared.state import TrainState


class Answers:
    """Asks the same prompts each time: those of the first held-out conversations, up to their first response."""

    def __init__(self, state: TrainState, validation: Padded, meta: DataMeta) -> None:
        self.state, self.meta = state, meta
        count = min(state.plan.config.eval.generate, len(validation))
        fields = state.plan.config.model.config
        positions = fields.get("max_position_embeddings", fields.get("n_positions")) or math.inf
        self.until = Until(frozenset(meta.ends), state.plan.config.eval.max_new_tokens, positions)
        self.asked = [validation.conversations.prompt(number) for number in range(count)]

    def __call__(self) -> None:
        """All ranks; rank 0 writes and shows."""
        if not self.asked:
            return
        plan, ranks = self.state.plan, self.state.ranks
        prompts = [prompt.tolist() for prompt, _ in self.asked]
        answers = generate(self.state.engine, ranks, prompts, self.until, plan.batch.micro_batch_size)
        if ranks.is_main:
            with self.state.run.generations.open("a", encoding="utf-8") as file:
                for number, answer in enumerate(answers):
                    record = self._record(number, answer)
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    if number == 0:
                        say(self.state.run, f"answer to {record['prompt']!r}: {record['answer']!r}")

    def _record(self, number: int, answer: list[int]) -> dict[str, Any]:
        prompt, response = self.asked[number]
        return {
            "step": self.state.step,
            "sample": number,
            "prompt": self._text(prompt.tolist()),
            "response": self._text(response.tolist()),
            "answer": self._text(answer),
            "ids": answer,
        }

    def _text(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.meta.tokenizer, local_files_only=True)
