"""Every cross-field rule: (RunConfig, Cluster, DeepSpeed dict) -> Problem, a list of them, or None.

Called when a plan is built, all of them, so that every problem is reported at once. They live in rules_*.py by subject.
Must never warn: what cannot be honoured is refused with its fix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from launcher import (
    rules_audit,
    rules_finetune,
    rules_hardware,
    rules_keep,
    rules_model,
    rules_optimizer,
    rules_parameters,
    rules_peft,
    rules_plan,
    rules_precision,
    rules_request,
    rules_zero,
    rules_zeropp,
)
from launcher.cluster.value import Cluster
from launcher.errors import Problem
from launcher.schema import RunConfig

Rule = Callable[[RunConfig, Cluster, dict[str, Any]], Problem | list[Problem] | None]


def judge(config: RunConfig, cluster: Cluster, deepspeed: dict[str, Any]) -> list[Problem]:
    """Every rule's problems, in the order of RULES."""
    problems: list[Problem] = []
    for rule in RULES:
        found = rule(config, cluster, deepspeed)
        problems += found if isinstance(found, list) else [found] if found is not None else []
    return problems


RULES: tuple[Rule, ...] = (
    rules_request.mode_is_known,
    rules_request.recipe_is_known,
    rules_request.recipe_target_is_that_of_a_custom_recipe,
    rules_request.launcher_is_known,
    rules_request.launcher_needs_hosts,
    rules_request.launcher_can_place_the_ranks,
    rules_request.run_folder_survives_the_remote_shell,
    rules_request.plan_format_is_known,
    rules_plan.displays_need_their_mode,
    rules_plan.planned_amounts_are_positive,
    rules_plan.checkpointing_is_chosen,
    rules_request.check_format_is_known,
    rules_request.batch_job_needs_slurm,
    rules_request.no_secret_in_the_request,
    rules_request.tracker_is_known,
    rules_request.tracker_options_need_a_tracker,
    rules_request.counts_are_positive,
    rules_request.numbers_are_finite,
    rules_request.export_is_sound,
    rules_model.objectives_are_those_of_an_own_module,
    rules_model.sequence_fits_the_model,
    rules_model.model_shape_is_sound,
    rules_model.own_module_has_no_hugging_face_options,
    rules_model.ranks_are_data_parallel,
    rules_model.unreached_parts_are_not_asked_for,
    rules_finetune.finetuning_begins_with_weights,
    rules_finetune.conversations_are_finetuned,
    rules_finetune.finetuned_models_go_on_in_one_sequence,
    rules_finetune.packs_are_kept_apart,
    rules_finetune.generation_needs_prompts,
    rules_hardware.hardware_is_known_or_null,
    rules_keep.ema_decay_is_a_fraction,
    rules_keep.ema_needs_masters_in_memory,
    rules_keep.best_needs_evaluations,
    rules_keep.smallest_gain_is_a_gain,
    rules_parameters.parameter_groups_are_sound,
    rules_parameters.group_rates_need_a_relative_schedule,
    rules_peft.peft_is_known,
    rules_peft.peft_options_need_lora,
    rules_peft.lora_is_sound,
    rules_audit.audit_is_known,
    rules_audit.audit_watches_steps,
    rules_audit.strict_audit_needs_stage3,
    rules_audit.audit_path_needs_its_mode,
    rules_zero.stage_is_known,
    rules_zero.offload_optimizer_needs_a_stage,
    rules_zero.offload_param_needs_stage3,
    rules_zero.nvme_needs_stage3,
    rules_zero.nvme_needs_a_path,
    rules_zero.partial_offload_needs_cpu_adam_at_stage3,
    rules_zero.super_offload_needs_cuda_at_stage3,
    rules_zero.zenflow_changes_the_weights,
    rules_zeropp.zeropp_needs_stage3,
    rules_zeropp.quantised_zeropp_needs_cuda,
    rules_zeropp.quantised_gradients_need_hosts,
    rules_zeropp.hpz_divides_the_world,
    rules_zeropp.hpz_groups_lie_within_a_host,
    rules_zero.keys_belong_to_the_stage,
    rules_zero.allgather_bucket_is_even,
    rules_zero.elastic_checkpoint_cannot_be_loaded,
    rules_precision.one_reduced_precision,
    rules_precision.stage0_reduced_precision_decays_at_start,
    rules_precision.accumulation_type_needs_a_stage,
    rules_precision.parameter_type_is_the_precision,
    rules_precision.reduced_masters_need_cpu_adam,
    rules_precision.reduced_moments_need_reduced_masters,
    rules_precision.summed_gradients_need_a_stage_below_3,
    rules_precision.scaling_before_reduction_is_honoured,
    rules_precision.skipped_norm_needs_no_clipping,
    rules_precision.muon_is_not_clipped,
    rules_optimizer.optimizer_can_train_these_models,
    rules_optimizer.untested_optimizer_is_opted_into,
    rules_optimizer.shaped_optimizer_needs_stage0,
    rules_optimizer.lion_on_cpu_needs_offload,
    rules_optimizer.lamb_needs_cuda,
    rules_optimizer.muon_at_stage3_needs_plain_reduction,
    rules_optimizer.adagrad_at_stage3_needs_offload,
    rules_optimizer.warmup_fits_the_run,
    rules_optimizer.peak_learning_rate_is_said_once,
    rules_optimizer.muon_rates_need_a_relative_schedule,
)
