"""For every rule about the engine: the real one fails or misbehaves on what it refuses, and works on what it accepts.

Run by pytest; each proof forks the ranks of one or two tiny engines (engine_server.py).
Must never prove anything on a request that another rule refuses as well, unless the proof says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.rules import RULES
from tests.plan.asking import broken_rules, planned
from tests.train.engines import GPT2, LLAMA, Engines, request, unjudged

pytestmark = pytest.mark.train

Answer = dict[str, Any]
Check = Callable[[Answer, Answer], None]

NOT_ABOUT_THE_ENGINE = "decides before an engine exists: tests/plan/test_rules.py"
NOT_PROVEN = {
    "mode_is_known": NOT_ABOUT_THE_ENGINE,
    "audit_is_known": NOT_ABOUT_THE_ENGINE,
    "audit_watches_steps": NOT_ABOUT_THE_ENGINE,
    "strict_audit_needs_stage3": NOT_ABOUT_THE_ENGINE,
    "audit_path_needs_its_mode": NOT_ABOUT_THE_ENGINE,
    "recipe_is_known": NOT_ABOUT_THE_ENGINE,
    "launcher_is_known": NOT_ABOUT_THE_ENGINE,
    "launcher_needs_hosts": NOT_ABOUT_THE_ENGINE,
    "launcher_can_place_the_ranks": NOT_ABOUT_THE_ENGINE,
    "run_folder_survives_the_remote_shell": NOT_ABOUT_THE_ENGINE,
    "check_format_is_known": NOT_ABOUT_THE_ENGINE,
    "batch_job_needs_slurm": NOT_ABOUT_THE_ENGINE,
    "no_secret_in_the_request": NOT_ABOUT_THE_ENGINE,
    "plan_format_is_known": NOT_ABOUT_THE_ENGINE,
    "displays_need_their_mode": NOT_ABOUT_THE_ENGINE,
    "planned_amounts_are_positive": NOT_ABOUT_THE_ENGINE,
    "checkpointing_is_chosen": NOT_ABOUT_THE_ENGINE,
    "tracker_is_known": NOT_ABOUT_THE_ENGINE,
    "tracker_options_need_a_tracker": NOT_ABOUT_THE_ENGINE,
    "counts_are_positive": NOT_ABOUT_THE_ENGINE,
    "numbers_are_finite": NOT_ABOUT_THE_ENGINE,
    "export_is_sound": NOT_ABOUT_THE_ENGINE,
    "ema_decay_is_a_fraction": NOT_ABOUT_THE_ENGINE,
    "ema_needs_masters_in_memory": "where DeepSpeed keeps masters is told by tests/train/test_average.py",
    "best_needs_evaluations": NOT_ABOUT_THE_ENGINE,
    "smallest_gain_is_a_gain": NOT_ABOUT_THE_ENGINE,
    "parameter_groups_are_sound": NOT_ABOUT_THE_ENGINE,
    "recipe_target_is_that_of_a_custom_recipe": NOT_ABOUT_THE_ENGINE,
    "own_module_has_no_hugging_face_options": NOT_ABOUT_THE_ENGINE,
    "finetuning_begins_with_weights": NOT_ABOUT_THE_ENGINE,
    "conversations_are_finetuned": NOT_ABOUT_THE_ENGINE,
    "finetuned_models_go_on_in_one_sequence": NOT_ABOUT_THE_ENGINE,
    "objectives_are_those_of_an_own_module": NOT_ABOUT_THE_ENGINE,
    "packs_are_kept_apart": "flash attention needs a GPU; what keeps packs apart elsewhere is proven in test_finetune",
    "hardware_is_known_or_null": NOT_ABOUT_THE_ENGINE,
    "generation_needs_prompts": NOT_ABOUT_THE_ENGINE,
    "peft_is_known": NOT_ABOUT_THE_ENGINE,
    "peft_options_need_lora": NOT_ABOUT_THE_ENGINE,
    "lora_is_sound": NOT_ABOUT_THE_ENGINE,
    "hpz_groups_lie_within_a_host": "which links a gather uses shows on several hosts only",
}


SLOWER = 'parameters.groups=[{match: ["*embed*"], lr_scale: 0.1}]'


# --- what shows that a request was rightly refused -------------------------------------------------------------------


def fails(text: str) -> Check:
    """The engine stops, and says `text`."""

    def check(refused: Answer, accepted: Answer) -> None:
        assert text in refused.get("error", "no error"), refused

    return check


def ignored(what: str) -> Check:
    """The engine starts and reads back without `what`."""

    def check(refused: Answer, accepted: Answer) -> None:
        assert what in refused["ignored"], refused

    return check


def lacks(path: str, honoured: Any = "absent") -> Check:
    """The engine's attribute `path` is not there; with what is accepted it is `honoured`."""

    def check(refused: Answer, accepted: Answer) -> None:
        assert refused["asked"] == {path: "absent"}
        assert accepted["asked"] == {path: honoured}

    return check


