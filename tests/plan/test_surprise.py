"""Claims about planned memory beside measured: what is a surprise, and what is said to be its cause.

Run by pytest; that a run really holds what is planned is in tests/train/test_memory_terms.py.
Must never use a figure that a plan computed: each is stated here.
"""

from __future__ import annotations

from typing import Any

from launcher.planner.prediction import Memory, Moment
from launcher.planner.surprise import Setting, compared, lines

GB = 10**9
PLANNED = {"weights": 2 * GB, "master": 4 * GB, "moments": 8 * GB, "reduce buckets": GB}
PEAK = 20 * GB


def told(terms: dict[str, int], stage: int = 3, ranks: int = 8, profiled: bool = True, **of_gpu: int) -> list[str]:
    """The surprises of a run whose rank held PLANNED with `terms` in the place of theirs."""
    return found(terms, stage, ranks, profiled, True, **of_gpu)["surprises"]


def found(
    terms: dict[str, int], stage: int = 3, ranks: int = 8, profiled: bool = True, exact: bool = True, **of_gpu: int
) -> dict[str, Any]:
    moments = (Moment("forward", {"activations": PEAK}),)
    memory = Memory(moments, {}, {}, profiled, PLANNED)
    return compared(memory, Setting(stage, ranks), exact, {"terms": PLANNED | terms} | of_gpu)


def only(texts: list[str]) -> str:
    assert len(texts) == 1, texts
    return texts[0]


def test_what_is_as_planned_is_no_surprise() -> None:
    """Nor is 5 % of a term, nor a megabyte of a small one."""
    assert told({}) == []
    assert told({"weights": round(1.05 * PLANNED["weights"]), "gathered parameters": 1_000_000}) == []


def test_both_figures_of_every_term_are_there() -> None:
    figures = found({"gathered parameters": 7}, allocated_bytes=PEAK, reserved_bytes=PEAK)
    assert figures["terms"]["moments"] == {"planned": 8 * GB, "measured": 8 * GB}
    assert figures["terms"]["gathered parameters"] == {"planned": 0, "measured": 7}
    assert (figures["planned_peak_bytes"], figures["measured_peak_bytes"]) == (PEAK, PEAK)


def test_whole_weights_say_that_stage_3_is_not_in_force() -> None:
    text = only(told({"weights": 8 * PLANNED["weights"]}))
    assert text.startswith("weights: 16.000 GB held, 2.000 GB planned (+700%): they are whole where they should be")
    assert "split over 8 ranks, so stage 3 is not in force" in text


def test_whole_moments_say_that_the_optimizer_is_not_split() -> None:
    assert "so stage 2 is not in force" in only(told({"moments": 64 * GB}, stage=2))
    assert "another optimizer" in only(told({"moments": 4 * GB}, stage=2))


def test_an_optimizer_without_moments_took_no_step() -> None:
    assert "took no step" in only(told({"moments": 0}))


def test_a_term_that_nobody_planned_is_named() -> None:
    assert only(told({"souvenirs": GB})).startswith("souvenirs: 1.000 GB held, none planned: compare effective.json")


def test_parameters_that_stay_whole_name_the_thresholds() -> None:
    assert "stage3_param_persistence_threshold" in only(told({"gathered parameters": GB}))


def test_a_peak_above_the_plan_with_equal_terms_is_buckets_prefetch_or_activations() -> None:
    """Out of memory at the first step, not at load."""
    text = only(told({}, allocated_bytes=25 * GB, reserved_bytes=25 * GB))
    assert text.startswith("peak: 25.000 GB allocated, 20.000 GB planned (+25%)")
    for word in ("activation=full", "stage3_prefetch_bucket_size", "smaller train.micro_batch_size"):
        assert word in text
    assert "prefetch" not in only(told({}, stage=2, allocated_bytes=25 * GB, reserved_bytes=25 * GB))


def test_a_peak_below_the_plan_leaves_room_for_a_larger_batch() -> None:
    assert "a larger train.micro_batch_size may fit" in only(told({}, allocated_bytes=15 * GB, reserved_bytes=15 * GB))


def test_a_peak_that_a_term_explains_is_told_once() -> None:
    whole = {"weights": 8 * PLANNED["weights"]}
    assert only(told(whole, allocated_bytes=34 * GB, reserved_bytes=34 * GB)).startswith("weights")


def test_memory_in_pieces_names_the_setting() -> None:
    text = only(told({}, allocated_bytes=PEAK, reserved_bytes=26 * GB))
    assert "26.000 GB are reserved for 20.000 GB" in text and "expandable_segments:True" in text


def test_without_a_profile_the_peak_is_not_compared() -> None:
    """Nor what depends on each parameter's size."""
    figures = found({"gathered parameters": GB}, profiled=False, allocated_bytes=40 * GB, reserved_bytes=40 * GB)
    assert (figures["planned_peak_bytes"], figures["surprises"]) == (None, [])
    assert figures["terms"]["gathered parameters"] == {"planned": None, "measured": GB}
    assert told({"weights": GB}, profiled=False) != []


def test_where_it_is_not_known_what_is_trained_nothing_surprises() -> None:
    figures = found({"moments": GB}, profiled=False, exact=False)
    assert figures["surprises"] == [] and figures["terms"]["moments"] == {"planned": None, "measured": GB}


def test_what_is_shown_is_one_line_and_one_for_each_surprise() -> None:
    shown = lines(found({"weights": 16 * GB}, allocated_bytes=PEAK, reserved_bytes=PEAK))
    assert shown[0] == "memory:    between steps a rank holds 29.000 GB, 15.000 GB planned; " + (
        "peak 20.000 GB, 20.000 GB planned"
    )
    assert len(shown) == 2 and shown[1].startswith("surprise:  weights")
