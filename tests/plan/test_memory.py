"""Claims about predicted sizes: the textbook's table, what stays resident, parameter counts and traffic.

Run by pytest. GB is 1e9 bytes, Ψ the number of parameters.
Must never take a reference figure from the code it checks.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.planner.memory import model_state, textbook_bytes
from launcher.planner.shapes import count_parameters
from launcher.planner.traffic import bytes_per_step
from tests.plan.asking import composed, planned

# --- the textbook's table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "world_size", "printed"),
    [
        (7.0e9, 8, ["112", "38.5", "26.25", "14"]),
        (70.6e9, 8, ["1,130", "388", "265", "141"]),
        (70.6e9, 16, [None, "335", "203", "71"]),
        (70.6e9, 32, [None, "309", "172", "35"]),
        (70.6e9, 64, [None, "296", "157", "18"]),
        (3.0e9, 8, ["48", "16.5", "11.25", "6"]),
    ],
)
def test_textbook_figures_are_the_printed_ones(parameters: float, world_size: int, printed: list[str | None]) -> None:
    for stage, figure in enumerate(printed):
        if figure is not None:
            decimals = len(figure.partition(".")[2])
            gigabytes = textbook_bytes(int(parameters), stage, world_size, "bf16") / 1e9
            assert f"{gigabytes:,.{decimals}f}" == figure, f"stage {stage}"


@pytest.mark.parametrize(("stage", "per_parameter"), [(0, 16), (1, 4), (2, 2), (3, 0)])
def test_what_a_stage_keeps_whole_is_its_floor(stage: int, per_parameter: int) -> None:
    """70.6e9 parameters stay at 282 GB at stage 1 and 141 GB at stage 2, however many ranks there are."""
    many = textbook_bytes(70_600_000_000, stage, 10**6, "bf16")
    assert 0 <= many - per_parameter * 70_600_000_000 < 16 * 70_600_000_000 / 10**6 + 1


@pytest.mark.parametrize(("stage", "on_8_ranks"), [(0, 16_000), (1, 9_000), (2, 5_500), (3, 2_000)])
def test_in_fp32_weights_and_gradients_take_four_bytes_and_masters_none(stage: int, on_8_ranks: int) -> None:
    assert textbook_bytes(1000, stage, 8, "fp32") == on_8_ranks


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_rank_saves_nothing_at_any_stage(precision: str) -> None:
    """deepspeedai/DeepSpeed#237."""
    assert {textbook_bytes(1000, stage, 1, precision) for stage in range(4)} == {16_000}


@given(st.integers(1, 10**12), st.integers(1, 4096), st.sampled_from(["fp32", "bf16", "fp16"]))
def test_a_higher_stage_never_needs_more(parameters: int, world_size: int, precision: str) -> None:
    sizes = [textbook_bytes(parameters, stage, world_size, precision) for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True)


# --- what stays resident, term by term: deepspeedai/DeepSpeed#5102 ---------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "precision", "terms"),
    [
        (0, "fp32", {"weights": 4000, "moments": 8000}),
        (0, "bf16", {"weights": 2000, "master": 4000, "moments": 8000}),
        (1, "fp32", {"weights": 4000, "master": 1000, "moments": 2000}),
        (1, "bf16", {"weights": 2000, "master": 1000, "moments": 2000}),
        (2, "bf16", {"weights": 2000, "master": 1000, "moments": 2000}),
        (3, "fp32", {"weights": 1000, "master": 1000, "moments": 2000, "gradients": 1000}),
        (3, "bf16", {"weights": 500, "master": 1000, "moments": 2000, "gradients": 500}),
    ],
)
def test_resident_terms_of_1000_parameters_on_4_ranks(stage: int, precision: str, terms: dict[str, int]) -> None:
    state = model_state(1000, stage, 4, precision, offload_optimizer=False, offload_param=False)
    assert (state.device, state.host) == (terms, {})