def same_losses(refused: Answer, accepted: Answer) -> None:
    """What was asked for changes nothing: the accepted request does not ask for it."""
    assert "error" not in refused, refused
    assert refused["losses"] == accepted["losses"]


def other_losses(refused: Answer, accepted: Answer) -> None:
    """The engine trains something else, though both requests mean the same computation."""
    assert "error" not in refused, refused
    assert refused["losses"][-1] != pytest.approx(accepted["losses"][-1], rel=1e-5)  # equal ones agree to 1e-7


def other_first_loss(refused: Answer, accepted: Answer) -> None:
    """Before any step, on equal weights and tokens."""
    assert refused["weights"][0] == accepted["weights"][0]
    assert refused["losses"][0] != pytest.approx(accepted["losses"][0], rel=1e-5)


def halved_gradients(refused: Answer, accepted: Answer) -> None:
    assert refused["grad_norms"][0] == pytest.approx(accepted["grad_norms"][0] / 2, rel=1e-5)


def clipped_update(refused: Answer, accepted: Answer) -> None:
    """The norm that is clipped is of Muon's update: orthogonal matrices. The gradient's is 1.06 with any optimizer."""
    assert refused["grad_norms"][0] > 10
    assert accepted["losses"][-1] < refused["losses"][-1]


def never_warm(refused: Answer, accepted: Answer) -> None:
    assert max(refused["lrs"]) < 0.5 * max(accepted["lrs"])


def forgotten_rate(refused: Answer, accepted: Answer) -> None:
    """Asked for lr 0.002 and a peak of 0.1: only the peak counts, as if it were the lr."""
    assert refused["lrs"] == accepted["lrs"]
    assert max(refused["lrs"]) == pytest.approx(0.1)


def one_rate_for_all(refused: Answer, accepted: Answer) -> None:
    """get_lr lists the rate of Muon's group and of Adam's."""
    assert len(set(refused["asked"]["get_lr"].strip("[]").split(", "))) == 1
    assert len(set(accepted["asked"]["get_lr"].strip("[]").split(", "))) == 2


@dataclass(frozen=True)
class Proof:
    """A rule, the least that breaks it, its neighbour that is accepted, and what the engine does with the first."""

    rule: str
    refused: tuple[str, ...]
    accepted: tuple[str, ...]
    check: Check
    ask: tuple[str, ...] = ()
    base: Sequence[str] = LLAMA
    resumed: bool = False
    """Whether the claim is about a second engine that loads what the first one saved."""
    also: tuple[str, ...] = ()
    """Other rules that refuse the request on a CPU."""


Z = "deepspeed.zero_optimization"
OFFLOAD = f"{Z}.offload_optimizer"
UNTESTED = "deepspeed.zero_allow_untested_optimizer=true"
ACCUMULATE = "deepspeed.data_types.grad_accum_dtype=fp32"
MASTERS = "deepspeed.bf16.bf16_master_weights_and_grads=true"
BARE = tuple(f"~deepspeed.optimizer.params.{name}" for name in ("betas", "eps", "weight_decay"))
ADAFACTOR = ("deepspeed.optimizer.type=Adafactor", *BARE)
TORCH_ADAM = "deepspeed.optimizer.params.torch_adam=true"
PLAIN_REDUCTION = f"{Z}.reduce_scatter=false"
NVME = ("zero=stage3", "offload=nvme")

