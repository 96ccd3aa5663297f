"""Requests from public threads that only a running engine can answer; a test names its thread.

Run by pytest; the engines are tiny (engine_server.py) and each lives for one case.
Must never accept what a rule should have refused: every request here is planned first.
"""

from __future__ import annotations

import itertools
import math

import pytest

from launcher.check import refuse_precision
from launcher.errors import EXIT_PREFLIGHT, UserError
from tests.plan.asking import planned
from tests.train.engines import Engines, request

pytestmark = pytest.mark.train
Z = "deepspeed.zero_optimization"
CLIP = "deepspeed.gradient_clipping"
SGD = ("optim=sgd", "deepspeed.optimizer.params.lr=0.1", "zero=stage2")


def test_clipping_is_active_and_the_logged_norm_is_from_before_it(engines: Engines) -> None:
    """mlcommons/training#723, deepspeedai/DeepSpeed#7220: SGD moves by lr x clip at most, whatever the norm says."""
    free = engines.run(planned(*request(*SGD, f"{CLIP}=0.0")), 5)
    tiny = engines.run(planned(*request(*SGD, f"{CLIP}=1e-9")), 5)
    assert tiny["effective"]["gradient_clipping"] == 1e-9 and free["effective"]["gradient_clipping"] == 0.0
    assert abs(free["weights"][-1] - free["weights"][0]) > 1e-4
    assert tiny["weights"][-1] == pytest.approx(tiny["weights"][0], abs=5 * 0.1 * 1e-9)
    assert tiny["losses"][-1] == pytest.approx(tiny["losses"][0], rel=1e-6)
    assert free["losses"][-1] < free["losses"][0] - 0.01
    assert tiny["grad_norms"][0] == pytest.approx(free["grad_norms"][0], rel=1e-6)
    assert min(tiny["grad_norms"]) > 0.1


@pytest.mark.parametrize("clip", ["0.3", "10"])
def test_the_engine_clips_with_the_requested_value(engines: Engines, clip: str) -> None:
    """axolotl-ai-cloud/axolotl#1382: an absent key means 1.0 in this DeepSpeed and meant off in others."""
    answer = engines.run(planned(*request("zero=stage2", f"{CLIP}={clip}")), 1)
    assert answer["effective"]["gradient_clipping"] == float(clip)


def test_hpz_with_a_parameter_smaller_than_the_world(engines: Engines) -> None:
    """deepspeedai/DeepSpeed#6659: norms of 2 elements over 4 ranks, in secondary partitions of 2 ranks."""
    small = ("model.config.hidden_size=2", "model.config.num_attention_heads=1", "model.config.num_key_value_heads=1")
    four = ("zero=stage3", "cluster.num_procs=4", *small)
    plain = engines.run(planned(*request(*four)), 4)
    paired = engines.run(planned(*request(*four, f"{Z}.zero_hpz_partition_size=2")), 4)
    assert "error" not in paired, paired["error"] + paired["log"]
    assert paired["effective"]["hpz_group_size"] == 2
    assert paired["losses"] == plain["losses"]
    assert paired["losses"][-1] < paired["losses"][0]


PRECISIONS, ACCUMULATIONS = ("fp32", "bf16", "fp16"), (None, "fp32", "bf16")
NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
WRAPPERS = {1: "DeepSpeedZeroOptimizer", 2: "DeepSpeedZeroOptimizer", 3: "DeepSpeedZeroOptimizer_Stage3"}
# Every combination the rules accept: the engine's optimizer, and the type gradients are accumulated in.
SUPPORTED = {
    (stage, precision, accumulation): (wrapper, NAMES[accumulation or precision])
    for stage, wrapper in WRAPPERS.items()
    for precision in PRECISIONS
    for accumulation in ACCUMULATIONS
} | {
    (0, "fp32", None): ("FusedAdam", "float32"),
    (0, "fp32", "fp32"): ("FusedAdam", "float32"),
    (1, "bf16", "fp32"): ("BF16_Optimizer", "float32"),
}


def test_the_support_matrix_of_stage_precision_and_accumulation_is_what_trains(engines: Engines) -> None:
    """deepspeedai/DeepSpeed#3693: bf16 at stage 1 goes to another wrapper class with another accumulation type."""
    found = {}
    for stage, precision, accumulation in itertools.product(range(4), PRECISIONS, ACCUMULATIONS):
        extra = () if accumulation is None else (f"deepspeed.data_types.grad_accum_dtype={accumulation}",)
        try:
            plan = planned(*request(f"zero=stage{stage}", f"precision={precision}", *extra))
        except UserError:
            continue
        if precision == "fp16" and not engines.fp16:
            continue  # what the launcher does there is the next test's
        if (lacking := engines.lacks(plan)) is not None:
            pytest.skip(lacking)
        answer = engines.run(plan, 3)
        case = (stage, precision, accumulation)
        assert "error" not in answer, (case, answer)
        assert answer["ignored"] == [] and math.isfinite(sum(answer["losses"]))
        assert answer["losses"][-1] < answer["losses"][0], case
        effective = answer["effective"]
        found[case] = (effective["engine_optimizer"], effective["gradient_accumulation_dtype"])
    assert found == {case: made for case, made in SUPPORTED.items() if engines.fp16 or case[1] != "fp16"}


def test_a_cpu_without_fp16_is_refused_before_the_launch(engines: Engines) -> None:
    """The engine refuses it once the model is built; the launcher asks torch first, and says what the engine will."""
    plan = planned(*request("zero=stage2", "precision=fp16"))
    answer = engines.run(plan, 1)
    if engines.fp16:
        refuse_precision(plan)
        assert "error" not in answer
    else:
        with pytest.raises(UserError) as refused:
            refuse_precision(plan)
        assert refused.value.code == EXIT_PREFLIGHT
        assert refused.value.problems[0].got == "fp16 on a CPU without it"
        assert answer["error"] == "ValueError: Type fp16 is not supported on your device."
    refuse_precision(planned(*request("zero=stage2", "precision=bf16")))
