"""One refused request and its accepted neighbour for every rule, and the text of every refusal.

Run by pytest; golden/messages.txt holds the texts.
Must never leave a rule without a case.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from launcher.errors import format_problems
from launcher.rules import RULES
from tests.plan import goldens
from tests.plan.asking import broken_rules, planned, refused, refuses

HPZ_SIZE = "+deepspeed.zero_optimization.zero_hpz_partition_size"
WARMUP = "deepspeed.scheduler.params.warmup_num_steps"
RATIO = "deepspeed.zero_optimization.offload_optimizer.ratio"
SUPER = "deepspeed.zero_optimization.offload_optimizer.super_offload=true"
ZENFLOW = "deepspeed.zero_optimization.zenflow={topk_ratio: 0.1}"
ACCUMULATE = "deepspeed.data_types.grad_accum_dtype"
ALLGATHER = "deepspeed.zero_optimization.allgather_bucket_size"
MASTERS = "deepspeed.bf16.bf16_master_weights_and_grads"
PLAIN_REDUCTION = "deepspeed.zero_optimization.reduce_scatter=false"
SKIP_NORM = "deepspeed.zero_optimization.compute_grad_norm=false"
ADAFACTOR = (
    "deepspeed.optimizer.type=Adafactor",
    "~deepspeed.optimizer.params.betas",
    "~deepspeed.optimizer.params.eps",
)
LAMB = ("zero=stage0", "deepspeed.optimizer.type=Lamb")
DECAYED = "parameters.groups=[{max_dim: 1, weight_decay: 0.0}]"
SLOWER = 'parameters.groups=[{match: ["*embed*"], lr_scale: 0.1}]'
FINETUNE, BEGUN = ("recipe=finetune", "data=chat"), "model.init_from=/weights"
PACKED = (*FINETUNE, BEGUN, "model.attn_implementation=flash_attention_2")
NVME_PATH = "deepspeed.zero_optimization.offload_optimizer.nvme_path"


@dataclass(frozen=True)
class Case:
    """A rule, the least that breaks it and the least that mends it, on `hosts` of four GPUs or, for 0, here."""

    rule: str
    refused: tuple[str, ...]
    accepted: tuple[str, ...]
    hosts: int = 0
    ranks: int | None = None


CASES = [
    Case("mode_is_known", ("mode=dream",), ("mode=plan",)),
    Case("recipe_is_known", ("recipe.name=knit",), ("recipe.name=pretrain",)),
    Case("hardware_is_known_or_null", ("hardware.memory_bytes=0",), ("hardware.memory_bytes=24000000000",)),
    Case("hardware_is_known_or_null", ("hardware.file=/no/such.json",), ("hardware=h200",)),
    Case("launcher_is_known", ("cluster.launcher=telnet",), ("cluster.launcher=openmpi",), hosts=2),
    Case(
        "recipe_target_is_that_of_a_custom_recipe",
        ("recipe.target=tests.train.own_models.recipe",),
        ("recipe=custom", "recipe.target=tests.train.own_models.recipe"),
    ),
    Case(
        "recipe_target_is_that_of_a_custom_recipe",
        ("recipe.name=custom",),
        ("recipe.name=custom", "recipe.target=tests.train.own_models.recipe"),
    ),
    Case(
        "launcher_can_place_the_ranks",
        ("cluster.launcher=openmpi", 'cluster.exclude="beta:0"'),
        ("cluster.launcher=openmpi", 'cluster.exclude="beta:3"'),
        hosts=2,
        ranks=7,
    ),
    Case(
        "launcher_can_place_the_ranks",
        ("cluster.launcher=slurm", 'cluster.exclude="beta:3"'),
        ("cluster.launcher=slurm", 'cluster.exclude="beta"'),
        hosts=2,
        ranks=4,
    ),
    Case(
        "run_folder_survives_the_remote_shell",
        ("run.dir='/runs/50%n $(id)'",),
        ("run.dir='/runs/50 실험@x=1'",),
        hosts=2,
    ),
    Case("run_folder_survives_the_remote_shell", ("run.root='/a;b'",), ("run.root='/a;b'", "run.dir=/c"), hosts=2),
    Case("plan_format_is_known", ("plan.format=xml",), ("plan.format=json",)),
    Case("displays_need_their_mode", ("plan.compare=true",), ("plan.compare=true", "mode=plan")),
    Case("displays_need_their_mode", ("plan.scale=[2,4]",), ("plan.scale=[2,4]", "mode=plan")),
    Case("displays_need_their_mode", ("plan.html=/a/page.html",), ("plan.html=/a/page.html", "mode=plan")),
    Case("planned_amounts_are_positive", ("plan.scale=[0]", "mode=plan"), ("plan.scale=[1]", "mode=plan")),
    Case("planned_amounts_are_positive", ("plan.memory_bytes=0",), ("plan.memory_bytes=1",)),
    Case("checkpointing_is_chosen", ("activation.checkpointing=some",), ("activation.checkpointing=true",)),
    Case("check_format_is_known", ("check.format=xml",), ("check.format=json",)),
    Case("batch_job_needs_slurm", ("launch.submit=carrier",), ("launch.submit=none",)),
    Case("batch_job_needs_slurm", ("launch.nodes=2",), ("launch.nodes=null",)),
    Case("batch_job_needs_slurm", ("launch.sbatch=[x]",), ("launch.sbatch=[]",)),
    Case("no_secret_in_the_request", ("cluster.env.WANDB_API_KEY=x",), ("cluster.env.WANDB_MODE=offline",)),
    Case("counts_are_positive", ("watch.stall_s=0",), ("watch.stall_s=1",)),
    Case("counts_are_positive", ("watch.slow_factor=1",), ("watch.slow_factor=1.1",)),
    Case("counts_are_positive", ("cluster.restarts=-1",), ("cluster.restarts=1",)),
    Case("counts_are_positive", ("check.timeout_s=0",), ("check.timeout_s=1",)),
    Case("launcher_needs_hosts", ("cluster.launcher=slurm",), ("cluster.launcher=pdsh",)),
    Case("tracker_options_need_a_tracker", ("tracker.group=a",), ("tracker=wandb", "tracker.group=a")),
    Case("tracker_options_need_a_tracker", ("tracker.tags=[a]",), ("tracker=wandb", "tracker.tags=[a]")),
    Case("tracker_is_known", ("tracker.kind=pigeon",), ("tracker.kind=wandb",)),
    Case("counts_are_positive", ("train.sequence_length=1",), ("train.sequence_length=2",)),
    Case("counts_are_positive", ("eval.every=-1",), ("eval.every=0",)),
    Case("counts_are_positive", ("eval.samples=-1",), ("eval.samples=0",)),
    Case("counts_are_positive", ("eval.patience=-1",), ("eval.patience=0",)),
    Case("ema_decay_is_a_fraction", ("ema.decay=1.0",), ("ema.decay=0.999",)),
    Case("ema_needs_masters_in_memory", ("ema.decay=0.9", "optim=muon"), ("ema.decay=0.9", "optim=adam")),
    Case(
        "ema_needs_masters_in_memory",
        ("ema.decay=0.9", "precision=bf16", "zero=stage1", f"{ACCUMULATE}=fp32"),
        ("ema.decay=0.9", "precision=bf16", "zero=stage1", f"{ACCUMULATE}=bf16"),
    ),
    Case(
        "ema_needs_masters_in_memory",
        ("ema.decay=0.9", "zero=stage3", "offload=nvme", f"{NVME_PATH}=/tmp"),
        ("ema.decay=0.9", "zero=stage3", "offload=cpu"),
    ),
    Case("best_needs_evaluations", ("eval.patience=2", "eval.every=0"), ("eval.patience=2", "eval.every=5")),
    Case("best_needs_evaluations", ("checkpoint.best=true", "eval.samples=0"), ("checkpoint.best=true",)),
    Case("smallest_gain_is_a_gain", ("eval.min_delta=0.1",), ("eval.min_delta=0.1", "eval.patience=1")),
    Case("smallest_gain_is_a_gain", ("eval.min_delta=-0.1",), ("eval.min_delta=0.0",)),
    Case("counts_are_positive", ("checkpoint.every=-1",), ("checkpoint.every=0",)),
    Case("counts_are_positive", ("checkpoint.keep=-1",), ("checkpoint.keep=0",)),
    Case("counts_are_positive", ("checkpoint.keep_every=-1",), ("checkpoint.keep_every=0",)),
    Case("counts_are_positive", ("train.fallback_micro_batch_size=0",), ("train.fallback_micro_batch_size=1",)),
    Case("counts_are_positive", ("run.steps=0", "schedule=constant"), ("run.steps=1", "schedule=constant")),
    Case("numbers_are_finite", ("deepspeed.gradient_clipping=inf",), ("deepspeed.gradient_clipping=1e30",)),
    Case("numbers_are_finite", ("deepspeed.optimizer.params.betas=[0.9,nan]",), ("deepspeed.optimizer.params.eps=0",)),
    Case("export_is_sound", ("export.dtype=int3",), ("export.dtype=fp16",)),
    Case("export_is_sound", ("export.lora=loose",), ("export.lora=adapter",)),
    Case("export_is_sound", ("export.max_shard_bytes=0",), ("export.max_shard_bytes=1",)),
    Case("sequence_fits_the_model", ("train.sequence_length=2049",), ("train.sequence_length=2048",)),
    Case("sequence_fits_the_model", ("model=gpt2_small", "train.sequence_length=1025"), ("model=gpt2_small",)),
    Case(
        "model_shape_is_sound",
        ("model.config.num_attention_heads=6", "model.config.num_key_value_heads=6"),
        ("model.config.num_attention_heads=6", "model.config.num_key_value_heads=6", "model.config.head_dim=20"),
    ),
    Case("model_shape_is_sound", ("model.config.num_key_value_heads=3",), ("model.config.num_key_value_heads=2",)),
    Case("model_shape_is_sound", ("model.config.head_dim=31",), ("model.config.head_dim=30",)),
    Case(
        "model_shape_is_sound",
        ("model=gpt2_small", "model.config.n_head=10"),
        ("model=gpt2_small", "model.config.n_head=8"),
    ),
    Case(
        "sequence_fits_the_model",
        ("model.config.is_encoder_decoder=true", "train.sequence_length=4097"),
        ("model.config.is_encoder_decoder=true", "train.sequence_length=4096"),
    ),
    Case(
        "sequence_fits_the_model",
        ("model=gpt2_small", "train.sequence_length=1025"),
        ("model=gpt2_small", "model.config.model_type=t5", "train.sequence_length=1025"),
    ),
    Case(
        "objectives_are_those_of_an_own_module",
        ("train.objectives={ctr: 1.0}",),
        ("model=custom", "model.target=tests.train.own_models.NoLoss", "train.objectives={ctr: 1.0}"),
    ),
    Case(
        "own_module_has_no_hugging_face_options",
        ("model=custom", "model.target=tests.train.own_models.NoLoss", "model.attn_implementation=sdpa"),
        ("model=custom", "model.target=tests.train.own_models.NoLoss"),
    ),
    Case(
        "ranks_are_data_parallel",
        ("+deepspeed.tensor_parallel.autotp_size=2",),
        ("+deepspeed.tensor_parallel.autotp_size=1",),
    ),
    Case("ranks_are_data_parallel", ("+deepspeed.sequence_parallel_size=2",), ("+deepspeed.sequence_parallel_size=1",)),
    Case(
        "unreached_parts_are_not_asked_for",
        ("+deepspeed.compile.deepcompile=true",),
        ("+deepspeed.compile.deepcompile=false",),
    ),
    Case(
        "unreached_parts_are_not_asked_for",
        ("+deepspeed.activation_checkpointing.partition_activations=true",),
        ("+deepspeed.activation_checkpointing.partition_activations=false", "activation=full"),
    ),
    Case(
        "unreached_parts_are_not_asked_for",
        ("+deepspeed.managed_gradient_accumulation=false",),
        ("+deepspeed.managed_gradient_accumulation=true",),
    ),
    Case("stage_is_known", ("deepspeed.zero_optimization.stage=4",), ("deepspeed.zero_optimization.stage=3",)),
    Case("offload_optimizer_needs_a_stage", ("zero=stage0", "offload=cpu"), ("zero=stage1", "offload=cpu")),
    Case("offload_param_needs_stage3", ("zero=stage2", "offload=cpu_all"), ("zero=stage3", "offload=cpu_all")),
    Case(
        "nvme_needs_stage3",
        ("zero=stage2", "offload=nvme", f"{NVME_PATH}=/nvme"),
        ("zero=stage3", "offload=nvme", f"{NVME_PATH}=/nvme"),
    ),
    Case(
        "nvme_needs_a_path",
        ("zero=stage3", "offload=nvme", f"{NVME_PATH}=null"),
        ("zero=stage3", "offload=nvme", f"{NVME_PATH}=/nvme"),
    ),
    Case(
        "partial_offload_needs_cpu_adam_at_stage3",
        ("zero=stage2", "offload=cpu", f"{RATIO}=0.5"),
        ("zero=stage3", "offload=cpu", f"{RATIO}=0.5"),
    ),
    Case(
        "partial_offload_needs_cpu_adam_at_stage3",
        ("zero=stage3", "offload=cpu", f"{RATIO}=0.5", "optim=lion"),
        ("zero=stage3", "offload=cpu", f"{RATIO}=1.0", "optim=lion"),
    ),
    Case(
        "super_offload_needs_cuda_at_stage3",
        ("zero=stage2", "offload=cpu", SUPER),
        ("zero=stage3", "offload=cpu", SUPER),
        hosts=1,
    ),
    Case(
        "super_offload_needs_cuda_at_stage3",
        ("zero=stage3", "offload=cpu", SUPER, "cluster.accelerator=cpu"),
        ("zero=stage3", "offload=cpu", SUPER),
        hosts=1,
    ),
    Case("zenflow_changes_the_weights", ("zero=stage2", "offload=cpu", ZENFLOW), ("zero=stage2", "offload=cpu")),
    Case("zeropp_needs_stage3", ("zero=stage2", "zeropp=hpz"), ("zero=stage3", "zeropp=hpz"), hosts=2),
    Case("zeropp_needs_stage3", ("zero=stage2", "zeropp=hpz"), ("zero=stage3", "zeropp=hpz")),
    Case("zeropp_needs_stage3", ("zero=stage2", "zeropp=qwz"), ("zero=stage3", "zeropp=qwz"), hosts=2),
    Case("zeropp_needs_stage3", ("zero=stage2", "zeropp=full"), ("zero=stage3", "zeropp=full"), hosts=2),
    Case(
        "quantised_zeropp_needs_cuda",
        ("zero=stage3", "zeropp=qwz", "cluster.accelerator=cpu"),
        ("zero=stage3", "zeropp=qwz"),
        hosts=2,
    ),
    Case("quantised_gradients_need_hosts", ("zero=stage3", "zeropp=qgz"), ("zero=stage3", "zeropp=qwz"), hosts=1),
    Case("hpz_divides_the_world", ("zero=stage3", f"{HPZ_SIZE}=3"), ("zero=stage3", f"{HPZ_SIZE}=2"), hosts=2),
    Case("hpz_groups_lie_within_a_host", ("zero=stage3", f"{HPZ_SIZE}=8"), ("zero=stage3", f"{HPZ_SIZE}=4"), hosts=2),
    Case(
        "keys_belong_to_the_stage",
        ("zero=stage2", "+deepspeed.zero_optimization.stage3_max_live_parameters=5"),
        ("zero=stage3", "+deepspeed.zero_optimization.stage3_max_live_parameters=5"),
    ),
    Case(
        "keys_belong_to_the_stage",
        ("zero=stage3", "+deepspeed.zero_optimization.round_robin_gradients=true"),
        ("zero=stage2", "+deepspeed.zero_optimization.round_robin_gradients=true"),
    ),
    Case(
        "keys_belong_to_the_stage",
        ("zero=stage0", "+deepspeed.zero_optimization.reduce_bucket_size=5"),
        ("zero=stage0", "+deepspeed.zero_optimization.reduce_bucket_size=500000000"),
    ),
    Case(
        "keys_belong_to_the_stage",
        ("zero=stage1", "precision=bf16", f"{ACCUMULATE}=fp32", "+deepspeed.zero_optimization.reduce_bucket_size=5"),
        ("zero=stage2", "precision=bf16", f"{ACCUMULATE}=fp32", "+deepspeed.zero_optimization.reduce_bucket_size=5"),
    ),
    Case("allgather_bucket_is_even", ("zero=stage1", f"{ALLGATHER}=101"), ("zero=stage1", f"{ALLGATHER}=102")),
    Case(
        "elastic_checkpoint_cannot_be_loaded",
        ("+deepspeed.zero_optimization.elastic_checkpoint=true",),
        ("+deepspeed.zero_optimization.elastic_checkpoint=false",),
    ),
    Case(
        "one_reduced_precision",
        ("precision=bf16", "+deepspeed.fp16.enabled=true"),
        ("precision=bf16", "+deepspeed.fp16.enabled=false"),
    ),
    # deepspeedai/DeepSpeed#7786: neither is the optimizer's state in the checkpoint of such a run.
    Case(
        "stage0_reduced_precision_decays_at_start",
        ("zero=stage0", "precision=bf16"),
        ("zero=stage1", "precision=bf16"),
    ),
    Case(
        "accumulation_type_needs_a_stage",
        ("zero=stage0", f"{ACCUMULATE}=bf16"),
        ("zero=stage1", f"{ACCUMULATE}=bf16"),
    ),
    Case(
        "parameter_type_is_the_precision",
        ("precision=bf16", "+deepspeed.data_types.param_dtype=fp32"),
        ("precision=bf16", "+deepspeed.data_types.param_dtype=torch.bfloat16"),
    ),
    Case(
        "reduced_masters_need_cpu_adam",
        ("precision=bf16", f"{MASTERS}=true"),
        ("precision=bf16", f"{MASTERS}=true", "offload=cpu"),
    ),
    Case(
        "reduced_masters_need_cpu_adam",
        ("precision=fp16", "offload=cpu", "optim=lion", "+deepspeed.fp16.fp16_master_weights_and_grads=true"),
        ("precision=fp16", "offload=cpu", "optim=adam", "+deepspeed.fp16.fp16_master_weights_and_grads=true"),
    ),
    Case(
        "reduced_moments_need_reduced_masters",
        ("precision=bf16", "+deepspeed.bf16.bf16_optimizer_states=true"),
        ("precision=bf16", "+deepspeed.bf16.bf16_optimizer_states=true", f"{MASTERS}=true"),
    ),
    Case(
        "summed_gradients_need_a_stage_below_3",
        ("zero=stage3", "+deepspeed.gradient_allreduce_op=sum"),
        ("zero=stage2", "+deepspeed.gradient_allreduce_op=sum"),
    ),
    Case(
        "scaling_before_reduction_is_honoured",
        ("zero=stage2", "+deepspeed.prescale_gradients=true"),
        ("zero=stage1", "+deepspeed.prescale_gradients=true"),
    ),
    Case(
        "scaling_before_reduction_is_honoured",
        ("zero=stage3", PLAIN_REDUCTION, "+deepspeed.gradient_predivide_factor=2"),
        ("zero=stage3", PLAIN_REDUCTION, "+deepspeed.gradient_predivide_factor=4"),
    ),
    Case(
        "scaling_before_reduction_is_honoured",
        ("zero=stage1", "+deepspeed.prescale_gradients=true", "+deepspeed.gradient_predivide_factor=4"),
        ("zero=stage1", "+deepspeed.gradient_predivide_factor=4"),
    ),
    Case(
        "skipped_norm_needs_no_clipping",
        (SKIP_NORM,),
        (SKIP_NORM, "deepspeed.gradient_clipping=0"),
    ),
    Case(
        "skipped_norm_needs_no_clipping",
        (SKIP_NORM, "deepspeed.gradient_clipping=0", "offload=cpu"),
        (SKIP_NORM, "deepspeed.gradient_clipping=0", "zero=stage1"),
    ),
    Case(
        "muon_is_not_clipped",
        ("optim=muon", "deepspeed.gradient_clipping=1"),
        ("optim=muon",),
    ),
    Case(
        "optimizer_can_train_these_models", ("deepspeed.optimizer.type=MuAdamW",), ("deepspeed.optimizer.type=AdamW",)
    ),
    Case(
        "untested_optimizer_is_opted_into",
        ("deepspeed.optimizer.type=NAdam",),
        ("deepspeed.optimizer.type=NAdam", "+deepspeed.zero_allow_untested_optimizer=true"),
    ),
    Case(
        "shaped_optimizer_needs_stage0",
        (*ADAFACTOR, "zero=stage2", "+deepspeed.zero_allow_untested_optimizer=true"),
        (*ADAFACTOR, "zero=stage0"),
    ),
    Case("lamb_needs_cuda", (*LAMB, "cluster.accelerator=cpu"), LAMB, hosts=1),
    Case("lion_on_cpu_needs_offload", ("optim=lion",), ("optim=lion", "offload=cpu")),
    Case(
        "muon_at_stage3_needs_plain_reduction",
        ("optim=muon", "zero=stage3"),
        ("optim=muon", "zero=stage3", "+deepspeed.zero_optimization.reduce_scatter=false"),
    ),
    Case(
        "adagrad_at_stage3_needs_offload",
        ("optim=adagrad", "zero=stage3"),
        ("optim=adagrad", "zero=stage3", "offload=cpu"),
    ),
    Case("warmup_fits_the_run", (f"{WARMUP}=201",), (f"{WARMUP}=200",)),
    Case(
        "peak_learning_rate_is_said_once",
        ("schedule=warmup_decay", "deepspeed.scheduler.params.warmup_max_lr=0.1"),
        ("schedule=warmup_decay", "deepspeed.optimizer.params.lr=0.1"),
    ),
    Case("parameter_groups_are_sound", ("parameters.groups=[{weight_decay: 0.0}]",), (DECAYED,)),
    Case("parameter_groups_are_sound", ("parameters.groups=[{max_dim: 1}]",), (DECAYED,)),
    Case("parameter_groups_are_sound", ("parameters.groups=[{max_dim: 1, weight_decy: 0.0}]",), (DECAYED,)),
    Case("parameter_groups_are_sound", ("parameters.groups=[{max_dim: one, weight_decay: 0.0}]",), (DECAYED,)),
    Case("parameter_groups_are_sound", ("parameters.groups=[{max_dim: 1, weight_decay: -0.1}]",), (DECAYED,)),
    Case("parameter_groups_are_sound", ("parameters.groups=[{match: '*embed*', lr_scale: 0.1}]",), (SLOWER,)),
    Case("parameter_groups_are_sound", (SLOWER, "~deepspeed.optimizer.params.lr", "schedule=constant"), (SLOWER,)),
    Case("group_rates_need_a_relative_schedule", (SLOWER, "schedule=warmup_decay"), (SLOWER, "schedule=warmup_cosine")),
    Case("audit_is_known", ("audit.mode=deep",), ("audit.mode=off",)),
    Case("audit_watches_steps", ("audit.steps=0",), ("audit.steps=1",)),
    Case("strict_audit_needs_stage3", ("audit=strict", "zero=stage2"), ("audit=strict", "zero=stage3")),
    Case("audit_path_needs_its_mode", ("audit.path=/src",), ("audit.path=null",)),
    Case("finetuning_begins_with_weights", FINETUNE, (*FINETUNE, BEGUN)),
    Case("conversations_are_finetuned", ("data=chat",), ("data=stdlib",)),
    Case("conversations_are_finetuned", ("recipe=finetune", BEGUN), (*FINETUNE, BEGUN)),
    Case(
        "finetuned_models_go_on_in_one_sequence",
        (*FINETUNE, BEGUN, "model.config.is_encoder_decoder=true"),
        (*FINETUNE, BEGUN, "model.config.is_encoder_decoder=false"),
    ),
    Case("packs_are_kept_apart", (*PACKED, "train.micro_batch_size=2"), (*PACKED, "train.micro_batch_size=1")),
    Case("packs_are_kept_apart", PACKED, (*PACKED, "data.packing=false")),
    Case("generation_needs_prompts", ("eval.generate=1",), (*FINETUNE, BEGUN, "eval.generate=1")),
    Case("generation_needs_prompts", ("eval.generate=-1",), ("eval.generate=0",)),
    Case("generation_needs_prompts", ("eval.max_new_tokens=0",), ("eval.max_new_tokens=1",)),
    Case("peft_is_known", ("peft.kind=ladder",), ("peft.kind=none",)),
    Case("peft_options_need_lora", ("peft.rank=8",), ("peft=lora", "peft.rank=8")),
    Case("peft_options_need_lora", ("peft.target=[q_proj]",), ("peft=lora", "peft.target=[q_proj]")),
    Case("lora_is_sound", ("peft=lora", "peft.rank=0"), ("peft=lora", "peft.rank=1")),
    Case("lora_is_sound", ("peft=lora", "peft.alpha=0"), ("peft=lora", "peft.alpha=1")),
    Case("lora_is_sound", ("peft=lora", "peft.dropout=1.0"), ("peft=lora", "peft.dropout=0.9")),
    Case("lora_is_sound", ("peft=lora", "peft.target=[]"), ("peft=lora", "peft.target=[all-linear]")),
    Case(
        "lora_is_sound",
        ("peft=lora", "peft.target=[all-linear,q_proj]"),
        ("peft=lora", "peft.target=[q_proj]"),
    ),
    Case(
        "muon_rates_need_a_relative_schedule",
        ("optim=muon", "schedule=warmup_decay", "deepspeed.optimizer.params.adam_lr=0.001"),
        ("optim=muon", "schedule=warmup_cosine", "deepspeed.optimizer.params.adam_lr=0.001"),
    ),
]


@pytest.fixture
def place(one_host: tuple[str, ...], two_hosts: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The cluster overrides of 0 (this machine), 1 and 2 hosts."""
    return [(), one_host, two_hosts]


