"""Makes the order of training samples: dataset indices from the seed and the global sample index alone.

Called by the train loop for every batch and by evaluation tools that must replay an order.
Must never depend on the world size, the batch size or an earlier call; changing any constant here changes every
loss curve and what a resumed run reads next.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

# Luby and Rackoff need four rounds for a strong pseudorandom permutation when halves are wide. Ours are a few bits
# wide for small corpora, where more rounds are what removes visible structure.
NUM_ROUNDS = 8

_MASK64 = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # splitmix64's increment: 2**64 / golden ratio, made odd


def sample_indices(seed: int, num_samples: int, start: int, count: int) -> npt.NDArray[np.int64]:
    """Dataset index of the global samples start .. start + count - 1.

    Epoch e = global index // num_samples. Within an epoch every sample appears exactly once, and each epoch has its
    own permutation: a Feistel network keyed by (seed, epoch) over the smallest even-bit domain that holds num_samples,
    walked along its cycle until it falls inside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    Memory is O(count) and any start is instant.

    Args: seed any integer (taken modulo 2**64); num_samples >= 1 samples in the dataset; start >= 0; count >= 0.
    Returns: int64 [count], each in [0, num_samples).
    """
    assert num_samples >= 1 and start >= 0 and count >= 0
    assert start + count <= 1 << 63, "global sample indices are kept under 2**63"
    position = np.arange(count, dtype=np.uint64) + np.uint64(start)
    epoch, within = np.divmod(position, np.uint64(num_samples))
    key = _mix(_mix(epoch + _GOLDEN) ^ np.uint64(seed & _MASK64))
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    index = _feistel(within, key, half_bits)
    # The domain is under 4 x num_samples, so a step lands outside with probability under 3/4.
    outside = np.flatnonzero(index >= np.uint64(num_samples))
    while outside.size:
        index[outside] = _feistel(index[outside], key[outside], half_bits)
        outside = outside[index[outside] >= np.uint64(num_samples)]
    return index.astype(np.int64)


def _feistel(value: UInt64Array, key: UInt64Array, half_bits: int) -> UInt64Array:
    """A keyed bijection of [0, 2**(2 * half_bits)); value and key are uint64 [n]."""
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = value >> bits, value & mask
    for number in range(1, NUM_ROUNDS + 1):
        round_key = key + np.uint64(number * int(_GOLDEN) & _MASK64)
        left, right = right, left ^ (_mix(right ^ round_key) & mask)
    return (left << bits) | right


def _mix(value: UInt64Array) -> UInt64Array:
    """splitmix64's finaliser (Steele, Lea, Flood 2014); uint64 arrays wrap silently, which is what it wants."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
