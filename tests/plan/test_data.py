"""Claims about the order of samples, the windows, and the cache of tokenised corpora.

Run by pytest; what each kind of corpus holds is in test_data_kinds.py.
Must never use the network or the user's own cache folder.
"""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import UserError
from recipes.shared.data.blocks import read_blocks, tail_start
from recipes.shared.data.build import cache_key, open_corpus, prepare
from recipes.shared.data.order import sample_indices
from recipes.shared.data.windows import TokenWindows

REPO = Path(__file__).parents[2]


def text_data(folder: Path, **changes: object) -> dict[str, object]:
    """Options for the *.txt files of `folder`, all of data=text named."""
    options = {"kind": "text", "files": [f"{folder}/*.txt"], "tokenizer": None, "validation_files": []}
    return {**options, "validation_fraction": 0.25, "cache_dir": None, **changes}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A folder with eight text files of 200 bytes, each of a letter of its own."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for letter in "abcdefgh":
        (folder / f"{letter}.txt").write_text(letter * 200)
    return folder


# --- order -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_samples", [*range(1, 70), 255, 256, 257, 1000, 4097])
def test_every_epoch_holds_every_sample_exactly_once(num_samples: int) -> None:
    for epoch in (0, 1, 7):
        order = sample_indices(3, num_samples, epoch * num_samples, num_samples)
        assert order.dtype == np.int64
        assert np.array_equal(np.sort(order), np.arange(num_samples))


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(-(2**40), 2**70),
    num_samples=st.integers(1, 10**12),
    start=st.integers(0, 2**61),
    cuts=st.lists(st.integers(0, 40), min_size=1, max_size=5),
)
def test_order_does_not_depend_on_how_it_is_asked_for(seed: int, num_samples: int, start: int, cuts: list[int]) -> None:
    whole = sample_indices(seed, num_samples, start, sum(cuts))
    parts, at = [], start
    for count in cuts:
        parts.append(sample_indices(seed, num_samples, at, count))
        at += count
    assert np.array_equal(whole, np.concatenate(parts))
    assert whole.shape == (sum(cuts),)
    assert ((whole >= 0) & (whole < num_samples)).all()


def test_epochs_and_seeds_have_different_orders() -> None:
    n = 1000
    orders = [tuple(sample_indices(seed, n, epoch * n, n)) for seed in (0, 1, 2**63) for epoch in (0, 1, 2)]
    assert len(set(orders)) == len(orders)


def test_order_is_frozen() -> None:
    """Fails when a constant of the permutation changes: then every loss curve and every resumed run changes."""
    assert sample_indices(0, 7400, 0, 6).tolist() == [1369, 5602, 4591, 4069, 3736, 707]
    assert sample_indices(1234, 10, 5, 10).tolist() == [3, 5, 4, 9, 8, 7, 0, 5, 4, 6]


def test_order_is_mixed_well_even_for_few_samples() -> None:
    n, num_seeds = 10, 4000
    first = np.concatenate([sample_indices(seed, n, 0, 2)[None] for seed in range(num_seeds)])
    expected = num_seeds / n
    chi2 = ((np.bincount(first[:, 0], minlength=n) - expected) ** 2 / expected).sum()
    assert chi2 < 27.9  # 9 degrees of freedom, p = 0.001; the seeds are fixed, so this never flickers
    # Neighbours in a uniform permutation differ by (n + 1) / 3 on average; standard error 0.04 over the seeds.
    assert abs(np.abs(np.diff(first, axis=1)).mean() - (n + 1) / 3) < 0.16


def test_order_far_into_a_huge_dataset_is_instant() -> None:
    began = time.perf_counter()
    sample_indices(0, 10**12, 10**17, 1000)
    assert time.perf_counter() - began < 1.0  # measured 2 ms; materialising the epoch would need 8 TB


# --- windows and blocks ----------------------------------------------------------------------------------------------


def test_windows_do_not_overlap_and_the_rest_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    np.arange(23, dtype=np.uint16).tofile(path)
    windows = TokenWindows(path, 5)
    assert len(windows) == 4
    batch = windows.tokens(np.array([3, 0]))
    assert batch.dtype == np.int64
    assert batch.tolist() == [[15, 16, 17, 18, 19], [0, 1, 2, 3, 4]]
    assert TokenWindows(path, 5, start=20).tokens(np.array([], dtype=np.int64)).shape == (0, 5)
    assert TokenWindows(path, 4, start=3, num_tokens=8).tokens(np.array([1])).tolist() == [[7, 8, 9, 10]]