def ids(case: Case) -> str:
    return f"{case.rule}: {' '.join(case.refused)}"


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_rule_and_no_other_refuses(case: Case, place: list[tuple[str, ...]]) -> None:
    request = (*place[case.hosts], *case.refused)
    assert broken_rules(*request) == [case.rule]
    assert len(refused(*request)) == 1


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_neighbouring_request_is_accepted(case: Case, place: list[tuple[str, ...]]) -> None:
    assert planned(*place[case.hosts], *case.accepted).world_size == (case.ranks or (2, 4, 8)[case.hosts])


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in CASES} == {rule.__name__ for rule in RULES}
    assert len(RULES) == len(set(RULES))


def test_refusals_say_what_is_committed(place: list[tuple[str, ...]]) -> None:
    texts = [
        format_problems(refused(*place[case.hosts], *case.refused), f"{case.rule}: {' '.join(case.refused)}")
        for case in CASES
    ]
    goldens.compare("messages.txt", "\n".join(texts) + "\n")


# --- refusals that are not in RULES ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("train_batch_size", "train.global_batch_size"),
        ("train_micro_batch_size_per_gpu", "train.micro_batch_size"),
        ("gradient_accumulation_steps", "train.gradient_accumulation_steps"),
    ],
)
def test_the_batch_has_one_owner(key: str, option: str) -> None:
    [problem] = refused(f"+deepspeed.{key}=4")
    assert (problem.where, problem.got, problem.why) == (f"deepspeed.{key}", "4", "the batch has one owner")
    assert problem.fix == f"use {option}"