PROOFS = [
    Proof(
        "sequence_fits_the_model",
        ("train.sequence_length=17",),
        ("train.sequence_length=16",),
        fails("index out of range"),
        base=GPT2,
    ),
    Proof(
        "model_shape_is_sound",
        ("model.config.hidden_size=30", "model.config.num_attention_heads=4", "model.config.num_key_value_heads=4"),
        ("model.config.hidden_size=30", "model.config.num_attention_heads=3", "model.config.num_key_value_heads=3"),
        fails("not a multiple of the number of attention heads"),
    ),
    Proof(
        "model_shape_is_sound",
        ("model.config.num_attention_heads=4", "model.config.num_key_value_heads=3"),
        ("model.config.num_attention_heads=4", "model.config.num_key_value_heads=2"),
        fails("must match the size of tensor"),
    ),
    Proof(
        "model_shape_is_sound",
        ("model.config.head_dim=7",),
        ("model.config.head_dim=6",),
        fails("even rotary dimension"),
    ),
    Proof(
        "model_shape_is_sound", ("model.config.n_head=3",), ("model.config.n_head=4",), fails("divisible"), base=GPT2
    ),
    Proof(
        "ranks_are_data_parallel",
        ("deepspeed.tensor_parallel.autotp_size=2",),
        ("deepspeed.tensor_parallel.autotp_size=1",),
        fails("Data inconsistency within the TP group"),
    ),
    Proof(
        "ranks_are_data_parallel",
        ("deepspeed.sequence_parallel_size=2",),
        ("deepspeed.sequence_parallel_size=1",),
        fails("Check batch related parameters"),
    ),
    Proof(
        "unreached_parts_are_not_asked_for",
        ("deepspeed.managed_gradient_accumulation=false", "train.gradient_accumulation_steps=2"),
        ("train.gradient_accumulation_steps=2",),
        other_losses,
    ),
    Proof(
        "unreached_parts_are_not_asked_for",
        ("zero=stage1", "deepspeed.compile.deepcompile=true"),
        ("zero=stage1",),
        same_losses,
    ),
    Proof("stage_is_known", (f"{Z}.stage=4",), (f"{Z}.stage=3",), fails("stage")),
    Proof(
        "offload_optimizer_needs_a_stage",
        ("zero=stage0", "offload=cpu"),
        ("zero=stage1", "offload=cpu"),
        ignored("offload_optimizer"),
    ),
    Proof(
        "offload_param_needs_stage3",
        ("zero=stage2", "offload=cpu_all"),
        ("zero=stage3", "offload=cpu_all"),
        ignored("offload_param"),
    ),
    Proof(
        "nvme_needs_stage3",
        ("zero=stage2", "offload=nvme", f"{OFFLOAD}.nvme_path=FOLDER"),
        (*NVME, f"{OFFLOAD}.nvme_path=FOLDER"),
        ignored("offload_optimizer"),
    ),
    Proof(
        "nvme_needs_a_path",
        (*NVME, f"{OFFLOAD}.nvme_path=null"),
        (*NVME, f"{OFFLOAD}.nvme_path=FOLDER"),
        fails("not NoneType"),
    ),
    Proof(
        "partial_offload_needs_cpu_adam_at_stage3",
        ("zero=stage2", "offload=cpu", f"{OFFLOAD}.ratio=0.5"),
        ("zero=stage3", "offload=cpu", f"{OFFLOAD}.ratio=0.5"),
        fails("Partial offloading only supported for ZeRO Stage 3"),
    ),
    Proof(
        "partial_offload_needs_cpu_adam_at_stage3",
        ("zero=stage3", "offload=cpu", f"{OFFLOAD}.ratio=0.5", TORCH_ADAM),
        ("zero=stage3", "offload=cpu", TORCH_ADAM),
        fails("Hybrid Optimizer Only Supports DeepSpeedCPUAdam"),
    ),
    Proof(
        "super_offload_needs_cuda_at_stage3",
        ("zero=stage2", "offload=cpu", f"{OFFLOAD}.super_offload=true"),
        ("zero=stage2", "offload=cpu"),
        same_losses,
    ),
    Proof(
        "super_offload_needs_cuda_at_stage3",
        ("zero=stage3", "offload=cpu", f"{OFFLOAD}.super_offload=true"),
        ("zero=stage3", "offload=cpu"),
        fails("SuperOffload only supports NVIDIA CUDA GPUs"),
    ),
    Proof(
        "zenflow_changes_the_weights",
        ("offload=cpu", f"{Z}.zenflow={{select_strategy: step, select_interval: 2, update_interval: 2}}"),
        ("offload=cpu",),
        other_first_loss,
    ),
    Proof(
        "zenflow_changes_the_weights",
        ("zero=stage3", "offload=cpu", f"{Z}.zenflow={{topk_ratio: 0.1}}"),
        ("zero=stage3", "offload=cpu"),
        fails("index out of range"),
    ),
    Proof(
        "zeropp_needs_stage3",
        ("zero=stage2", f"{Z}.zero_hpz_partition_size=2"),
        ("zero=stage3", f"{Z}.zero_hpz_partition_size=2"),
        ignored("hpz_group_size"),
    ),
    Proof(
        "quantised_zeropp_needs_cuda",
        ("zero=stage3", "zeropp=qwz"),
        ("zero=stage3",),
        fails("not been implemented on CPU"),
    ),
    Proof(
        "quantised_gradients_need_hosts",
        ("zero=stage3", "zeropp=qgz"),
        ("zero=stage3",),
        same_losses,
        also=("quantised_zeropp_needs_cuda",),
    ),
    Proof(
        "hpz_divides_the_world",
        ("zero=stage3", "cluster.num_procs=4", f"{Z}.zero_hpz_partition_size=3"),
        ("zero=stage3", "cluster.num_procs=4", f"{Z}.zero_hpz_partition_size=2"),
        fails("4 is not divisible by 3"),
    ),
    Proof(
        "keys_belong_to_the_stage",
        ("zero=stage2", f"{Z}.sub_group_size=5"),
        ("zero=stage3", f"{Z}.sub_group_size=5"),
        lacks("optimizer.sub_group_size", 5),
        ask=("optimizer.sub_group_size",),
    ),
    Proof(
        "keys_belong_to_the_stage",
        ("zero=stage3", f"{Z}.round_robin_gradients=true"),
        ("zero=stage2", f"{Z}.round_robin_gradients=true"),
        lacks("optimizer.round_robin_gradients", True),
        ask=("optimizer.round_robin_gradients",),
    ),
    Proof(
        "keys_belong_to_the_stage",
        ("zero=stage0", f"{Z}.reduce_bucket_size=500"),
        ("zero=stage1", f"{Z}.reduce_bucket_size=500"),
        lacks("optimizer.reduce_bucket_size", 500),
        ask=("optimizer.reduce_bucket_size",),
    ),
    Proof(
        "keys_belong_to_the_stage",
        ("zero=stage1", "precision=bf16", ACCUMULATE, f"{Z}.reduce_bucket_size=500"),
        ("zero=stage2", "precision=bf16", ACCUMULATE, f"{Z}.reduce_bucket_size=500"),
        lacks("optimizer.reduce_bucket_size", 500),
        ask=("optimizer.reduce_bucket_size",),
    ),
    Proof(
        "allgather_bucket_is_even",
        (f"{Z}.allgather_bucket_size=101",),
        (f"{Z}.allgather_bucket_size=102",),
        fails("multiple of nccl_start_alignment_factor"),
    ),
    Proof(
        "elastic_checkpoint_cannot_be_loaded",
        (TORCH_ADAM, f"{Z}.elastic_checkpoint=true"),
        (TORCH_ADAM,),
        fails("AssertionError"),
        resumed=True,
    ),
    Proof(
        "one_reduced_precision",
        ("precision=bf16", "deepspeed.fp16.enabled=true"),
        ("precision=bf16",),
        fails("bfloat16 and fp16 modes cannot be simultaneously enabled"),
    ),
    Proof(
        "stage0_reduced_precision_decays_at_start",
        ("zero=stage0", "precision=bf16"),
        ("zero=stage1", "precision=bf16"),
        other_losses,
    ),
    Proof(
        "accumulation_type_needs_a_stage",
        ("zero=stage0", "deepspeed.data_types.grad_accum_dtype=bf16"),
        ("zero=stage1", "deepspeed.data_types.grad_accum_dtype=bf16"),
        fails("unsupported mix"),
    ),
    Proof(
        "parameter_type_is_the_precision",
        ("precision=bf16", "deepspeed.data_types.param_dtype=fp32"),
        ("precision=bf16", "deepspeed.data_types.param_dtype=bf16"),
        fails("conflicts with the enabled precision mode"),
    ),
    Proof(
        "reduced_masters_need_cpu_adam",
        ("precision=bf16", MASTERS),
        ("precision=bf16", MASTERS, "offload=cpu"),
        fails("Master weights feature requires ZeRO-2 Offload with DeepSpeedCPUAdam"),
    ),
    Proof(
        "reduced_masters_need_cpu_adam",
        ("zero=stage1", "precision=bf16", ACCUMULATE, MASTERS),
        ("zero=stage1", "precision=bf16", ACCUMULATE),
        same_losses,
    ),
    Proof(
        "reduced_moments_need_reduced_masters",
        ("precision=bf16", "deepspeed.bf16.bf16_optimizer_states=true"),
        ("precision=bf16", "deepspeed.bf16.bf16_optimizer_states=true", MASTERS),
        fails("requires bf16_master_weights_and_grads"),
    ),
    Proof(
        "summed_gradients_need_a_stage_below_3",
        ("zero=stage3", "deepspeed.gradient_allreduce_op=sum"),
        ("zero=stage2", "deepspeed.gradient_allreduce_op=sum"),
        fails("not supported with ZeRO stage 3"),
    ),
    Proof(
        "scaling_before_reduction_is_honoured",
        ("zero=stage2", "deepspeed.prescale_gradients=true"),
        ("zero=stage2", "deepspeed.prescale_gradients=true", PLAIN_REDUCTION),
        fails("pre-scale gradients is not yet supported"),
    ),
    Proof(
        "scaling_before_reduction_is_honoured",
        ("zero=stage3", "deepspeed.gradient_predivide_factor=4"),
        ("zero=stage3", "deepspeed.gradient_predivide_factor=4", PLAIN_REDUCTION),
        fails("gradient_predivide_factor != 1.0 is not yet supported"),
    ),
    Proof(
        "scaling_before_reduction_is_honoured",
        ("zero=stage3", PLAIN_REDUCTION, "deepspeed.gradient_predivide_factor=2"),
        ("zero=stage3", PLAIN_REDUCTION, "deepspeed.gradient_predivide_factor=4"),
        halved_gradients,
    ),
    Proof(
        "skipped_norm_needs_no_clipping",
        (f"{Z}.compute_grad_norm=false",),
        (f"{Z}.compute_grad_norm=false", "deepspeed.gradient_clipping=0"),
        fails("requires gradient_clipping=0"),
    ),
    Proof(
        "skipped_norm_needs_no_clipping",
        (f"{Z}.compute_grad_norm=false", "deepspeed.gradient_clipping=0", "offload=cpu"),
        ("deepspeed.gradient_clipping=0", "offload=cpu"),
        fails("does not support optimizer offload"),
    ),
    Proof(
        "skipped_norm_needs_no_clipping",
        (f"{Z}.compute_grad_norm=false", "deepspeed.gradient_clipping=0", "zero=stage3"),
        ("deepspeed.gradient_clipping=0", "zero=stage3"),
        fails("supported only with ZeRO Stage 1 or 2"),
    ),
    Proof("muon_is_not_clipped", ("optim=muon", "deepspeed.gradient_clipping=1"), ("optim=muon",), clipped_update),
    Proof(
        "optimizer_can_train_these_models",
        (UNTESTED, "deepspeed.optimizer.type=SparseAdam", "~deepspeed.optimizer.params.weight_decay"),
        (UNTESTED, "deepspeed.optimizer.type=Adamax"),
        fails("does not support dense gradients"),
    ),
    Proof(
        "untested_optimizer_is_opted_into",
        ("deepspeed.optimizer.type=NAdam",),
        ("deepspeed.optimizer.type=NAdam", UNTESTED),
        fails("untested ZeRO Optimizer"),
    ),
    Proof(
        "shaped_optimizer_needs_stage0",
        (*ADAFACTOR, "zero=stage3", UNTESTED),
        (*ADAFACTOR, "zero=stage0"),
        other_losses,
    ),
    Proof(
        "lion_on_cpu_needs_offload",
        ("optim=lion",),
        ("optim=lion", "offload=cpu"),
        fails("not been implemented on CPU"),
    ),
    Proof(
        "lamb_needs_cuda",
        ("zero=stage0", "deepspeed.optimizer.type=Lamb"),
        ("zero=stage0", "deepspeed.optimizer.type=Adam"),
        fails("not been implemented on CPU"),
    ),
    Proof(
        "muon_at_stage3_needs_plain_reduction",
        ("optim=muon", "zero=stage3"),
        ("optim=muon", "zero=stage3", PLAIN_REDUCTION),
        fails("Muon and reduce scatter cannot be used together"),
    ),
    Proof(
        "adagrad_at_stage3_needs_offload",
        ("optim=adagrad", "zero=stage3"),
        ("optim=adagrad", "zero=stage3", "offload=cpu"),
        fails("doesn't match the size of optimizer's group"),
        resumed=True,
    ),
    Proof(
        "warmup_fits_the_run",
        ("schedule=warmup_cosine", "run.steps=6", "deepspeed.scheduler.params.warmup_num_steps=90"),
        ("schedule=warmup_cosine", "run.steps=6", "deepspeed.scheduler.params.warmup_num_steps=2"),
        never_warm,
    ),
    Proof(
        "peak_learning_rate_is_said_once",
        ("schedule=warmup_decay", "run.steps=20", "deepspeed.scheduler.params.warmup_max_lr=0.1"),
        ("schedule=warmup_decay", "run.steps=20", "deepspeed.optimizer.params.lr=0.1"),
        forgotten_rate,
    ),
    Proof(
        "group_rates_need_a_relative_schedule",
        ("schedule=warmup_decay", "run.steps=20", SLOWER),
        ("schedule=warmup_cosine", "run.steps=20", SLOWER),
        one_rate_for_all,
        ask=("get_lr",),
    ),
    Proof(
        "muon_rates_need_a_relative_schedule",
        ("optim=muon", "schedule=warmup_decay", "run.steps=20", "deepspeed.optimizer.params.adam_lr=0.001"),
        ("optim=muon", "schedule=warmup_cosine", "run.steps=20", "deepspeed.optimizer.params.adam_lr=0.001"),
        one_rate_for_all,
        ask=("get_lr",),
    ),
]


