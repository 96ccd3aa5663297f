"""Predicted collectives of a step are, byte for byte, those that DeepSpeed's own logger counts on two or three ranks.

Run by pytest, through the engine server. scripts/bench traffic does the same through whole launches.
Must never compare less than every collective of every phase: what was not predicted counts as much as what was.
"""

from __future__ import annotations

from typing import Any

import pytest

from launcher.plan import Plan
from tests.plan.asking import planned
from tests.train.engines import Engines, request
from tests.train.test_memory_peaks import plan_of
from tests.train.test_parity_families import BODY, GPT2, hf

MODEL = (
    *("train.sequence_length=16", "train.micro_batch_size=2", "train.gradient_accumulation_steps=2"),
    *("cluster.num_procs=2", "model.config.vocab_size=257", "model.config.hidden_size=64"),
    *("model.config.intermediate_size=128", "model.config.num_hidden_layers=3", "model.config.num_attention_heads=4"),
    *("model.config.num_key_value_heads=2", "model.config.tie_word_embeddings=false"),
)
ZERO = "deepspeed.zero_optimization"
NONE_PERSIST = f"{ZERO}.stage3_param_persistence_threshold=0"
NEAR = (f"{ZERO}.stage3_max_reuse_distance=40000", f"{ZERO}.stage3_prefetch_bucket_size=20000")
FEW_LIVE = (*NEAR, f"{ZERO}.stage3_max_live_parameters=30000")
LORA = ("peft=lora", "peft.rank=8", "peft.target=[q_proj,v_proj]")
CASES: dict[str, tuple[str, ...]] = {
    "stage 0": ("zero=stage0",),
    "stage 1 sums micro-batches before it reduces": ("zero=stage1", "precision=bf16"),
    "stage 2 reduces every micro-batch": ("zero=stage2",),
    "stage 2 in fp32 over 16-bit weights": ("zero=stage2", "precision=bf16", "deepspeed.communication_data_type=fp32"),
    "stage 2 to the owners": ("zero=stage2", f"{ZERO}.use_multi_rank_bucket_allreduce=false"),
    "stage 2 offloaded": ("zero=stage2", "offload=cpu", "precision=bf16"),
    "stage 3, everything persists": ("zero=stage3",),
    "stage 3, nothing persists, gathered once": ("zero=stage3", NONE_PERSIST, "precision=bf16"),
    "stage 3, gathered again where the next use is far": ("zero=stage3", NONE_PERSIST, *NEAR),
    "stage 3, few parameters live": ("zero=stage3", NONE_PERSIST, *FEW_LIVE, "offload=cpu_all"),
    "stage 3, recomputed": ("zero=stage3", NONE_PERSIST, *FEW_LIVE, "activation=full"),
    "stage 3, tied": ("zero=stage3", *NEAR, NONE_PERSIST, "model.config.tie_word_embeddings=true"),
    "stage 3, all-reduced": ("zero=stage3", f"{ZERO}.reduce_scatter=false"),
    "stage 3, an adapter": ("zero=stage3", f"{ZERO}.stage3_param_persistence_threshold=2000", *LORA),
    "stage 3, three ranks": ("zero=stage3", NONE_PERSIST, *NEAR, "cluster.num_procs=3"),
}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "qwen2": {"model_type": "qwen2"} | BODY,
    "qwen3": {"model_type": "qwen3", "head_dim": 8} | BODY,
    "gemma2": {"model_type": "gemma2", "head_dim": 8} | BODY,
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2} | BODY,
}
TIGHT = (f"{ZERO}.stage3_max_reuse_distance=10000", f"{ZERO}.stage3_prefetch_bucket_size=3000")
TIGHT += (f"{ZERO}.stage3_max_live_parameters=8000", NONE_PERSIST)


def predicted(plan: Plan) -> dict[str, dict[str, int]]:
    """{phase: {collective: bytes}} of the plan."""
    found: dict[str, dict[str, int]] = {"forward": {}, "backward": {}, "update": {}}
    for move in plan.estimate.collectives:
        phase = found[move.phase]
        phase[move.collective] = phase.get(move.collective, 0) + move.logged_bytes
    return found


def counted(engines: Engines, plan: Plan) -> dict[str, dict[str, int]]:
    """The same, as DeepSpeed counts it."""
    found: dict[str, Any] = engines.call("tests.train.traffic_ranks:counted", plan.world_size, plan=plan.to_json())
    assert "error" not in found, found["error"] + found["log"]
    return {phase: found[phase] for phase in ("forward", "backward", "update")}


@pytest.mark.parametrize("name", CASES)
def test_every_collective_of_a_step_is_predicted_to_the_byte(engines: Engines, name: str) -> None:
    plan = planned(*request(*CASES[name], base=MODEL))
    assert counted(engines, plan) == predicted(plan)


@pytest.mark.parametrize("family", FAMILIES)
def test_gathers_follow_the_modules_of_each_family(engines: Engines, family: str) -> None:
    """Few parameters live and the next use is far, as in a model of billions under DeepSpeed's own limits."""
    words = ("zero=stage3", "schedule=constant", *hf(FAMILIES[family]), *TIGHT, *MODEL[:2], "cluster.num_procs=2")
    plan = planned(*words, "train.gradient_accumulation_steps=1")
    assert counted(engines, plan) == predicted(plan)


@pytest.mark.parametrize("family", ["mixtral", "qwen3", "gpt2"])
def test_a_measured_pass_gathers_what_its_outline_does(family: str) -> None:
    """The outline is what DeepSpeed was counted against; of a mixture all that is inside is fetched as one."""
    words = ("zero=stage3", "schedule=constant", "precision=bf16", *hf(FAMILIES[family]), *TIGHT, *MODEL[:2])
    words += ("cluster.num_procs=2", "train.gradient_accumulation_steps=1")
    assert predicted(plan_of(*words)) == predicted(planned(*words))
