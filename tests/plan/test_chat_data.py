"""Claims about conversations as a corpus: which tokens are learned, what is cut or left out, what lies in a row.

Run by pytest; the tokenizer has one token a word, so that every label can be written down by hand.
Must never use the network or the user's own cache folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipes.shared.data.build import cache_key, prepare
from recipes.shared.data.corpus import open_conversations
from recipes.shared.data.layouts import IGNORED, Packed, Padded, pack
from tests.plan.asking import refuses
from tests.plan.chats import MARKED, WORDS, conversation, word_tokenizer, written
from tests.plan.test_data_kinds import options, refusal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of words."""
    return word_tokenizer(tmp_path / "tokenizer")


def chat(folder: Path, *records: Any, **changes: Any) -> dict[str, Any]:
    """Options of a corpus that trains and validates on `records`."""
    base = folder.parent
    files = {"files": [written(base / "t.jsonl", *records)], "validation_files": [written(base / "v.jsonl", *records)]}
    return options("chat", tokenizer=str(folder), **files, **changes)


def opened(data: dict[str, Any], folder: Path, length: int = 64) -> tuple[Any, Any, Any]:
    """(meta, training, validation) of a prepared corpus."""
    return open_conversations(prepare(data, length, folder.parent / "cache"), length, data["packing"])


def words(ids: np.ndarray) -> str:
    """Token ids as words; what is not learned as a dot."""
    return " ".join("." if number == IGNORED else WORDS[number] for number in ids)


def labelled(data: dict[str, Any], folder: Path, length: int = 64) -> list[tuple[str, str]]:
    """(tokens, labels) of every conversation, without what fills rows."""
    samples = opened(data, folder, length)[2]
    found = samples.batch(np.arange(len(samples)))
    sizes = found["attention_mask"].sum(axis=1)
    return [
        (words(ids[:size]), words(labels[:size]))
        for ids, labels, size in zip(found["input_ids"], found["labels"], sizes, strict=True)
    ]


# --- what is learned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marked", [False, True])
def test_every_response_is_learned_with_the_token_that_ends_it_and_nothing_else_is(folder: Path, marked: bool) -> None:
    template = None
    if marked:
        template = str(folder.parent / "template.jinja")
        Path(template).write_text(MARKED)
    records = [
        {"prompt": "w1 w2", "response": "w3"},
        conversation("system w9", "w1", "w2 w3", "w4", "w5"),
        conversation("w1", "w2", "w3"),  # the last is not answered, and is left out
        conversation("w1", ""),
    ]
    assert labelled(chat(folder, *records, chat_template=template), folder) == [
        ("user: w1 w2 <end> assistant: w3 <end>", ". . . . . w3 <end>"),
        (
            "system: w9 <end> user: w1 <end> assistant: w2 w3 <end> user: w4 <end> assistant: w5 <end>",
            ". . . . . . . w2 w3 <end> . . . . w5 <end>",
        ),
        ("user: w1 <end> assistant: w2 <end>", ". . . . w2 <end>"),
        ("user: w1 <end> assistant: <end>", ". . . . <end>"),
    ]


def test_a_conversation_that_begins_with_a_response_does_not_learn_its_first_token(folder: Path) -> None:
    """Nothing comes before it; in a pack its label would be asked of another conversation's last token."""
    template = folder.parent / "template.jinja"
    template.write_text(
        "{% for m in messages %}{% generation %}{{ m['content'] + ' <end> ' }}{% endgeneration %}{% endfor %}"
    )
    record = {"messages": [{"role": "assistant", "content": "w1 w2"}]}
    assert labelled(chat(folder, record, chat_template=str(template)), folder) == [("w1 w2 <end>", ". w2 <end>")]


def test_the_weight_of_a_sample_is_its_number_of_learned_tokens(folder: Path) -> None:
    records = [conversation("w1", "w2 w3", "w4", "w5"), {"prompt": "w1", "response": ""}]
    _, training, validation = opened(chat(folder, *records), folder)
    for samples in (training, validation):
        everything = np.arange(len(samples))
        counted = (samples.batch(everything)["labels"] != IGNORED).sum(axis=1)
        assert samples.weights(everything).tolist() == counted.tolist()
    assert validation.weights(np.arange(2)).tolist() == [5.0, 1.0]


