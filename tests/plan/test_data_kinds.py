"""Claims about each kind of corpus: what it holds, what is held out, and what it says when it cannot be used.

Run by pytest; the order, the windows and the cache are in test_data.py.
Must never use the network or the user's own cache folder.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from launcher.errors import Problem, UserError
from recipes.shared.data.build import KINDS, NOT_OF_THE_KIND, DataMeta, cache_key, open_corpus, prepare
from recipes.shared.data.files import hold_out
from recipes.shared.data.kinds.records import split_of
from recipes.shared.data.kinds.stdlib import SKIPPED_FOLDERS

CONF = Path(__file__).parents[2] / "conf" / "data"


def options(kind: str, **changes: Any) -> dict[str, Any]:
    """conf/data/<kind>.yaml with `changes`."""
    shipped = yaml.safe_load((CONF / f"{kind}.yaml").read_text(encoding="utf-8"))
    unknown = set(changes) - set(shipped)
    assert not unknown, unknown
    return {**shipped, **changes}


def build(data: dict[str, Any], cache: Path, sequence_length: int = 1) -> tuple[DataMeta, np.ndarray, np.ndarray]:
    """(meta, training tokens, validation tokens) of a prepared corpus."""
    meta, train, validation = open_corpus(prepare(data, sequence_length, cache), sequence_length)
    return meta, train.tokens(np.arange(len(train))).ravel(), validation.tokens(np.arange(len(validation))).ravel()


def as_text(tokens: np.ndarray) -> str:
    """Byte tokens as text."""
    return bytes(tokens.tolist()).decode()


def refusal(data: dict[str, Any], cache: Path) -> tuple[Problem, ...]:
    """The problems `prepare` reports; nothing is left in the cache that would be used."""
    with pytest.raises(UserError) as caught:
        prepare(data, 1, cache)
    assert caught.value.code == 2
    assert not list(cache.glob("*/meta.json"))
    return caught.value.problems


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A folder with a tokenizer of 70000 words (w0, w1, ...); <eos> is 69999, unknown words and newlines are w0."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {f"w{i}": i for i in range(69999)} | {"<eos>": 69999}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder = tmp_path / "tokenizer"
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>").save_pretrained(folder)
    return folder


# --- options ---------------------------------------------------------------------------------------------------------


def test_every_shipped_data_file_names_exactly_the_options_of_its_kind() -> None:
    files = [file for file in sorted(CONF.glob("*.yaml")) if file.stem != "custom"]  # which prepares nothing
    assert [file.stem for file in files] == sorted(KINDS) and len(files) == 6
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()
        assert lines[0] == "# @package data"
        assert lines[1].startswith(f"# python launch.py data={file.stem}")
        assert set(options(file.stem)) - NOT_OF_THE_KIND == set(inspect.signature(KINDS[file.stem]).parameters)
        assert options(file.stem)["kind"] == file.stem
        assert options(file.stem)["cache_dir"] is None


def test_unknown_kind_unknown_option_and_missing_option_are_refused(tmp_path: Path) -> None:
    (problem,) = refusal({"kind": "csv"}, tmp_path)
    assert (problem.where, problem.got) == ("data.kind", "csv")
    assert problem.fix == "data= one of: stdlib, text, jsonl, tokens, hub, chat"
    data = {**options("stdlib"), "tokeniser": "x"}
    del data["max_bytes"]
    unknown, missing = refusal(data, tmp_path)
    assert (unknown.where, unknown.why) == ("data.tokeniser", "data.kind=stdlib has no such option")
    assert (missing.where, missing.why) == ("data.max_bytes", "data.kind=stdlib needs this option")


@pytest.mark.parametrize("fraction", [0, 1, -0.1, "0.1", True, None, float("nan")])
@pytest.mark.parametrize("kind", ["stdlib", "text", "jsonl", "tokens", "hub"])
def test_validation_fraction_outside_0_to_1_is_refused(kind: str, fraction: object, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("ab")
    changes = {
        "text": {"files": [f"{tmp_path}/f"]},
        "jsonl": {"files": [f"{tmp_path}/f"]},
        "tokens": {"train": f"{tmp_path}/f", "vocab_size": 9},
    }
    data = options(kind, validation_fraction=fraction, **changes.get(kind, {}))
    (problem,) = refusal(data, tmp_path / "cache")
    assert (problem.where, problem.got) == ("data.validation_fraction", repr(fraction))
    assert problem.fix == "data.validation_fraction=0.05"


# --- stdlib ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stand-in for the standard library's folder."""
    root = tmp_path / "lib"
    for number in range(20):
        path = root / "package" / f"m{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {number}\n" * 100)
    for name in ("_sysconfigdata_x.py", "config-3/a.py", *(f"{folder}/a.py" for folder in SKIPPED_FOLDERS)):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("SKIPPED")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(root)})
    return root