@pytest.mark.parametrize("stage", [1, 2])
def test_offloading_the_optimizer_moves_it_to_the_host(stage: int) -> None:
    state = model_state(1000, stage, 4, "bf16", offload_optimizer=True, offload_param=False)
    assert state.device == {"weights": 2000}
    assert state.host == {"master": 1000, "moments": 2000, "gradients": 1000}


def test_offloading_everything_leaves_nothing_resident_on_the_device() -> None:
    state = model_state(1000, 3, 4, "bf16", offload_optimizer=True, offload_param=True)
    assert state.device == {}
    assert state.host == {"weights": 500, "master": 1000, "moments": 2000, "gradients": 1000}


def test_shares_are_rounded_up() -> None:
    assert model_state(10, 3, 4, "bf16", False, False).device["weights"] == 2 * 3


# --- parameter counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "published"),
    [
        ("gpt2_small", 124_439_808),
        ("llama_7b", 6_738_415_616),
        ("llama_70b", 70_553_706_496),
        ("llama_1b", 1_235_814_400),
    ],
)
def test_models_of_conf_have_the_published_number_of_parameters(model: str, published: int) -> None:
    assert count_parameters(composed(f"model={model}").model.config) == published
    assert planned(f"model={model}").estimate.parameters == published


def llama(**changes: object) -> dict[str, object]:
    """A Llama of hidden size 2048 over 128,256 ids."""
    fields = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192}
    return fields | {"num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8} | changes


@pytest.mark.parametrize(
    ("tied", "untied", "difference"),
    [
        (llama(tie_word_embeddings=True), llama(tie_word_embeddings=False), 128256 * 2048),
        (llama(tie_word_embeddings=True), llama(), 128256 * 2048),
    ],
)
def test_an_untied_head_counts_exactly_once(
    tied: dict[str, object], untied: dict[str, object], difference: int
) -> None:
    """jranaraki/vllm-fit#27."""
    assert (count_parameters(untied) or 0) - (count_parameters(tied) or 0) == difference


def test_gpt2_is_tied_unless_it_says_otherwise() -> None:
    fields = composed("model=gpt2_small").model.config
    untied = count_parameters(fields | {"tie_word_embeddings": False}) or 0
    assert untied - (count_parameters(fields) or 0) == 50257 * 768


def test_grouped_queries_and_a_wide_gated_mlp_are_counted_as_they_are() -> None:
    """EleutherAI/cookbook#36: 56e9 were predicted for this shape; Qwen2 72B is published with 72.71e9."""
    shape = llama(
        vocab_size=152064, hidden_size=8192, intermediate_size=29568, num_hidden_layers=80, num_attention_heads=64
    )
    assert count_parameters(shape) == pytest.approx(72.71e9, rel=0.005)  # it has biases, which this shape leaves out


def test_biases_and_a_head_dimension_of_its_own_are_counted() -> None:
    plain = count_parameters(llama()) or 0
    attention = count_parameters(llama(attention_bias=True)) or 0
    assert attention - plain == 2 * ((32 + 2 * 8) * 64 + 2048)
    assert (count_parameters(llama(mlp_bias=True)) or 0) - plain == 2 * (2 * 8192 + 2048)
    assert (count_parameters(llama(head_dim=128)) or 0) - plain == 2 * 2 * 2048 * 64 * (32 + 8)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"model_type": "mixtral"},
        {"model_type": "llama"},
        llama(pretraining_tp=2),
        llama(hidden_size="wide"),
        llama(num_attention_heads=0),
        {
            "model_type": "gpt2",
            "n_embd": 8,
            "n_layer": 1,
            "vocab_size": 8,
            "n_positions": 8,
            "add_cross_attention": True,
        },
    ],
)
def test_what_the_formulas_do_not_cover_is_not_guessed(config: dict[str, object]) -> None:
    """AlexsJones/llmfit#230: experts, for one, are counted by building the model on the meta device."""
    assert count_parameters(config) is None