@pytest.mark.parametrize("proof", PROOFS, ids=lambda proof: f"{proof.rule}: {' '.join(proof.refused)}")
def test_the_engine_shows_why_the_rule_refuses(proof: Proof, engines: Engines, tmp_path: Path) -> None:
    refused, accepted = (
        [word.replace("FOLDER", str(tmp_path)) for word in request(*words, base=proof.base)]
        for words in (proof.refused, proof.accepted)
    )
    assert broken_rules(*refused) == [*proof.also, proof.rule]
    plan = planned(*accepted)
    if (lacking := engines.lacks(plan)) is not None:
        pytest.skip(lacking)
    good = answer(engines, plan, proof, tmp_path / "accepted")
    assert "error" not in good, good["error"] + good["log"]
    assert good["ignored"] == []
    assert all(map(math.isfinite, good["losses"]))
    assert good["losses"][-1] < good["losses"][0]
    proof.check(answer(engines, unjudged(*refused), proof, tmp_path / "refused"), good)


def answer(engines: Engines, plan: Any, proof: Proof, folder: Path) -> Answer:
    """What the engine of `plan` does; for a proof about resuming, what a second one does with its checkpoint."""
    if not proof.resumed:
        return engines.run(plan, 6 if "scheduler" in plan.deepspeed else 3, ask=proof.ask)  # the first two have lr 0
    first = engines.run(plan, save=folder)
    assert "error" not in first, first
    return engines.run(plan, load=folder)


def test_every_rule_is_proven_or_says_why_not() -> None:
    proven, rules = {proof.rule for proof in PROOFS}, {rule.__name__ for rule in RULES}
    assert proven | NOT_PROVEN.keys() == rules
    assert not proven & NOT_PROVEN.keys()