def test_stdlib_holds_whole_files_out_and_skips_what_differs_between_machines(library: Path, tmp_path: Path) -> None:
    meta, train, validation = build(options("stdlib", validation_fraction=0.2), tmp_path / "cache")
    documents = [set(as_text(tokens).split("\f")) - {""} for tokens in (train, validation)]
    assert documents[0] | documents[1] == {(library / "package" / f"m{i}.py").read_text() for i in range(20)}
    assert not documents[0] & documents[1]
    assert 1 <= len(documents[1]) <= 4
    assert (meta.vocab_size, meta.tokenizer) == (256, None)
    assert "standard library as bytes" in meta.source and "held out whole" in meta.source


def test_stdlib_stays_under_the_cap_with_whole_files(library: Path, tmp_path: Path) -> None:
    _, train, validation = build(options("stdlib", max_bytes=3000), tmp_path / "cache")
    documents = set(as_text(np.concatenate([train, validation])).split("\f")) - {""}
    sizes = [len(document) for document in documents]
    assert 3000 - 500 < sum(sizes) <= 3000  # the next whole file, of 400 or 500 bytes, would not have fitted
    assert documents <= {(library / "package" / f"m{i}.py").read_text() for i in range(20)}
    (problem,) = refusal(options("stdlib", max_bytes=600), tmp_path / "other")
    assert problem.where == "data.max_bytes" and problem.got.startswith("600: 1 source files")
    (problem,) = refusal(options("stdlib", max_bytes="8MB"), tmp_path / "other")
    assert problem.why == "it is a number of bytes, without a unit"


def test_the_real_stdlib_fills_its_cap(tmp_path: Path) -> None:
    meta, train, _ = build(options("stdlib", max_bytes=500_000), tmp_path / "cache", sequence_length=128)
    assert 480_000 < meta.train_tokens + meta.validation_tokens < 502_000
    assert 2.5 < meta.unigram_entropy < 4.0  # source text; uniform bytes would be 5.5
    assert "import" in as_text(train)


# --- text ------------------------------------------------------------------------------------------------------------


def test_whole_files_are_held_out_never_the_big_one_never_all() -> None:
    sizes = {f"f{i}": 10 for i in range(100)}
    held = hold_out(sizes, 0.1)
    assert len(held) == 10 and held == hold_out(dict(reversed(sizes.items())), 0.1)
    assert held != {f"f{i}" for i in range(10)}
    assert hold_out({"big": 1000, "small": 10, "empty": 0}, 0.001) == {"small"}
    assert hold_out({"a": 1000, "b": 100, "c": 100}, 0.15) < {"b", "c"}


def test_text_of_several_files_never_splits_one(tmp_path: Path) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text(f"file {i}\n" * 10)
    data = options("text", files=[f"{tmp_path}/*.txt", f"{tmp_path}/3.txt"], validation_fraction=0.2)
    meta, train, validation = build(data, tmp_path / "cache")
    splits = [as_text(tokens).removesuffix("\f").split("\f") for tokens in (train, validation)]
    assert sorted(splits[0] + splits[1]) == [f"file {i}\n" * 10 for i in range(10)]
    assert len(splits[1]) == 2
    assert meta.source == "10 text files as bytes, 2 held out whole for validation"


def test_text_of_one_file_holds_out_its_tail_after_a_line_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"line {i:03}\n" for i in range(200)))
    meta, train, validation = build(options("text", files=f"{tmp_path}/a.txt"), tmp_path / "cache")
    assert as_text(train).endswith("line 190\n\f") and as_text(validation).startswith("line 191\n")
    assert meta.source == "1 text file as bytes, the last 0.05 of it held out for validation"


