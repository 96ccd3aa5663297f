"""Batches of conversations: several packed into each row, or one a row, filled up.

Made by `corpus.open_corpus`; the loop and the evaluation read them.
Must never let a token see another conversation, or decide the order of samples (that is `order`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from recipes.shared.data.conversations import Conversations

Int64s = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[np.int64]]

IGNORED = -100  # a label that torch's cross entropy leaves out
MULTIPLE = 8  # of which the width of filled rows is: few shapes, and whole tiles on an accelerator


class Padded:
    """One conversation a row; rows are as wide as the longest of the batch needs."""

    def __init__(self, conversations: Conversations, sequence_length: int, pad: int) -> None:
        self.conversations, self.pad, self.sequence_length = conversations, pad, sequence_length

    def __len__(self) -> int:
        """Conversations."""
        return len(self.conversations)

    def batch(self, indices: Int64s) -> dict[str, npt.NDArray[np.generic]]:
        """input_ids, labels and attention_mask, each int64 [n, width]."""
        widest = int(self.conversations.lengths[indices].max())
        width = min(self.sequence_length, -(-widest // MULTIPLE) * MULTIPLE)
        arrays = _empty(len(indices), width, self.pad) | {"attention_mask": np.zeros((len(indices), width), np.int64)}
        for row, number in enumerate(indices):
            size = _put(arrays, row, 0, self.conversations, int(number))
            arrays["attention_mask"][row, :size] = 1
        return {**arrays}

    def weights(self, indices: Int64s) -> npt.NDArray[np.float64]:
        """Response tokens of each, float64 [n]."""
        return self.conversations.counts[indices].astype(np.float64)

    def counts(self) -> dict[str, int]:
        """What became of the conversations: samples they make, how many were cut, and left out."""
        return _counts(self.conversations, len(self))

    def describe(self) -> str:
        """The same in words."""
        return _words(self.conversations, self.sequence_length)

    def grouped(self, indices: Int64s) -> Int64s:
        """The samples of a step by their length: those that meet in a micro-batch, on any rank, are of a size."""
        return indices[np.argsort(self.conversations.lengths[indices], kind="stable")]


class Packed:
    """Whole conversations side by side in rows of sequence_length tokens.

    Positions begin anew with each: transformers then keeps them apart (`masking_utils.find_packed_sequence_indices`,
    used where there is no attention mask). What is left of a row is one more of them, without labels.
    """

    def __init__(self, conversations: Conversations, sequence_length: int, pad: int) -> None:
        self.conversations, self.pad, self.sequence_length = conversations, pad, sequence_length
        self.members, self.bounds = pack(conversations.lengths, sequence_length)
        self._counts = np.add.reduceat(conversations.counts[self.members], self.bounds[:-1])

    def __len__(self) -> int:
        """Rows."""
        return len(self.bounds) - 1

    def batch(self, indices: Int64s) -> dict[str, npt.NDArray[np.generic]]:
        """input_ids, labels and position_ids, each int64 [n, sequence_length]."""
        arrays = _empty(len(indices), self.sequence_length, self.pad)
        positions = np.zeros((len(indices), self.sequence_length), np.int64)
        for row, number in enumerate(indices):
            start = 0
            for member in self.members[self.bounds[number] : self.bounds[number + 1]]:
                size = _put(arrays, row, start, self.conversations, int(member))
                positions[row, start : start + size] = np.arange(size)
                start += size
            positions[row, start:] = np.arange(self.sequence_length - start)
        return {**arrays, "position_ids": positions}

    def weights(self, indices: Int64s) -> npt.NDArray[np.float64]:
        """Response tokens of each row, float64 [n]."""
        return self._counts[indices].astype(np.float64)

    def counts(self) -> dict[str, int]:
        """What became of the conversations: samples they make, how many were cut, and left out."""
        return _counts(self.conversations, len(self))

    def describe(self) -> str:
        """The same in words."""
        share = self.conversations.lengths.sum() / (len(self) * self.sequence_length)
        words = _words(self.conversations, self.sequence_length)
        return f"{words}; packed into {len(self)} rows, {share:.0%} full"

    def grouped(self, indices: Int64s) -> Int64s:
        """As they are: all rows are of a length."""
        return indices


def pack(lengths: Int64s, capacity: int) -> tuple[Int64s, Int64s]:
    """Best-fit decreasing: (members, bounds), pack p holds members[bounds[p] : bounds[p + 1]].

    Args: lengths int64 [n], each in [1, capacity]. The same lengths give the same packs anywhere.
    """
    packs: list[list[int]] = []
    open_packs: list[list[int]] = [[] for _ in range(capacity + 1)]  # by what is left in them
    rooms = 0  # bit r: a pack has r tokens left
    for number in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[number])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = open_packs[room].pop()
            if not open_packs[room]:
                rooms ^= 1 << room
        else:
            room, chosen = capacity, len(packs)
            packs.append([])
        packs[chosen].append(number)
        left = room - length
        open_packs[left].append(chosen)
        rooms |= (1 << left) & ~1  # a full pack takes nothing
    sizes = [len(members) for members in packs]
    return np.array([number for members in packs for number in members], np.int64), np.cumsum([0, *sizes])


def _counts(conversations: Conversations, samples: int) -> dict[str, int]:
    left = {"truncated": conversations.truncated, "dropped": conversations.dropped}
    return {"samples": samples, "conversations": len(conversations)} | left


def _words(conversations: Conversations, sequence_length: int) -> str:
    return (
        f"{len(conversations)} conversations to train on: {conversations.truncated} cut to {sequence_length} tokens, "
        f"{conversations.dropped} left out because no response lies within them"
    )


def _empty(rows: int, width: int, pad: int) -> Arrays:
    return {
        "input_ids": np.full((rows, width), pad, np.int64),
        "labels": np.full((rows, width), IGNORED, np.int64),
    }


def _put(arrays: Arrays, row: int, start: int, conversations: Conversations, number: int) -> int:
    """Writes one conversation into a row from `start` on; returns its length."""
    tokens, responses = conversations.read(number)
    place = slice(start, start + tokens.size)
    arrays["input_ids"][row, place] = tokens
    arrays["labels"][row, place] = np.where(responses, tokens, IGNORED)
    return tokens.size