def test_the_tokens_that_end_responses_are_known(folder: Path) -> None:
    meta = opened(chat(folder, {"prompt": "w1", "response": "w2"}), folder)[0]
    assert (meta.ends, meta.pad, meta.vocab_size, meta.train_samples) == ([2], 0, len(WORDS), 1)


def test_a_prompt_is_what_comes_before_the_first_response(folder: Path) -> None:
    _, _, validation = opened(chat(folder, conversation("w1", "w2 w3", "w4", "w5")), folder)
    prompt, response = validation.conversations.prompt(0)
    assert (words(prompt), words(response)) == ("user: w1 <end> assistant:", "w2 w3 <end>")


# --- what does not fit -----------------------------------------------------------------------------------------------


def test_a_long_conversation_is_cut_where_a_response_is_left_and_dropped_where_none_is(folder: Path) -> None:
    records = [
        conversation("w1", "w2 w3 w4", "w5", "w6"),  # 14 tokens, the first response at 4 to 7
        conversation("w1 w2 w3 w4 w5", "w6"),  # the response begins at 8
        {"prompt": "w1", "response": "w2"},
    ]
    data = chat(folder, *records)
    _, training, validation = opened(data, folder, 6)
    assert (training.conversations.truncated, training.conversations.dropped) == (1, 1)
    assert labelled(data, folder, 6) == [
        ("user: w1 <end> assistant: w2 w3", ". . . . w2 w3"),
        ("user: w1 <end> assistant: w2 <end>", ". . . . w2 <end>"),
    ]
    assert validation.weights(np.arange(2)).tolist() == [2.0, 2.0]
    whole = opened(data, folder, 14)[1].conversations
    assert (whole.truncated, whole.dropped, len(whole)) == (0, 0, 3)
    with refuses("train.sequence_length", "none of the 3 conversations of the training split has a response within"):
        prepare(data, 4, folder.parent / "cache")


# --- what lies in a row ----------------------------------------------------------------------------------------------


def test_a_pack_holds_whole_conversations_with_positions_of_their_own(folder: Path) -> None:
    records = [{"prompt": "w1", "response": "w2"}, {"prompt": "w3", "response": "w4 w5"}]
    _, packed, _ = opened(chat(folder, *records), folder, 16)
    assert isinstance(packed, Packed) and len(packed) == 1
    found = packed.batch(np.array([0]))
    assert found.keys() == {"input_ids", "labels", "position_ids"}  # a mask would switch transformers' own off
    assert words(found["input_ids"][0]) == (
        "user: w3 <end> assistant: w4 w5 <end> user: w1 <end> assistant: w2 <end> <pad> <pad> <pad>"
    )
    assert words(found["labels"][0]) == ". . . . w4 w5 <end> . . . . w2 <end> . . ."
    assert found["position_ids"][0].tolist() == [*range(7), *range(6), *range(3)]


def test_packs_hold_every_conversation_once_and_waste_little() -> None:
    lengths = np.random.default_rng(0).integers(1, 257, 2000)
    members, bounds = pack(lengths, 256)
    sums = np.add.reduceat(lengths[members], bounds[:-1])
    assert sorted(members) == list(range(2000)) and sums.max() <= 256
    assert len(sums) <= 1.03 * np.ceil(lengths.sum() / 256)  # uniform lengths: best fit leaves under a percent
    assert pack(np.array([5, 5, 5]), 5)[1].tolist() == [0, 1, 2, 3]


def test_a_step_is_grouped_by_length_and_stays_the_same_set(folder: Path) -> None:
    records = [{"prompt": "w1", "response": " ".join(["w2"] * count)} for count in (9, 1, 5, 3, 7, 2)]
    _, padded, _ = opened(chat(folder, *records, packing=False), folder)
    assert isinstance(padded, Padded)
    indices = np.array([4, 0, 1, 5])
    grouped = padded.grouped(indices)
    assert grouped.tolist() == [1, 5, 4, 0] and padded.grouped(indices[::-1]).tolist() == grouped.tolist()
    assert padded.batch(grouped[:2])["input_ids"].shape == (2, 8)
    assert padded.batch(np.array([0]))["input_ids"].shape == (1, 16)
    assert opened(chat(folder, *records, packing=False), folder, 9)[1].batch(np.array([0]))["labels"].shape == (1, 9)


# --- the cache -------------------------------------------------------------------------------------------------------