def test_hpz_on_unequal_hosts_is_refused_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("hosts") / "uneven"
    path.write_text("alpha slots=2\nbeta slots=4\n")
    [problem] = refused("zero=stage3", "zeropp=hpz", "cluster=hostfile", f"cluster.hostfile={path}")
    assert problem.got == "hpz on alpha (2 slots), beta (4 slots)"
    assert problem.why == "hpZ keeps one copy per host, so every host needs as many slots"


def test_a_batch_problem_does_not_judge_a_warm_up_that_is_still_to_be_solved() -> None:
    [problem] = refused("train.global_batch_size=3", "+deepspeed.scheduler.params.total_num_steps=50")
    assert problem.where == "train.global_batch_size"


def test_several_rules_are_reported_together() -> None:
    problems = refused("mode=dream", "export.dtype=int3", "run.steps=0", "zero=stage0", "offload=cpu_all")
    assert [problem.where for problem in problems] == [
        "mode",
        "run.steps",
        "export.dtype",
        "offload",
        "offload",
        "deepspeed.scheduler.params.warmup_num_steps",
    ]


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("cluster.hostfile=hosts", "cluster.hostfile"),
        ("cluster.include=alpha", "cluster.include"),
        ("cluster.exclude=alpha", "cluster.exclude"),
        ("cluster.master_addr=10.0.0.1", "cluster.master_addr"),
        ("cluster.launcher_args=-v", "cluster.launcher_args"),
        ("cluster.ssh_port=2222", "cluster.ssh_port"),
    ],
)
def test_an_option_for_several_hosts_is_refused_on_this_machine_alone(override: str, where: str) -> None:
    [problem] = refused(override)
    assert problem.where == where
    assert (problem.why, problem.fix) == ("it only applies to several hosts", "remove it or use cluster=hostfile")


@pytest.mark.parametrize("count", [0, -2])
def test_a_run_without_processes_is_refused(count: int) -> None:
    with refuses("cluster.num_procs", str(count), "a run needs a process"):
        planned(f"cluster.num_procs={count}")


@pytest.mark.parametrize("hosts", [0, 2])
def test_an_unknown_accelerator_is_refused_everywhere(hosts: int, place: list[tuple[str, ...]]) -> None:
    with refuses("cluster.accelerator", "abacus", "not an accelerator", "use auto, cpu or cuda"):
        planned(*place[hosts], "cluster.accelerator=abacus")


def test_an_unknown_kind_of_cluster_is_refused() -> None:
    with refuses("cluster.kind", "moon", "use cluster=local, hostfile or slurm"):
        planned("cluster.kind=moon")