def test_named_validation_files_are_the_whole_validation_split(tmp_path: Path) -> None:
    for name in ("a", "b", "v"):
        (tmp_path / f"{name}.txt").write_text(name * 4)
    data = options("text", files=[f"{tmp_path}/[ab].txt"], validation_files=[f"{tmp_path}/v.txt"])
    _, train, validation = build(data, tmp_path / "cache")
    assert (as_text(train), as_text(validation)) == ("aaaa\fbbbb\f", "vvvv\f")


def test_tokenizer_ends_documents_with_eos_and_uses_four_bytes_above_65536(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2\nw69998")
    (tmp_path / "v.txt").write_text("w7")
    data = options("text", files=[f"{tmp_path}/a.txt"], validation_files=[f"{tmp_path}/v.txt"])
    data["tokenizer"] = str(tokenizer)
    meta, train, validation = build(data, tmp_path / "cache")
    assert (meta.vocab_size, meta.dtype, meta.tokenizer) == (70000, "uint32", str(tokenizer))
    assert (train.tolist(), validation.tolist()) == ([1, 2, 69998, 69999], [7, 69999])
    before = cache_key(data)
    (tokenizer / "tokenizer.json").touch()
    assert cache_key(data) != before


def test_everything_wrong_with_text_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    data = options("text", files=[f"{tmp_path}/no.txt", f"{tmp_path}/*.md", str(tmp_path), f"{tmp_path}/a.txt"])
    data |= {"tokenizer": f"{tmp_path}/gone", "validation_files": [f"{tmp_path}/a.txt"]}
    missing, glob, folder, tokenizer, both = refusal(data, tmp_path / "cache")
    assert (missing.where, missing.got) == ("data.files", f"{tmp_path}/no.txt")
    assert missing.why == "the file does not exist"
    assert (glob.got, glob.why) == (f"{tmp_path}/*.md", "the glob matches no file")
    assert (folder.why, folder.fix) == (
        "it is a folder, and a list of files is needed",
        f"data.files=[{tmp_path}/**/*]",
    )
    assert (tokenizer.where, tokenizer.why) == ("data.tokenizer", "the folder does not exist")
    assert (both.where, both.got) == ("data.validation_files", f"{tmp_path}/a.txt")
    assert "measured on training text" in both.why


@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_no_files_is_refused(kind: str, tmp_path: Path) -> None:
    (problem,) = refusal(options(kind), tmp_path)
    assert (problem.where, problem.got) == ("data.files", "[]")
    assert problem.why == "this kind of data needs at least one file"
    assert problem.fix.startswith("data.files=[")


def test_tokenizer_that_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    data = options("text", files=[f"{tmp_path}/a.txt"], tokenizer=str(folder))
    assert refusal(data, tmp_path / "cache")[0].why == "the folder is empty"
    (folder / "tokenizer.json").write_text("{")
    (problem,) = refusal(data, tmp_path / "cache")
    assert (problem.where, problem.got) == ("data.tokenizer", str(folder))
    assert problem.why.startswith("transformers cannot load it: ")
    data["tokenizer"] = f"{tmp_path}/a.txt"
    assert refusal(data, tmp_path / "cache")[0].why == "it is a file, and a folder is needed"


def test_bytes_that_are_not_utf8_are_refused_for_a_tokenizer_only(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"w1\n" * 20 + b"\xff\xfe\n" + b"w2\n" * 20)
    data = options("text", files=[f"{tmp_path}/a.txt"])
    _, train, _ = build(data, tmp_path / "cache")
    assert 255 in train
    (problem,) = refusal({**data, "tokenizer": str(tokenizer)}, tmp_path / "other")
    assert (problem.where, problem.got) == ("data.files", f"{tmp_path}/a.txt, byte 60")
    assert problem.why == "the file is not UTF-8 text, which a tokenizer needs"


# --- jsonl -----------------------------------------------------------------------------------------------------------


def test_records_are_held_out_evenly_by_their_index_alone() -> None:
    held = [i for i in range(1000) if split_of(i, 0.05) == "validation"]
    assert held == list(range(0, 1000, 20))
    assert sum(split_of(i, 0.3) == "validation" for i in range(10)) == 3


def test_jsonl_holds_whole_records_out(tmp_path: Path) -> None:
    lines = [json.dumps({"id": i, "body": f"record {i} ü"}) for i in range(10)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:4]) + "\n\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[4:]))
    data = options("jsonl", files=[f"{tmp_path}/*.jsonl"], field="body", validation_fraction=0.2)
    meta, train, validation = build(data, tmp_path / "cache")
    assert as_text(validation) == "record 0 ü\frecord 5 ü\f"
    assert as_text(train) == "".join(f"record {i} ü\f" for i in range(10) if i % 5)
    assert meta.source == "records of 2 JSONL files as bytes, 0.2 of the records held out"
    data |= {"files": [f"{tmp_path}/a.jsonl"], "validation_files": [f"{tmp_path}/b.jsonl"]}
    assert as_text(build(data, tmp_path / "cache")[1]) == "".join(f"record {i} ü\f" for i in range(4))


