"""The canary stops dead runs (deepspeedai/DeepSpeed#6926) and never a living one."""

from __future__ import annotations

import math

import pytest

from launcher.errors import UserError
from recipes.shared.canary import NOT_A_NUMBER_PATIENCE, OVERFLOW_PATIENCE, PATIENCE, Canary


def fed(losses: list[float], norms: list[float | None]) -> int:
    """Steps a canary let through before it stopped the run, all of them if it did not."""
    canary = Canary()
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        try:
            canary.see(step, loss, norm)
        except UserError:
            return step - 1
    return len(losses)


def test_a_gradient_of_zero_stops_after_ten_steps() -> None:
    assert fed([5.0 + n for n in range(30)], [0.0] * 30) == PATIENCE - 1


def test_a_loss_that_stands_to_the_last_bit_stops() -> None:
    assert fed([11.93] * 30, [1.0] * 30) == PATIENCE


def test_a_loss_that_moves_by_one_bit_goes_on() -> None:
    assert fed([math.nextafter(11.93, n % 2 * 20) for n in range(30)], [1e-30] * 30) == 30


def test_not_a_number_stops_at_the_third() -> None:
    assert fed([5.0, math.nan, math.inf, 4.9, math.nan, math.nan, math.nan, 4.0], [None] * 8) == 6
    assert NOT_A_NUMBER_PATIENCE == 3


def test_a_repeat_now_and_then_goes_on() -> None:
    assert fed([5.0, 5.0, 4.9] * 10, [0.0, 1.0, 0.0] * 10) == 30


def test_the_diagnosis_names_step_count_and_remedy() -> None:
    canary = Canary()
    with pytest.raises(UserError) as stopped:
        for step in range(1, 20):
            canary.see(step, 11.93 + step, 0.0)
    (problem,) = stopped.value.problems
    assert problem.where == "step 10" and "10 steps in a row" in problem.got
    assert "exactly 0" in problem.why and "zeropp=off" in problem.fix


def test_an_fp16_run_that_only_skips_steps_is_stopped() -> None:
    canary = Canary()
    for step in range(1, 20):  # the scale settles
        canary.see(step, 5.0 + step, 1.0, skipped=step)
    canary.see(20, 1.0, 1.0, skipped=19)
    with pytest.raises(UserError, match="overflowed"):
        for step in range(21, 60):
            canary.see(step, 5.0 + step, 1.0, skipped=step)
    assert canary.overflows == OVERFLOW_PATIENCE
