"""Parameters read and edited through `gather` are the same at every stage, on every rank, and edits stay.

Run by pytest; ranks are those of engine_server.py, what they do is in gather_ranks.py.
Must never compare less than every element.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.plan.asking import planned
from tests.train.engines import Engines, request

STAGES = ["stage0", "stage2", "stage3"]
PARTITIONED = "++deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
RELATIVE, ABSOLUTE = 1e-4, 1e-7  # ranks' gradients are summed in another order, and Adam divides by them
LR = 1e-3
UNEVEN = "model.config.intermediate_size=63"  # an odd number of elements a parameter: the last shard is padded


def asked(engines: Engines, function: str, zero: str, *overrides: str, **case: Any) -> dict[str, Any]:
    """The answer of `function` for a plan at stage `zero`."""
    partitioned = [PARTITIONED] if zero == "stage3" else []
    plan = planned(*request(f"zero={zero}", f"deepspeed.optimizer.params.lr={LR}", *partitioned, *overrides))
    answer = engines.call(f"tests.train.gather_ranks:{function}", plan.world_size, plan=plan.to_json(), **case)
    assert "error" not in answer, answer["error"] + answer["log"]
    return answer


@pytest.mark.parametrize("tied", ["true", "false"])
def test_what_is_read_is_the_same_at_every_stage_and_on_every_rank(engines: Engines, tied: str) -> None:
    """Counts too: deepspeedai/DeepSpeed#4064 has 0 of them at stage 3; tied tensors count once."""
    options = (f"model.config.tie_word_embeddings={tied}", UNEVEN, "parameters.frozen=['*k_proj*']")
    found = {zero: asked(engines, "reading", zero, *options)["ranks"] for zero in STAGES}
    reference = found["stage0"][0]
    assert reference["counts"][0] > reference["counts"][1] > 1000
    embedding = 64 * 32
    rest = sum(a * b for a, b in [(63, 32)] * 3 + [(32, 32)] * 4) + 3 * 32
    assert reference["counts"][0] == rest + embedding * (1 if tied == "true" else 2)
    assert reference["counts"][1] == reference["counts"][0] - 32 * 32
    assert all(norm > 0 for norm in reference["norms"].values())
    for facts in (rank for ranks in found.values() for rank in ranks):
        assert facts["counts"] == reference["counts"]
        assert facts["streamed"] == reference["streamed"]
        assert facts["norms"] == pytest.approx(reference["norms"], rel=1e-12)
        assert not facts["state before"]
        for kind in ("gradients", "states", "after"):
            assert facts[kind].keys() == reference[kind].keys()
            for name, values in facts[kind].items():
                if "k_proj" in name and kind != "after":
                    assert values is None, (kind, name)
                else:
                    assert values == pytest.approx(reference[kind][name], rel=RELATIVE, abs=ABSOLUTE), (kind, name)


def test_streaming_holds_no_more_than_it_was_allowed(engines: Engines) -> None:
    answer = asked(engines, "peak", "stage3", at_most_bytes=3 * 64 * 32 * 4)
    assert 64 * 32 <= answer["most"] <= 3 * 64 * 32
    assert answer["left"] == 0


@pytest.mark.parametrize("all_ranks", [True, False], ids=["all ranks", "rank 0"])
@pytest.mark.parametrize(
    ("zero", "precision", "offload"),
    [
        ("stage0", "fp32", "none"),
        ("stage1", "bf16", "none"),
        ("stage2", "fp32", "none"),
        ("stage2", "bf16", "cpu"),
        ("stage3", "fp32", "none"),
        ("stage3", "bf16", "cpu_all"),
    ],
)
def test_an_edit_is_what_every_rank_has_after_the_next_step(
    engines: Engines, zero: str, precision: str, offload: str, all_ranks: bool
) -> None:
    """OpenRLHF/OpenRLHF#1357: without a modifier rank it is lost; without the fp32 masters, at the next step."""
    answer = asked(
        engines, "editing", zero, UNEVEN, f"precision={precision}", f"offload={offload}", all_ranks=all_ranks
    )
    width = answer["width"]
    for rank in answer["edited"]:
        assert rank[width : 2 * width] == [7.0] * width
        assert rank[:width] + rank[2 * width :] == answer["before"][:width] + answer["before"][2 * width :]
    for rank in answer["stepped"]:
        assert rank == answer["stepped"][0]
        # bf16 has 8 bits: next to 7 lies 6.97
        assert rank[width : 2 * width] == pytest.approx([7.0] * width, abs=10 * LR if precision == "fp32" else 0.04)
        assert rank[:width] != answer["before"][:width]


