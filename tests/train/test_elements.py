"""Casts without torch are torch's, bit for bit, and a .pt file read without torch is what torch reads.

Run by pytest in this process, on files written here.
Must never compare arrays by value where bits are meant.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from launcher.errors import UserError
from recipes.shared.checkpoint import unpickle
from recipes.shared.elements import NAMES, Array, as_torch, cast, element, is_floating

SPREAD = 200_003  # bit patterns of fp32, spread over all of them; a prime, so that low bits vary
DAMAGED = 300  # copies of a small file with a few bytes changed


def fp32_patterns() -> Array:
    """Zeros, infinities, NaN, subnormals, ties and their neighbours in both 16-bit types, and a spread of all else."""
    every = np.linspace(0, 2**32 - 1, SPREAD).astype(np.uint32)
    halves = np.arange(2**16, dtype=np.uint32)
    ties16 = np.concatenate([(halves << 16) + np.uint32(low) for low in (0, 0x7FFF, 0x8000, 0x8001)])
    exact = np.arange(2**16, dtype=np.uint16).view(np.float16)
    finite = exact[np.isfinite(exact)].astype(np.float32)
    between = (np.unique(finite)[:-1].astype(np.float64) + np.unique(finite)[1:]) / 2
    ties = between.astype(np.float32)
    near = [np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)]
    return np.concatenate([every.view(np.float32), ties16.view(np.float32), ties, *near]).astype(np.float32)


def bits(array: Array) -> Array:
    return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16", "float64"])
def test_a_cast_is_torchs_bit_for_bit(name: str, source: str) -> None:
    """Of NaN, which torch gives other bits in vectors than in single elements, only that it stays NaN."""
    given = fp32_patterns() if source in ("float32", "float64") else np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        given = given.astype(np.float64) if source == "float64" else given.view(element(source))
    ours, theirs = cast(given, element(name)), as_torch(given).to(getattr(torch, name))
    assert ours.dtype == element(name) and theirs.dtype == getattr(torch, name)
    wide, nan = ours.astype(np.float32), torch.isnan(theirs).numpy()
    assert (np.isnan(wide) == nan).all() and nan.any()
    their_bits = theirs.view(torch.int16).numpy().view(np.uint16)
    assert (bits(ours)[~nan] == their_bits[~nan]).all()
    assert np.isinf(wide).any() and (wide == 0).any()


def test_16_bit_becomes_fp32_exactly() -> None:
    for source in ("bfloat16", "float16"):
        given = np.arange(2**16, dtype=np.uint16).view(element(source))
        theirs = as_torch(given).float().numpy()
        nan = np.isnan(theirs)
        assert (bits(cast(given, element("float32")))[~nan] == bits(theirs)[~nan]).all()


def tensors() -> dict[str, Any]:
    """What DeepSpeed and its users save: every element type, views, shared storages, parameters, nothing at all."""
    torch.manual_seed(0)
    base = torch.randn(6, 4)
    every = {name: (torch.randn(3, 5) * 9).to(getattr(torch, name)) for name in NAMES}
    odd = {
        "transposed": base.T,
        "column": base[:, 1],
        "later": base[2:],
        "tied": base,
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 7),
        "expanded": torch.ones(1).expand(4),
        "parameter": torch.nn.Parameter(torch.randn(3)),
    }
    return every | odd


def test_a_file_is_read_as_torch_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    marked = torch.nn.Parameter(torch.arange(3.0))
    marked.ds_numel = 3  # saved with its attributes, by another function
    noted = torch.arange(3.0)
    noted.ds_numel = 3
    plain = {"n": 1, "s": torch.Size([2, 3]), "d": torch.float16, "l": [1.5, None, {"a"}]}
    torch.save({"tensors": tensors() | {"marked": marked, "noted": noted}, "plain": plain}, path)
    found, expected = unpickle.load(path), torch.load(path, weights_only=False)
    assert found["plain"]["s"] == (2, 3) and found["plain"]["l"] == plain["l"]
    for name, tensor in expected["tensors"].items():
        array = found["tensors"][name]
        assert not array.flags.writeable or array.size == 0, name
        ours = as_torch(array.copy())
        assert (ours.dtype, ours.shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(ours, tensor), name
        assert is_floating(array.dtype) == tensor.is_floating_point(), name
    place = {name: found["tensors"][name].__array_interface__["data"][0] for name in ("tied", "transposed", "later")}
    assert place["tied"] == place["transposed"] == place["later"] - 2 * 4 * 4  # two rows of four fp32


def test_a_damaged_file_is_refused_and_nothing_beyond_it_is_read(tmp_path: Path) -> None:
    """Wherever bytes change, the answer is a UserError or arrays that lie within the file."""
    path, chance = tmp_path / "x.pt", random.Random(7)
    torch.save(tensors(), path)
    whole, refused = path.read_bytes(), 0
    for number in range(DAMAGED):
        data = bytearray(whole)
        if number % 3 == 0:
            data = data[: chance.randrange(len(data))]
        for _ in range(4 if data else 0):
            data[chance.randrange(min(len(data), 4000 if number % 2 else len(data)))] = chance.randrange(256)
        path.unlink()  # what is mapped from before stays as it was
        path.write_bytes(data)
        try:
            found = unpickle.load(path)
        except UserError:
            refused += 1
        else:
            for value in found.values() if isinstance(found, dict) else ():
                if isinstance(value, np.ndarray) and value.size < 10_000:
                    value.tobytes()
    assert DAMAGED / 3 <= refused < DAMAGED


def test_shapes_that_reach_beyond_their_storage_are_refused(tmp_path: Path) -> None:
    class Beyond:
        def __reduce__(self) -> Any:
            storage = torch.storage.TypedStorage(
                wrap_storage=torch.zeros(4).untyped_storage(), dtype=torch.float32, _internal=True
            )
            return torch._utils._rebuild_tensor_v2, (storage, 2, (3,), (1,), False, {})

    torch.save({"x": Beyond()}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="cannot be read: strides is incompatible"):
        unpickle.load(tmp_path / "x.pt")