def test_one_folder_serves_both_layouts_and_every_length_and_none_another_template(folder: Path) -> None:
    record = {"prompt": "w1", "response": "w2"}
    data = chat(folder, record)
    assert cache_key(data) == cache_key(data | {"packing": False})
    template = folder.parent / "template.jinja"
    template.write_text(MARKED)
    other = cache_key(data | {"chat_template": str(template)})
    assert other != cache_key(data)
    template.write_text(MARKED + " ")
    assert cache_key(data | {"chat_template": str(template)}) != other
    meta = opened(data, folder)[0]
    assert opened(chat(folder, record, {"prompt": "w1", "response": "w3"}), folder)[0].digest != meta.digest


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "the line is not valid JSON"),
        ('["w1"]', "the line holds a JSON list"),
        ('{"text": "w1"}', "it has text, and it needs one of the two forms"),
        ('{"prompt": "w1"}', "it has prompt, and it needs one of the two forms"),
        ('{"prompt": "w1", "response": 3}', "message 1 has no role and content that are text"),
        ('{"messages": "w1"}', "its messages are a JSON str"),
        ('{"messages": [{"role": "user", "content": "w1"}]}', "it has no response"),
        ('{"messages": [], "prompt": "w1", "response": "w2"}', "it needs one of the two forms"),
        ('{"messages": [{"role": "assistant"}]}', "message 0 has no role and content that are text"),
    ],
)
def test_a_malformed_line_is_named_with_its_file(folder: Path, line: str, why: str) -> None:
    data = chat(folder, {"prompt": "w1", "response": "w2"})
    path = Path(data["files"][0])
    path.write_text(path.read_text() + "\n" + line + "\n")
    (problem,) = refusal(data, folder.parent / "cache")
    assert problem.where == "data.files" and problem.got.startswith(f"{path}:3")
    assert why in problem.why


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{% for m in messages %}{{ m['content'] + (' e ' if loop.last and loop.index is even else ' ') }}{% endfor %}",
         "the template renders response 1 otherwise when more follows"),
        ("{{ messages|length }} {% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}",
         "with response 1 the template changes the text before it"),
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + ' ' }}{% endfor %}",
         "the text that the template adds for response 1 does not begin with its content"),
        ("{{ raise_exception('no system message') }}", "the chat template does not take it: no system message"),
        ("{% generation %}{% endgeneration %}{{ messages[0]['content'] }}", "no token of it is a response"),
    ],
)  # fmt: skip
def test_a_template_in_which_responses_cannot_be_told_apart_is_refused(folder: Path, template: str, why: str) -> None:
    path = folder.parent / "template.jinja"
    path.write_text(template)
    data = chat(folder, conversation("w1", "w2", "w3", "w4"), chat_template=str(path))
    (problem,) = refusal(data, folder.parent / "cache")
    assert problem.got.endswith("t.jsonl:1") and why in problem.why
    assert "{% generation %}" in problem.fix or "use another template" in problem.fix


def test_a_tokenizer_without_a_template_and_options_that_name_nothing_are_refused(folder: Path) -> None:
    data = chat(folder, {"prompt": "w1", "response": "w2"})
    (folder / "chat_template.jinja").unlink()
    (problem,) = refusal(data, folder.parent / "cache")
    assert problem.where == "data.tokenizer" and "it has no chat template" in problem.why
    assert "data.chat_template=FILE" in problem.fix
    wrong = {"tokenizer": None, "chat_template": "/nowhere.jinja", "packing": "yes", "files": []}
    problems = refusal(data | wrong, folder.parent / "cache")
    assert [p.where for p in problems] == ["data.tokenizer", "data.chat_template", "data.packing", "data.files"]


def test_a_held_out_share_is_of_records_and_must_not_be_empty(folder: Path) -> None:
    records = [{"prompt": "w1", "response": f"w{number}"} for number in range(10)]
    data = chat(folder, *records) | {"validation_files": [], "validation_fraction": 0.2}
    meta, _, validation = opened(data, folder)
    assert (meta.train_samples, meta.validation_samples, len(validation)) == (8, 2, 2)
    (problem,) = refusal(
        chat(folder, records[0]) | {"validation_files": [], "validation_fraction": 0.2}, folder.parent / "other"
    )
    assert "the train split holds no conversation" in problem.why