@pytest.mark.parametrize(
    ("line", "where", "got", "why"),
    [
        ('{"text": "a"', "data.files", '{place}: {{"text": "a"', "the line is not valid JSON: "),
        (b'{"text": "\xff"}', "data.files", "{place}: ", "the line is not valid JSON: "),
        ('["a"]', "data.files", '{place}: ["a"]', "the line holds a JSON list, and an object is needed"),
        ('{"body": "a"}', "data.field", "text", "{place} has no such field"),
        ('{"text": 3}', "data.field", "int in field 'text' at {place}", "the field must hold text"),
        ('{"text": "\\ud800"}', "data.files", "field 'text' at {place}", "the text holds half of a surrogate pair"),
    ],
)
def test_record_that_cannot_be_used_is_named_by_file_and_line(
    line: str | bytes, where: str, got: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + (line.encode() if isinstance(line, str) else line) + b"\n")
    (problem,) = refusal(options("jsonl", files=[str(path)]), tmp_path / "cache")
    assert problem.where == where
    assert problem.got.startswith(got.format(place=f"{path}:3"))
    assert problem.why.startswith(why.format(place=f"{path}:3"))


def test_single_record_cannot_be_held_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (problem,) = refusal(options("jsonl", files=[f"{tmp_path}/a.jsonl"]), tmp_path / "cache")
    assert problem.why == "the train split holds no text"
    assert "data.validation_files" in problem.fix


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_are_read_in_place_and_their_tail_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "t.bin"
    np.arange(1000, dtype=np.uint16).tofile(path)
    data = options("tokens", train=str(path), vocab_size=1000, validation_fraction=0.1)
    folder = prepare(data, 10, tmp_path / "cache")
    assert [file.name for file in folder.iterdir()] == ["meta.json"]
    meta, train, validation = build(data, tmp_path / "cache", 10)
    assert np.array_equal(train, np.arange(900)) and np.array_equal(validation, np.arange(900, 1000))
    assert (meta.vocab_size, meta.train_tokens, meta.validation_tokens) == (1000, 900, 100)
    assert meta.unigram_entropy == pytest.approx(np.log(900), rel=1e-12)


def test_tokens_of_four_bytes_with_a_validation_file(tmp_path: Path) -> None:
    np.array([70000, 1, 2], dtype=np.uint32).tofile(tmp_path / "t.bin")
    np.array([3, 70001], dtype=np.uint32).tofile(tmp_path / "v.bin")
    data = options("tokens", train=f"{tmp_path}/t.bin", validation=f"{tmp_path}/v.bin", vocab_size=70002)
    _, train, validation = build({**data, "dtype": "uint32"}, tmp_path / "cache")
    assert (train.tolist(), validation.tolist()) == ([70000, 1, 2], [3, 70001])


def test_token_outside_the_vocabulary_is_named_by_its_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.shared.data.kinds.tokens.CHUNK_TOKENS", 16)
    tokens = np.zeros(100, dtype=np.uint16)
    tokens[97] = 50
    tokens.tofile(tmp_path / "t.bin")
    data = options("tokens", train=f"{tmp_path}/t.bin", vocab_size=50)
    (problem,) = refusal(data, tmp_path / "cache")
    assert (problem.where, problem.got) == ("data.train", f"id 50 at token 97 of {tmp_path}/t.bin")
    assert problem.why == "ids must be below data.vocab_size=50"
    build({**data, "vocab_size": 51}, tmp_path / "cache")