# --- traffic, in units of 2Ψ bytes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "forward", "backward", "update", "total"),
    [(0, 0, 2, 0, 2), (1, 0, 1, 1, 2), (2, 0, 1, 1, 2), (3, 1, 2, 0, 3)],
)
def test_traffic_of_a_step_is_the_tables(stage: int, forward: int, backward: int, update: int, total: int) -> None:
    moved = bytes_per_step(1000, stage, 8, "bf16", accumulation=1)
    expected = {"forward": forward, "backward": backward, "update": update, "total": total}
    assert moved == {phase: units * 2000 for phase, units in expected.items()}


@pytest.mark.parametrize(("stage", "total"), [(0, 2), (1, 2), (2, 5), (3, 12)])
def test_stages_2_and_3_pay_for_every_micro_batch(stage: int, total: int) -> None:
    assert bytes_per_step(1000, stage, 8, "bf16", accumulation=4)["total"] == total * 2000


def test_one_rank_sends_nothing_and_fp32_sends_twice_as_much() -> None:
    assert set(bytes_per_step(1000, 3, 1, "bf16", 1).values()) == {0}
    assert bytes_per_step(1000, 3, 8, "fp32", 1)["total"] == 2 * bytes_per_step(1000, 3, 8, "bf16", 1)["total"]


# --- in the plan -----------------------------------------------------------------------------------------------------


def test_the_plan_carries_the_estimate_of_its_own_stage_and_offload() -> None:
    plan = planned("zero=stage3", "offload=cpu", "precision=bf16", "cluster.num_procs=4")
    parameters = plan.estimate.parameters or 0
    assert plan.estimate.textbook_bytes == 4 * parameters
    assert plan.estimate.device_bytes == {"weights": 2 * parameters // 4}
    assert set(plan.estimate.host_bytes) == {"master", "moments", "gradients"}
    assert plan.estimate.traffic_bytes["total"] == 3 * 2 * parameters


def test_a_checkpoint_holds_weights_masters_and_moments() -> None:
    """Positronic-Robotics/positronic#374: 14 bytes a parameter in 16 bits; the masters are the weights at stage 0."""
    parameters = planned().estimate.parameters or 0
    assert planned("precision=bf16").estimate.checkpoint_bytes == 14 * parameters
    assert planned("zero=stage0").estimate.checkpoint_bytes == 12 * parameters


@pytest.mark.parametrize(
    ("options", "size"),
    [
        (("zero=stage2",), 2 * 500_000_000),
        (("zero=stage2", "deepspeed.zero_optimization.overlap_comm=true"), 2 * 2 * 500_000_000),
        (("zero=stage3", "deepspeed.zero_optimization.overlap_comm=true"), 2 * 500_000_000),
        (("zero=stage2", "deepspeed.zero_optimization.reduce_bucket_size=2M"), 2 * 2_000_000),
        (("zero=stage2", "deepspeed.communication_data_type=fp32"), 4 * 500_000_000),
        (("zero=stage2", "deepspeed.zero_optimization.contiguous_gradients=false"), 0),
    ],
)
def test_reduction_buffers_count_whole_however_small_the_model(options: tuple[str, ...], size: int) -> None:
    """deepspeedai/DeepSpeed#4875."""
    assert planned("precision=bf16", *options).estimate.reduce_bucket_bytes == size


@pytest.mark.parametrize(
    ("optimizer", "moments"),
    [(["optim=adamw"], 8), (["optim=sgd"], 4), (["optim=sgd", "deepspeed.optimizer.params.momentum=0.0"], 0)]
    + [(["optim=muon"], 8)],
)
def test_what_is_kept_and_saved_is_the_optimizers_own(optimizer: list[str], moments: int) -> None:
    """Weights, masters and what the optimizer has beside them; Muon's largest share is counted for all."""
    plan = planned("zero=stage1", "precision=bf16", *optimizer)
    parameters = plan.estimate.parameters
    assert parameters is not None
    assert plan.estimate.checkpoint_bytes == (2 + 4 + moments) * parameters
    assert plan.estimate.device_bytes.get("moments", 0) == moments * -(-parameters // plan.world_size)
