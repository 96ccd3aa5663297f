"""Claims about global batch = micro batch x accumulation x world size.

Run by pytest.
Must never compose: the solver takes numbers.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.batch import Batch, solve
from launcher.errors import UserError
from launcher.schema import TrainSection
from tests.plan.asking import refuses


def train(micro: int | None, accumulation: int | None, total: int | None, fallback: int = 8) -> TrainSection:
    return TrainSection(
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        global_batch_size=total,
        fallback_micro_batch_size=fallback,
        sequence_length=128,
        objectives={},
    )


@pytest.mark.parametrize(
    ("given_sizes", "solved"),
    [
        ((4, 8, 256), (4, 8, 256)),
        ((4, 8, None), (4, 8, 256)),
        ((4, None, 256), (4, 8, 256)),
        ((None, 8, 256), (4, 8, 256)),
        ((4, None, None), (4, 1, 32)),
        ((None, 8, None), (8, 8, 512)),
        ((None, None, 256), (8, 4, 256)),
        ((None, None, 8), (1, 1, 8)),
        ((None, None, 56), (7, 1, 56)),
        ((None, None, 88), (1, 11, 88)),
        ((None, None, None), (8, 1, 64)),
    ],
)
def test_what_is_not_given_is_solved_on_8_ranks(
    given_sizes: tuple[int | None, int | None, int | None], solved: tuple[int, int, int]
) -> None:
    assert solve(train(*given_sizes), 8) == Batch(*solved)


def test_a_remainder_is_refused_with_the_nearest_batches() -> None:
    """OpenRLHF/OpenRLHF#346: 256 with micro batch 2 on 7 ranks; a floor would train with 252."""
    with pytest.raises(UserError) as refusal:
        solve(train(2, None, 256), 7)
    [problem] = refusal.value.problems
    assert (problem.where, problem.got) == ("train.global_batch_size", "256")
    assert problem.why == "256 is not a multiple of micro 2 x 7 ranks = 14 (remainder 4)"
    assert problem.fix == ("use train.global_batch_size=252 or 266, another micro batch, or another number of ranks")


def test_a_batch_below_one_step_names_only_the_batch_above() -> None:
    with refuses("5 is not a multiple of accumulation 4 x 7 ranks = 28", "use train.global_batch_size=28, another"):
        solve(train(None, 4, 5), 7)


def test_three_sizes_that_disagree_are_refused_with_their_product() -> None:
    with refuses("micro 4 x accumulation 8 x 1 ranks = 32", "drop one of the three, or use train.global_batch_size=32"):
        solve(train(4, 8, 256), 1)


def test_every_size_below_one_is_named() -> None:
    with pytest.raises(UserError) as refusal:
        solve(train(0, -1, 0), 2)
    assert [(problem.where, problem.got) for problem in refusal.value.problems] == [
        ("train.micro_batch_size", "0"),
        ("train.gradient_accumulation_steps", "-1"),
        ("train.global_batch_size", "0"),
    ]


SIZES = st.none() | st.integers(1, 300)


@given(SIZES, SIZES, st.none() | st.integers(1, 5000), st.integers(1, 40), st.integers(1, 600))
def test_a_batch_is_exact_and_keeps_what_was_given_or_is_refused_for_a_reason(
    micro: int | None, accumulation: int | None, total: int | None, fallback: int, world_size: int
) -> None:
    try:
        batch = solve(train(micro, accumulation, total, fallback), world_size)
    except UserError as error:
        [problem] = error.problems
        assert total is not None, "without a global batch every request has a solution"
        factor = (micro or 1) * (accumulation or 1) * world_size
        assert total != factor if micro and accumulation else total % factor, "it had a solution"
        if not (micro and accumulation):
            named = problem.fix.partition("=")[2].partition(",")[0].split(" or ")
            nearest = [total // factor * factor, (total // factor + 1) * factor]
            assert [int(number) for number in named] == [number for number in nearest if number]
        return
    assert batch.micro_batch_size * batch.gradient_accumulation_steps * world_size == batch.global_batch_size
    assert min(batch.micro_batch_size, batch.gradient_accumulation_steps) >= 1
    assert micro in (None, batch.micro_batch_size)
    assert accumulation in (None, batch.gradient_accumulation_steps)
    assert total in (None, batch.global_batch_size)
    if micro is None and (accumulation is None or total is None):
        assert batch.micro_batch_size <= fallback