@pytest.mark.parametrize("zero", STAGES)
def test_a_write_in_a_block_that_reads_is_refused(engines: Engines, zero: str) -> None:
    """OpenRLHF/OpenRLHF#1357: DeepSpeed drops it without a word."""
    answer = asked(engines, "writing_in_read", zero)
    edit_in_read = {"edit in read": "gather.edit"} if zero == "stage3" else {}
    refused = {name: where for name, where in answer["refused"].items() if where == "gather.read"}
    assert len(refused) == answer["ways"]
    assert {name: where for name, where in answer["refused"].items() if name not in refused} == edit_in_read
    assert answer["streamed"] == "model.embed_tokens.weight"


@pytest.mark.parametrize("tied", ["true", "false"])
def test_new_rows_are_the_same_on_every_rank_and_at_every_stage(engines: Engines, tied: str) -> None:
    """huggingface/transformers#25241: every rank drew its own; there the output layer and vocab_size went missing."""
    sizes = [67, 50]
    found = {
        zero: asked(engines, "resizing", zero, f"model.config.tie_word_embeddings={tied}", sizes=sizes)
        for zero in STAGES
    }
    reference = found["stage0"]
    for zero, answer in found.items():
        assert "before build_engine" not in answer["refused"] and "an engine has been built" in answer["refused"]
        for size, seen, expected in zip(sizes, answer["seen"], reference["seen"], strict=True):
            assert seen["rows"] == expected["rows"] and seen["output"] == expected["output"]
            assert seen["rows"][0] == seen["rows"][1]
            assert seen["shapes"] == [[size, 32], [size, 32]] and seen["vocab_size"] == size
            assert seen["layers"] == [size, size]
            assert seen["tied"] == (tied == "true")
            assert all((here == 0) == (zero == "stage3") for here in seen["here"])
    longer, shorter = (seen["rows"][0] for seen in reference["seen"])
    assert longer[: 64 * 32] == reference["old"] and shorter == reference["old"][: 50 * 32]
    new = longer[64 * 32 :]
    assert len(new) == 3 * 32 and 0.01 < (sum(value**2 for value in new) / len(new)) ** 0.5 < 0.03


@pytest.mark.parametrize("zero", STAGES)
def test_a_trained_parameter_of_no_elements_is_named_before_the_engine_fails(engines: Engines, zero: str) -> None:
    """deepspeedai/DeepSpeed#8297: an assertion, a division by zero, or nothing, by the stage."""
    said = asked(engines, "empty_parameter", zero)["said"]
    assert said.startswith("table: 1 trained parameter(s) have no elements")


@pytest.mark.parametrize("zero", STAGES)
def test_sparse_gradients_are_refused_by_name(engines: Engines, zero: str) -> None:
    """deepspeedai/DeepSpeed#1416: some versions skip them, this one fails in the first backward pass or step."""
    said = asked(engines, "sparse_embedding", zero)["said"]
    assert said == "model.embed_tokens: DeepSpeed neither sums nor applies sparse gradients"


@pytest.mark.parametrize(("zero", "share"), [("stage2", 1.0), ("stage3", 0.5)])
def test_a_rank_holds_its_share_of_the_model_once_it_is_built(engines: Engines, zero: str, share: float) -> None:
    """deepspeedai/DeepSpeed#8089: zero.Init before the process group is there makes every rank hold all of it."""
    answer = asked(engines, "held", zero, UNEVEN)
    for held in answer["ranks"]:
        assert held == pytest.approx(share * answer["whole"], rel=0.01)  # odd sizes are padded
