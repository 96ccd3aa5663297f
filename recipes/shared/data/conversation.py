"""One conversation -> token ids and which of them are responses, as a tokenizer's chat template lays it out.

Called by the corpus kind `chat` for every record.
Must never guess what a response is: where the template does not tell, it is an error that names the record.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from launcher.errors import Problem, UserError
from recipes.shared.data.encode import FolderEncoder

MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")  # Hugging Face's own: around what the model is to write
MARKERS = "a template with {% generation %} ... {% endgeneration %} around its responses (data.chat_template=FILE)"
ASSISTANT = "assistant"

Message = dict[str, str]


class Encoded(NamedTuple):
    """One conversation up to its last response token."""

    tokens: npt.NDArray[np.int64]
    responses: npt.NDArray[np.bool_]
    """Which tokens are learned. Never the first: nothing comes before it."""


class ChatEncoder:
    """A local Hugging Face tokenizer with a chat template, its own or one from a file."""

    def __init__(self, folder: str, template: str | None) -> None:
        """Raises: UserError when the tokenizer cannot be loaded or used, or there is no template."""
        encoder = FolderEncoder(folder)
        self.tokenizer, self.vocab_size = encoder.tokenizer, encoder.vocab_size
        self.template = _template(self.tokenizer, folder, template)
        self.marked = MARKED.search(self.template) is not None
        if not self.tokenizer.is_fast:
            why = "it does not tell which characters a token stands for (it is no fast tokenizer)"
            raise UserError(Problem("data.tokenizer", folder, why, "save it as a fast one: tokenizer.json"))
        self.added = set(self.tokenizer.added_tokens_decoder)
        self.ends: set[int] = set()
        """Added tokens that ended a response so far, and the tokenizer's eos: where generation stops."""
        if self.tokenizer.eos_token_id is not None:
            self.ends.add(int(self.tokenizer.eos_token_id))

    @property
    def pad(self) -> int:
        """Id that fills rows up; it is never learned, nor looked at."""
        found = self.tokenizer.pad_token_id
        return int(found) if found is not None else min(self.ends, default=0)

    def encode(self, messages: Sequence[Message], where: str, place: str) -> Encoded:
        """Raises: UserError (`where` the option, `place` the file and line) when responses cannot be told apart."""
        last = max(number for number, message in enumerate(messages) if message["role"] == ASSISTANT)
        messages = messages[: last + 1]  # what nobody answers teaches nothing
        try:
            tokens, responses = self._marked(messages) if self.marked else self._rendered(messages)
        except _Unclear as error:
            raise UserError(Problem(where, place, str(error), MARKERS)) from None
        except Exception as error:  # whatever a template raises: Jinja's errors, KeyError, TypeError
            why = f"the chat template does not take it: {next(iter(str(error).splitlines()), type(error).__name__)}"
            raise UserError(Problem(where, place, why, "mend the record, or use another template")) from error
        responses[:1] = False
        if not responses.any():
            raise UserError(Problem(where, place, "no token of it is a response in this template", MARKERS))
        self._note_ends(tokens, responses)
        end = int(np.flatnonzero(responses)[-1]) + 1
        return Encoded(tokens[:end], responses[:end])

    def _marked(self, messages: Sequence[Message]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """By the template's own markers."""
        found = self.tokenizer.apply_chat_template(
            messages, chat_template=self.template, return_dict=True, return_assistant_tokens_mask=True
        )
        return np.array(found["input_ids"], dtype=np.int64), np.array(found["assistant_masks"], dtype=np.bool_)

    def _rendered(self, messages: Sequence[Message]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """By what each response adds to the text before it."""
        text = self._text(messages)
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        tokens = np.array(found["input_ids"], dtype=np.int64)
        begins, ends = np.array(found["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        responses = np.zeros(tokens.size, dtype=np.bool_)
        for number, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                start, stop = self._span(messages, number, text)
                inside = np.flatnonzero((ends > start) & (begins < stop))
                responses[self._without_layout(inside, tokens)] = True
        return tokens, responses

    def _span(self, messages: Sequence[Message], number: int, text: str) -> tuple[int, int]:
        """Characters of `text` that are message `number`, a response, with what ends it."""
        before = self._text(messages[:number], add_generation_prompt=True)
        after = self._text(messages[: number + 1])
        if not after.startswith(before):
            raise _Unclear(f"with response {number} the template changes the text before it")
        if not text.startswith(after):
            raise _Unclear(f"the template renders response {number} otherwise when more follows")
        if not after[len(before) :].lstrip().startswith(messages[number]["content"].strip()):
            raise _Unclear(f"the text that the template adds for response {number} does not begin with its content")
        return len(before), len(after)

    def _without_layout(self, inside: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Without white space after the token that ends a turn: nobody generates on."""
        special = [position for position, token in enumerate(tokens[inside]) if int(token) in self.added]
        if special and not self.tokenizer.decode(tokens[inside[special[-1] + 1 :]]).strip():
            return inside[: special[-1] + 1]
        return inside

    def _text(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                list(messages),
                chat_template=self.template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def _note_ends(self, tokens: npt.NDArray[np.int64], responses: npt.NDArray[np.bool_]) -> None:
        follows = np.append(responses[1:], False)
        self.ends |= {int(token) for token in tokens[responses & ~follows]} & self.added


class _Unclear(Exception):
    """What is a response cannot be told."""


def _template(tokenizer: Any, folder: str, path: str | None) -> str:
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    try:
        return str(tokenizer.get_chat_template())
    except ValueError:  # there is none, or several and no default
        why = "it has no chat template, so it does not say how a conversation becomes text"
        fix = "use a tokenizer that has one, or name a Jinja file: data.chat_template=FILE"
        raise UserError(Problem("data.tokenizer", folder, why, fix)) from None


def messages_of(record: dict[str, Any], where: str, place: str) -> list[Message]:
    """The messages of a record: its `messages`, or its `prompt` and `response`. Raises: UserError for anything else."""

    def wrong(why: str) -> UserError:
        fix = '{"messages": [{"role": "user", "content": "..."}, ...]} or {"prompt": "...", "response": "..."}'
        return UserError(Problem(where, place, why, fix))

    pair = [name for name in ("prompt", "response") if name in record]
    if ("messages" in record) == bool(pair) or len(pair) == 1:
        raise wrong(f"it has {', '.join(sorted(map(str, record))) or 'no field'}, and it needs one of the two forms")
    if pair:
        messages: Any = [
            {"role": role, "content": record[name]} for name, role in (("prompt", "user"), ("response", ASSISTANT))
        ]
    else:
        messages = record["messages"]
    if not isinstance(messages, list):
        raise wrong(f"its messages are a JSON {type(messages).__name__}, and a list is needed")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise wrong(f"message {number} has no role and content that are text")
    if not any(message["role"] == ASSISTANT for message in messages):
        raise wrong("it has no response: no message of the assistant")
    return messages
