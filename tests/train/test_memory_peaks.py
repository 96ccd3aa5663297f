"""Claims about predicted memory: the peak of a rank is the one that its allocator reports, whatever is sharded where.

Run by pytest, through the engine server; scripts/bench planner does the same for larger models.
Must never compare with a figure that the planner made.
"""

from __future__ import annotations

from typing import Any

import pytest

from launcher.measured import profile_request
from launcher.plan import ModelFacts, Plan, build_plan
from launcher.planner import profile as events
from launcher.planner.profile import Profile
from launcher.planner.shapes import count_parameters
from launcher.schema import RunConfig
from recipes.shared import timeline
from recipes.shared.profile import run_job
from tests.plan.asking import composed
from tests.train.engines import Engines, request

# Small temporaries of a kernel, which no operation of the model shows: a thousandth of these models at most.
TOLERANCE = 0.01
ZERO = "deepspeed.zero_optimization"
BUCKET = f"{ZERO}.reduce_bucket_size=300000"
LLAMA = (
    *("train.sequence_length=64", "train.micro_batch_size=4", "train.gradient_accumulation_steps=1"),
    *("cluster.num_procs=2", "model.config.vocab_size=4096", "model.config.hidden_size=128"),
    *("model.config.intermediate_size=384", "model.config.num_hidden_layers=3", "model.config.num_attention_heads=4"),
    *("model.config.num_key_value_heads=2",),
)
MIXTURE = (
    *("model=hf", "model.config.model_type=mixtral", "model.config.vocab_size=512", "model.config.hidden_size=128"),
    *("model.config.intermediate_size=384", "model.config.num_hidden_layers=3", "model.config.num_attention_heads=4"),
    *("model.config.num_key_value_heads=2", "model.config.num_local_experts=4", "train.sequence_length=64"),
    *("train.micro_batch_size=4", "train.gradient_accumulation_steps=1", "cluster.num_procs=2"),
)
CASES: dict[str, tuple[str, ...]] = {
    "stage 0": ("zero=stage0",),
    "stage 0, several micro-batches": ("zero=stage0", "train.gradient_accumulation_steps=3"),
    "stage 1": ("zero=stage1", BUCKET, "precision=bf16"),
    "stage 1, several micro-batches": ("zero=stage1", BUCKET, "train.gradient_accumulation_steps=3"),
    "stage 1, offloaded": ("zero=stage1", BUCKET, "offload=cpu", "precision=bf16"),
    "stage 2": ("zero=stage2", BUCKET, "precision=bf16"),
    "stage 2, recomputed": ("zero=stage2", BUCKET, "activation=full"),
    "stage 2, overlapped": ("zero=stage2", BUCKET, f"{ZERO}.overlap_comm=true"),
    "stage 2, offloaded": ("zero=stage2", BUCKET, "offload=cpu", "train.gradient_accumulation_steps=2"),
    "stage 2, torch's Adam": ("zero=stage2", BUCKET, "deepspeed.optimizer.params.torch_adam=true"),
    "stage 3": ("zero=stage3", BUCKET, "precision=bf16"),
    "stage 3, recomputed": ("zero=stage3", BUCKET, "activation=full", "precision=bf16"),
    "stage 3, all offloaded": ("zero=stage3", BUCKET, "offload=cpu_all", "precision=bf16"),
    "stage 3, little live": (
        *("zero=stage3", BUCKET, f"{ZERO}.stage3_max_reuse_distance=1000"),
        *(f"{ZERO}.stage3_max_live_parameters=200000", f"{ZERO}.stage3_prefetch_bucket_size=50000"),
    ),
    "stage 3, three ranks": ("zero=stage3", BUCKET, "cluster.num_procs=3"),
    "an adapter": ("zero=stage2", BUCKET, "peft=lora", "peft.rank=4", "peft.target=[q_proj,v_proj]"),
    "an adapter at stage 3": ("zero=stage3", BUCKET, "peft=lora", "peft.rank=4", "peft.target=[q_proj,v_proj]"),
    "a mixture": ("zero=stage2", BUCKET),
    "a mixture at stage 3": ("zero=stage3", BUCKET),
    "frozen parts": ("zero=stage2", BUCKET, "parameters.frozen=['*embed_tokens*']"),
}


def measured_facts(config: RunConfig, micro_batch_size: int, precision: str) -> ModelFacts:
    """What the profile job finds, without a process of its own."""
    answer = run_job(profile_request(config, micro_batch_size, precision, None))
    assert answer["timeline"] is not None, answer["why"]
    return ModelFacts(answer["parameters"], Profile.from_json(answer["timeline"]))


def plan_of(*overrides: str) -> Plan:
    return build_plan(composed(*overrides), {}, measured_facts)


@pytest.mark.parametrize("name", CASES)
def test_the_planned_peak_is_the_allocated_one(engines: Engines, name: str) -> None:
    plan = plan_of(*request(*CASES[name], base=MIXTURE if "mixture" in name else LLAMA))
    assert plan.estimate.memory is not None and plan.estimate.memory.measured
    found: dict[str, Any] = engines.call("tests.train.memory_ranks:peak", plan.world_size, plan=plan.to_json())
    assert "error" not in found, found["error"] + found["log"]
    assert plan.estimate.memory.peak.total_bytes == pytest.approx(found["peak"], rel=TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_of_a_model_without_storage_counts_once(tied: bool) -> None:
    """deepspeedai/DeepSpeed#965: on the meta device all pointers are 0, and tied weights are one parameter."""
    config = composed(*request(f"model.config.tie_word_embeddings={str(tied).lower()}", base=LLAMA))
    facts = measured_facts(config, 4, "bf16")
    assert facts.parameters == count_parameters(config.model.config)
    assert facts.profile is not None and facts.profile.trained == facts.parameters


def test_events_have_the_same_numbers_on_both_sides() -> None:
    names = ("FORWARD", "FORWARD_END", "BACKWARD", "BACKWARD_END", "GRADIENT", "LOSS", "END")
    assert [getattr(events, name) for name in names] == [getattr(timeline, name) for name in names]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_twice_the_samples_keep_twice_the_activations(checkpointing: str) -> None:
    words = request("zero=stage2", BUCKET, f"activation={checkpointing}", base=LLAMA)
    plans = [plan_of(*words, f"train.micro_batch_size={size}") for size in (2, 4)]
    one, two = (plan.estimate.memory.moments[1].terms["activations"] for plan in plans if plan.estimate.memory)
    assert two == pytest.approx(2 * one, rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("family", ["mixtral", "t5", "qwen3", "gemma2", "falcon"])
def test_families_that_transformers_builds_are_measured(family: str, precision: str) -> None:
    body = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    body |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    if family == "t5":
        body = {"vocab_size": 64, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
        body |= {"decoder_start_token_id": 0}
    if family == "falcon":
        del body["head_dim"]
    words = [f"model.config.{name}={value}" for name, value in body.items()]
    config = composed("model=hf", f"model.config.model_type={family}", *words, "train.sequence_length=16")
    facts = measured_facts(config, 2, precision)
    assert facts.profile is not None and max(event.highest_bytes for event in facts.profile.events) > 0