def test_everything_wrong_with_tokens_is_said_at_once(tmp_path: Path) -> None:
    data = options("tokens", train=f"{tmp_path}/no.bin", vocab_size=0, validation=f"{tmp_path}/e.bin", dtype="int8")
    (tmp_path / "e.bin").write_bytes(b"")
    dtype, vocab, train, validation = refusal(data, tmp_path / "cache")
    assert (dtype.where, dtype.fix) == ("data.dtype", "data.dtype=uint16 or data.dtype=uint32")
    assert (vocab.where, vocab.got) == ("data.vocab_size", "0")
    assert (train.where, train.why) == ("data.train", "the file does not exist")
    assert (validation.where, validation.why) == ("data.validation", "the file is empty")


def test_files_that_are_not_bare_tokens_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(10, dtype=np.uint16))
    (tmp_path / "odd.bin").write_bytes(b"abc")
    np.arange(10, dtype=np.uint16).tofile(tmp_path / "t.bin")
    for name, why in (
        ("a.npy", "it is a .npy file, whose header would be read as tokens"),
        ("odd.bin", "its 3 bytes are no whole number of 2-byte tokens"),
        ("t.bin", "it is the training file"),
    ):
        data = options("tokens", train=f"{tmp_path}/t.bin", validation=f"{tmp_path}/{name}", vocab_size=9)
        (problem,) = refusal(data, tmp_path / "cache")
        assert (problem.where, problem.why) == ("data.validation", why)


# --- hub -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local dataset folder with splits of 10 and 3 records; the library is offline and caches under tmp_path."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "dataset"
    folder.mkdir()
    for split, count in (("train", 10), ("test", 3)):
        rows = [json.dumps({"text": f"{split} {i}", "id": i}) + "\n" for i in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(rows))
    return folder


def test_hub_reads_a_local_dataset_with_and_without_a_validation_split(dataset: Path, tmp_path: Path) -> None:
    data = options("hub", path=str(dataset), validation_fraction=0.2)
    meta, train, validation = build(data, tmp_path / "cache")
    assert as_text(validation) == "train 0\ftrain 5\f"
    assert as_text(train) == "".join(f"train {i}\f" for i in range(10) if i % 5)
    assert meta.source.startswith(f"dataset {dataset}, split train as bytes")
    _, train, validation = build({**data, "validation_split": "test"}, tmp_path / "cache")
    assert as_text(train) == "".join(f"train {i}\f" for i in range(10))
    assert as_text(validation) == "test 0\ftest 1\ftest 2\f"
    before = cache_key(data)
    (dataset / "train.jsonl").touch()
    assert cache_key(data) != before


def test_hub_reads_data_files_of_a_format(dataset: Path, tmp_path: Path) -> None:
    data = options("hub", path="json", data_files=[f"{dataset}/test.jsonl"], validation_fraction=0.3)
    assert as_text(build(data, tmp_path / "cache")[1]) == "test 1\ftest 2\f"
    before = cache_key(data)
    (dataset / "test.jsonl").touch()
    assert cache_key(data) != before


def test_hub_dataset_that_cannot_be_used_is_refused(dataset: Path, tmp_path: Path) -> None:
    data = options("hub", path=str(dataset))
    (problem,) = refusal({**data, "path": f"{tmp_path}/gone"}, tmp_path / "cache")
    assert (problem.where, problem.got) == ("data.path", f"{tmp_path}/gone, data.split=train")
    assert problem.why.startswith("it cannot be loaded: ")
    (problem,) = refusal({**data, "validation_split": "dev"}, tmp_path / "cache")
    assert problem.got == f"{dataset}, data.validation_split=dev"
    (problem,) = refusal({**data, "validation_split": "train"}, tmp_path / "cache")
    assert problem.where == "data.validation_split" and "it is the training split" in problem.why
    (problem,) = refusal({**data, "field": "body"}, tmp_path / "cache")
    assert (problem.where, problem.fix) == ("data.field", "data.field= one of its fields: id, text")
    assert problem.why == f"{dataset} train, row 0 has no such field"
    (problem,) = refusal({**data, "field": "id"}, tmp_path / "cache")
    assert problem.got == f"int in field 'id' at {dataset} train, row 0"


def test_missing_datasets_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (problem,) = refusal(options("hub", path="anything"), tmp_path)
    assert problem.why == "the package `datasets` is not installed"
    assert problem.fix == "pip install 'zerolaunch[data]'"