@pytest.mark.parametrize("index", [-1, 4])
def test_window_outside_the_corpus_is_refused(tmp_path: Path, index: int) -> None:
    path = tmp_path / "t.bin"
    np.arange(20, dtype=np.uint16).tofile(path)
    with pytest.raises(AssertionError, match="out of range"):
        TokenWindows(path, 5).tokens(np.array([index]))


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="ab\nü€𝄞", max_size=60), block=st.integers(1, 16))
def test_blocks_join_to_the_file_and_never_cut_a_character(
    tmp_path_factory: pytest.TempPathFactory, text: str, block: int
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "f.txt"
    path.write_bytes(text.encode())
    blocks = list(read_blocks(path, 0, path.stat().st_size, block))
    assert b"".join(blocks) == text.encode()
    assert all(blocks)
    for part in blocks:
        part.decode("utf-8")
    if text:
        path.read_bytes()[tail_start(path, 0.3) :].decode("utf-8")


def test_blocks_hold_whole_lines_where_lines_are_shorter(tmp_path: Path) -> None:
    path = tmp_path / "f.txt"
    path.write_bytes(b"12345\n" * 50)
    blocks = list(read_blocks(path, 0, 300, 64))
    assert len(blocks) > 3
    assert all(block.endswith(b"\n") for block in blocks)
    assert tail_start(path, 0.1) % 6 == 0


# --- the cache -------------------------------------------------------------------------------------------------------


def test_meta_holds_the_counts_and_the_entropy_of_what_was_written(corpus: Path, tmp_path: Path) -> None:
    folder = prepare(text_data(corpus), 16, tmp_path / "cache")
    meta, train, validation = open_corpus(folder, 16)
    tokens = np.fromfile(folder / "train.bin", dtype=np.uint16)
    assert (meta.vocab_size, meta.dtype, meta.tokenizer) == (256, "uint16", None)
    assert meta.train_tokens == tokens.size == 6 * 201
    assert meta.validation_tokens == 2 * 201
    assert (len(train), len(validation)) == (6 * 201 // 16, 2 * 201 // 16)
    share = [200 / 1206] * 6 + [6 / 1206]  # six letters and the form feeds between files
    assert math.isclose(meta.unigram_entropy, -sum(p * math.log(p) for p in share), rel_tol=1e-12)
    assert np.array_equal(train.tokens(np.arange(2)).ravel(), tokens[:32])


def test_prepared_corpus_is_not_built_again(corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = prepare(text_data(corpus), 16, cache)
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}
    assert set(before) == {"train.bin", "validation.bin", "meta.json"}
    assert prepare(text_data(corpus, cache_dir="/elsewhere"), 64, cache) == folder
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_prepared_corpus_needs_no_lock_so_that_a_cache_may_be_read_only(corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = prepare(text_data(corpus), 16, cache)
    (cache / f"{folder.name}.lock").unlink()
    prepare(text_data(corpus), 16, cache)
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_large_file_is_streamed_and_stays_one_document(tmp_path: Path) -> None:
    num_bytes = 48 << 20
    line = b"x" * 1023 + b"\n"
    (tmp_path / "large.txt").write_bytes(line * (num_bytes // len(line)))
    data = text_data(tmp_path, files=[f"{tmp_path}/large.txt"], validation_fraction=0.5)
    tracemalloc.start()
    try:
        folder = prepare(data, 16, tmp_path / "cache")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 32 << 20  # measured 14 MiB, whatever the size of the file
    tokens = np.fromfile(folder / "train.bin", dtype=np.uint16)
    assert abs(tokens.size - num_bytes // 2) <= len(line) + 1
    assert np.flatnonzero(tokens == 0x0C).tolist() == [tokens.size - 1]


def test_key_follows_everything_that_determines_the_tokens(corpus: Path) -> None:
    keys = {cache_key(text_data(corpus)), cache_key(text_data(corpus, validation_fraction=0.5))}
    keys.add(cache_key(text_data(corpus, validation_files=[str(corpus / "a.txt")], files=[f"{corpus}/[b-h].txt"])))
    jsonl = {**text_data(corpus), "kind": "jsonl"}
    keys |= {cache_key({**jsonl, "field": "text"}), cache_key({**jsonl, "field": "body"})}
    (corpus / "a.txt").write_text("b" * 200)  # same size, later time
    keys.add(cache_key(text_data(corpus)))
    (corpus / "i.txt").write_text("i")
    keys.add(cache_key(text_data(corpus)))
    assert len(keys) == 7
    assert cache_key(text_data(corpus)) in keys


def test_same_text_elsewhere_gives_the_same_digest_and_split(corpus: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved" / "deeper"
    moved.mkdir(parents=True)
    for file in corpus.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    digests = [
        open_corpus(prepare(text_data(folder), 16, tmp_path / "cache"), 16)[0].digest for folder in (corpus, moved)
    ]
    assert digests[0] == digests[1]
    (moved / "a.txt").write_text("z" * 200)
    assert open_corpus(prepare(text_data(moved), 16, tmp_path / "cache"), 16)[0].digest != digests[0]


CHILD = """
import json, logging, os, sys
from pathlib import Path
from recipes.shared.data import build, writer
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
if sys.argv[3] == "die":
    def die(self, tokens):
        os.kill(os.getpid(), 9)
    writer.TokenWriter.append = die
print("ready", flush=True)
print(build.prepare(json.loads(sys.argv[1]), 16, Path(sys.argv[2])), flush=True)
heavy = {"torch", "transformers", "datasets"} & set(sys.modules)
assert not heavy, heavy
"""


def child(data: dict[str, object], cache: Path, how: str = "live") -> subprocess.Popen[str]:
    """Starts a process that prepares `data`; "die" kills it at its first token."""
    command = [sys.executable, "-c", CHILD, json.dumps(data), str(cache), how]
    return subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_processes_at_once_build_one_folder_once_and_load_no_torch(corpus: Path, tmp_path: Path) -> None:
    data, cache = text_data(corpus), tmp_path / "cache"
    cache.mkdir()
    with FileLock(cache / f"{cache_key(data)}.lock"):  # both reach the lock before either may build
        children = [child(data, cache) for _ in range(2)]
        for process in children:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.3)
    results = [process.communicate(timeout=60) for process in children]
    assert [process.returncode for process in children] == [0, 0], results
    assert results[0][0] == results[1][0] == f"{cache / cache_key(data)}\n"
    assert sum(err.count("building corpus") for _, err in results) == 1
    assert sorted(path.name for path in cache.iterdir()) == [cache_key(data), f"{cache_key(data)}.lock"]


def test_killed_build_leaves_nothing_that_is_used(corpus: Path, tmp_path: Path) -> None:
    data, cache = text_data(corpus), tmp_path / "cache"
    killed = child(data, cache, "die")
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert not (cache / cache_key(data)).exists()
    assert list(cache.glob("*.partial-*")), "the build must have begun"
    meta, _, _ = open_corpus(prepare(data, 16, cache), 16)
    assert meta.train_tokens == 6 * 201
    assert not list(cache.glob("*.partial-*"))


def test_failed_build_leaves_no_folder(corpus: Path, tmp_path: Path) -> None:
    for file in corpus.iterdir():
        file.write_text("")
    with pytest.raises(UserError, match="the corpus holds no text"):
        prepare(text_data(corpus), 16, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_cache_folder_that_cannot_be_made_is_named(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError) as caught:
            prepare(text_data(corpus), 16, cache)
        (problem,) = caught.value.problems
        assert (problem.where, problem.got) == ("data.cache_dir", str(cache))
        assert problem.why.startswith("the corpus cannot be written there: ")
        assert "data.cache_dir=" in problem.fix


def test_split_shorter_than_one_sample_is_refused_by_prepare_and_open(corpus: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = prepare(text_data(corpus), 16, cache)
    for attempt in (lambda: prepare(text_data(corpus), 1207, cache), lambda: open_corpus(folder, 1207)):
        with pytest.raises(UserError) as caught:
            attempt()
        train, validation = caught.value.problems
        assert train.where == validation.where == "train.sequence_length"
        assert train.got == "1207 tokens per sample; the training split holds 1206 tokens"
        assert validation.got == "1207 tokens per sample; the validation split holds 402 tokens"
        assert "the training split of the corpus is shorter than one sample" in train.why
        assert "a smaller train.sequence_length" in train.fix
        assert "data.validation_fraction" in validation.fix
    assert len(open_corpus(folder, 402)[2]) == 1


def test_file_that_cannot_be_read_is_named(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> None:  # permissions alone do not stop root, who may run these tests
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("recipes.shared.data.kinds.text.read_blocks", refuse)
    with pytest.raises(UserError) as caught:
        prepare(text_data(corpus), 16, tmp_path / "cache")
    (problem,) = caught.value.problems
    assert problem.got in {str(file) for file in corpus.iterdir()}
    assert problem.why == "the corpus cannot be read: Permission denied"
