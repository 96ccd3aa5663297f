"""What DeepSpeed's source does not say in a form a program can read: types, units, legal words, old names.

Read by scripts/make_ds_schema.py, which checks every entry against the installed source and stops at one that is stale.
Must never repeat what a pydantic model, a signature or a default already says.
"""

from __future__ import annotations

# --- entry points that read parts of the configuration later than DeepSpeedConfig does -------------------------------
# (module, class or None, function, parameter or "self.attribute", block)
READERS = (
    ("deepspeed.compile.custom_ops.sp_dp_registry", None, "extract_mesh_size", "param_dict", ""),
    (
        "deepspeed.module_inject.autotp_config",
        "AutoTPConfig",
        "from_dict",
        "config_dict",
        "tensor_parallel.partition_config",
    ),
    (
        "deepspeed.runtime.data_pipeline.data_routing.scheduler",
        "RandomLTDScheduler",
        "__init__",
        "config",
        "data_efficiency.data_routing.random_ltd",
    ),
    (
        "deepspeed.runtime.data_pipeline.data_routing.basic_layer",
        "RandomLayerTokenDrop",
        "init_config",
        "config",
        "data_efficiency.data_routing.random_ltd",
    ),
    (
        "deepspeed.runtime.data_pipeline.curriculum_scheduler",
        "CurriculumScheduler",
        "__init__",
        "config",
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*",
    ),
    (
        "deepspeed.inference.quantization.utils",
        "Quantizer",
        "quantize",
        "self.config",
        "weight_quantization.quantized_initialization",
    ),
    (
        "deepspeed.inference.quantization.utils",
        "Quantizer",
        "_quantize_int8",
        "self.config",
        "weight_quantization.quantized_initialization",
    ),
)

# Reads whose key the follower cannot see, and why nothing is lost.
OPAQUE = {
    "_reject_removed_config_keys: top level": "the table of removed keys, taken whole",
    "_reject_removed_config_keys: zero_optimization": "the table of removed keys, taken whole",
    "get_curriculum_learning: data_efficiency.data_sampling.curriculum_learning": "copied; its readers are in EXTRA",
    "get_model_info_config: autotuning.model_info": "the keys of MODEL_INFO_KEY_DEFAULT_DICT, in EXTRA",
    "get_monitor_config: top level": "the fields of DeepSpeedMonitorConfig, taken whole",
    "get_pipeline_config: pipeline": "copied over a table of defaults; its readers are in EXTRA",
    "get_random_ltd: data_efficiency.data_routing.random_ltd": "copied; its readers are in READERS and EXTRA",
}

# Read from the dictionary, but not for the user to write.
SET_BY_DEEPSPEED = {
    "data_efficiency.data_routing.random_ltd.global_batch_size": "the engine sets it from train_batch_size",
    "data_efficiency.data_routing.random_ltd.micro_batch_size": "the engine sets it from the micro-batch",
}

# --- keys no follower finds: block -> (module they occur in, {key: type}) --------------------------------------------
# Types: int float bool str null object list[...], `?` null too, `!` required, `= default`.
_CURRICULUM = "data_efficiency.data_sampling.curriculum_learning"
_METRIC = f"{_CURRICULUM}.curriculum_metrics.*"
_LTD = "data_efficiency.data_routing.random_ltd"
_QUANTISER = {"num_bits": "int!", "group_size": "int!", "group_dim": "int!", "symmetric": "bool!"}
EXTRA: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "pipeline",
        "deepspeed.runtime.config",
        {
            "stages": 'int = "auto"',
            "partition": 'str = "best"',
            "seed_layers": "bool = false",
            "activation_checkpoint_interval": "int = 0",
            "pipe_partitioned": "bool = true",
            "grad_partitioned": "bool = true",
        },
    ),
    ("pipeline", "deepspeed.runtime.pipe.engine", {"use_reentrant": "bool? = null"}),
    (
        "autotuning.model_info",
        "deepspeed.autotuning.constants",
        {"profile": "bool = false", "num_params": "int?", "hidden_size": "int?", "num_layers": "int?"},
    ),
    (_CURRICULUM, "deepspeed.runtime.data_pipeline.data_sampling.data_sampler", {"data_cluster_path": "str"}),
    (
        _METRIC,
        "deepspeed.runtime.data_pipeline.data_sampling.data_sampler",
        {
            "difficulty_type": "str!",
            "clustering_type": "str!",
            "index_to_sample_path": "str",
            "index_to_metric_path": "str",
        },
    ),
    (
        f"{_METRIC}.schedule_config[fixed_discrete]",
        "deepspeed.runtime.data_pipeline.curriculum_scheduler",
        {"difficulty": "list[int]!", "max_step": "list[int]!"},
    ),
    (
        f"{_METRIC}.schedule_config[fixed_root]",
        "deepspeed.runtime.data_pipeline.curriculum_scheduler",
        {"total_curriculum_step": "int!", "difficulty_step": "int!", "root_degree": "int!"},
    ),
    (
        f"{_METRIC}.schedule_config[fixed_linear]",
        "deepspeed.runtime.data_pipeline.curriculum_scheduler",
        {"total_curriculum_step": "int!", "difficulty_step": "int!"},
    ),
    (
        "data_efficiency.data_sampling.dynamic_batching",
        "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr",
        {"metrics_path": "str"},
    ),
    (_LTD, "deepspeed.runtime.engine", {"random_ltd_layer_id": "list[int]!"}),
    (
        f"{_LTD}.random_ltd_schedule",
        "deepspeed.runtime.data_pipeline.data_routing.scheduler",
        {"schedule_type": "str!", "min_value": "int!", "max_value": "int!"},
    ),
    (
        f"{_LTD}.random_ltd_schedule.schedule_config",
        "deepspeed.runtime.data_pipeline.data_routing.scheduler",
        {"require_steps": "int!", "seq_per_step": "int!"},
    ),
    (
        f"{_LTD}.layer_token_lr_schedule",
        "deepspeed.runtime.data_pipeline.constants",
        {"enabled": "bool = false", "total_layer_tokens": "int", "warmup_type": "str", "warmup_layer_tokens": "int"},
    ),
    ("weight_quantization.quantized_initialization", "deepspeed.inference.quantization.utils", _QUANTISER),
    ("weight_quantization.post_init_quant.*", "deepspeed.inference.quantization.utils", _QUANTISER),
)

# --- types of what is read with no default, or with one that does not show the type ----------------------------------
TYPES = {
    "activation_checkpointing.number_checkpoints": "int?",
    "aio": "object?",
    "autotuning.arg_mappings": "object?",
    "autotuning.max_train_batch_size": "int?",
    "autotuning.metric_path": "str?",
    "autotuning.model_info": "object?",
    "autotuning.model_info_path": "str?",
    "checkpoint.writer": "object?",
    "checkpoint.writer.data_parallel": "str?",
    "comms_logger.prof_ops": "list[str]",
    "communication_data_type": "str?",
    f"{_CURRICULUM}.curriculum_metrics": "object",
    f"{_METRIC}.max_difficulty": "int!",
    f"{_METRIC}.min_difficulty": "int!",
    f"{_METRIC}.schedule_config": "object",
    f"{_METRIC}.schedule_type": "str!",
    "data_efficiency.data_sampling.dynamic_batching.max_batch_size": "int",
    "data_efficiency.data_sampling.dynamic_batching.max_tokens": "int",
    f"{_LTD}.hidden_state_order": "str!",
    f"{_LTD}.model_mask_name": "str?!",
    f"{_LTD}.model_type": "str!",
    f"{_LTD}.random_ltd_layer_num": "int!",
    f"{_LTD}.total_layer_num": "int!",
    "data_parallel_size": "int",
    "data_types.buffer_dtype": "str?",
    "data_types.grad_accum_dtype": "str?",
    "data_types.keep_in_fp32_modules": "list[str]",
    "data_types.param_dtype": "str?",
    "datastates_ckpt": "object",
    "expert_parallel.expert_w3": "str?",
    "expert_parallel.load_balance_coeff": "null",
    "flops_profiler.output_file": "str?",
    "gradient_accumulation_steps": "int?",
    "log_level": "str?",
    "optimizer.legacy_fusion": "bool = false",
    "optimizer.params": "object",
    "optimizer.type": "str!",
    "scheduler.params": "object!",
    "scheduler.type": "str!",
    "seq_parallel_communication_data_type": "str?",
    "sequence_parallel_size": "int",
    "steps_per_print": "int?",
    "tensor_parallel.injection_policy_tuple": "list[str]?",
    "tensor_parallel.partition_config": "object?",
    "tensor_parallel.partition_config.layer_specs[].model_types": "list[str]?",
    "tensor_parallel.partition_config.layer_specs[].partition_dim": "int?",
    "tensor_parallel.partition_config.layer_specs[].patterns": "list[str]!",
    "tensor_parallel.partition_config.layer_specs[].shape": "list?",
    "tensor_parallel.partition_config.layer_specs": "list[object]",
    "torch_autocast.dtype": "str",
    "torch_autocast.lower_precision_safe_modules": "list[str]",
    "train_batch_size": "int?",
    "train_micro_batch_size_per_gpu": "int?",
    "vocabulary_size": "int?",
    "weight_quantization.quantized_initialization": "object",
    "weight_quantization.post_init_quant": "object",
    "zero_optimization.zenflow.select_interval": "int",
    "zero_optimization.zenflow.update_interval": "int",
    "expert_parallel.top_k": "int",
    "expert_parallel.routed_scaling_factor": "float",
}

# The same for parameters of optimizers and schedulers whose signatures carry no annotation, by name.
PARAMETER_TYPES = {
    "cycle_first_stair_count": "int",
    "cycle_max_lr": "float",
    "cycle_min_lr": "float",
    "cycle_second_stair_count": "int?",
    "cycle_second_step_size": "int?",
    "weight_decay": "float",
}
# deepspeed/runtime/lr_schedules.py `_format_param`: a number for all parameter groups, or one for each.
PER_GROUP = (
    "cycle_max_lr",
    "cycle_max_mom",
    "cycle_min_lr",
    "cycle_min_mom",
    "lr_range_test_min_lr",
    "warmup_max_lr",
    "warmup_min_lr",
)

# --- blocks whose keys are the user's own ----------------------------------------------------------------------------
OPEN = {
    "autotuning.arg_mappings": "maps names of the user's own script's arguments",
    "datastates_ckpt": "read by the external package datastates, which is not part of DeepSpeed",
}
# The keys are free, what lies under each is not.
FREE_KEYS = {
    f"{_CURRICULUM}.curriculum_metrics": "a key is the name of a metric",
    "weight_quantization.post_init_quant": "a key is a part of a module's name",
}
# Block -> its sibling that chooses which keys it has.
CHOSEN_BY = {
    "optimizer.params": "type",
    "scheduler.params": "type",
    f"{_METRIC}.schedule_config": "schedule_type",
}
# schedule_type=custom takes a function set in code and reads no schedule_config.
EMPTY_VARIANTS = (f"{_METRIC}.schedule_config[custom]",)

# --- legal words -----------------------------------------------------------------------------------------------------
_DTYPES = "deepspeed.runtime.config:DtypeEnum"  # module:name of what holds the words
_PARTITION = "deepspeed.module_inject.autotp_config:PartitionType"
VALUES: dict[str, tuple[object, ...]] = {
    f"{_METRIC}.clustering_type": ("single_cluster", "schedule_based"),
    f"{_METRIC}.difficulty_type": ("value", "percentile"),
    f"{_METRIC}.schedule_type": ("fixed_discrete", "fixed_root", "fixed_linear", "custom"),
    f"{_LTD}.hidden_state_order": ("batch_seq_dim", "seq_batch_dim"),
    f"{_LTD}.layer_token_lr_schedule.enabled": (False,),
    f"{_LTD}.model_type": ("encoder", "decoder"),
    f"{_LTD}.random_ltd_schedule.schedule_type": ("fixed_linear",),
    "autotuning.metric": ("throughput", "latency", "flops"),
    "autotuning.tuner_type": ("gridsearch", "random", "model_based"),
    "comet.mode": ("get", "create", "get_or_create"),
    "data_efficiency.data_sampling.dynamic_batching.sequence_picking_order": ("random", "seqlen", "dataloader"),
    "optimizer.params[adamw].adam_w_mode": (True,),
    "weight_quantization.quantized_initialization.num_bits": (4, 8),
    "weight_quantization.quantized_initialization.symmetric": (False,),
    "weight_quantization.post_init_quant.*.num_bits": (4, 8),
    "weight_quantization.post_init_quant.*.symmetric": (False,),
    "zero_optimization.legacy_stage1": (False,),
    "zero_optimization.zenflow.select_strategy": ("auto", "step", "epoch"),
}
ANY_CASE: dict[str, tuple[str, ...] | str] = {
    "checkpoint.tag_validation": "deepspeed.runtime.constants:CHECKPOINT_TAG_VALIDATION_MODES",
    "checkpoint.writer.data_parallel": "deepspeed.runtime.model_checkpointing.constants:CHECKPOINT_DATA_PARALLEL_UNITS",
    "checkpoint.writer.type": "deepspeed.runtime.model_checkpointing.constants:CHECKPOINT_WRITER_TYPES",
    "communication_data_type": ("fp32", "fp16", "bf16"),
    "data_efficiency.data_sampling.dynamic_batching.lr_scaling_method": ("linear", "sqrt", "none"),
    "gradient_allreduce_op": "deepspeed.runtime.constants:GRADIENT_ALLREDUCE_OP_SUPPORTED",
    "log_level": "deepspeed.utils.logging:log_levels",
    "optimizer.type": "deepspeed.runtime.config:DEEPSPEED_OPTIMIZERS",
    "seq_parallel_communication_data_type": ("fp32", "fp16", "bf16"),
    "tensor_parallel.partition_config.layer_specs[].partition_type": _PARTITION,
}
VALUES_FROM: dict[str, str] = {
    "data_types.buffer_dtype": _DTYPES,
    "data_types.grad_accum_dtype": _DTYPES,
    "data_types.param_dtype": _DTYPES,
    "expert_parallel.expert_activation": "deepspeed.moe.ep_experts:EXPERT_ACTIVATIONS",
    "expert_parallel.preset_model": "deepspeed.module_inject.auto_ep_config:PRESET_MODELS",
    "torch_autocast.dtype": _DTYPES,
}
# The same, read from the source: importing this module compiles its kernels.
VALUES_WRITTEN_IN = {"optimizer.params[muon].ns_method": "deepspeed.runtime.zero.muon.original_muon:NS_METHODS"}
NOT_A_TRAINING_TYPE = ("torch.int8", "int8")  # in DtypeEnum for inference
WARMUP_TYPES = ("log", "linear")  # lr_schedules.py: any other word is replaced by log with a warning
# A word that is legal besides the type.
WORDS = {
    "data_types.keep_in_fp32_modules": ("auto",),
    "expert_parallel.routed_scaling_factor": ("auto",),
    "expert_parallel.top_k": ("auto",),
    "pipeline.stages": ("auto",),
    "zero_optimization.zenflow.select_interval": ("auto",),
    "zero_optimization.zenflow.update_interval": ("auto",),
}
# leaf_module_config.py `_coerce_container_types`: one name stands for a list of one.
ONE_FOR_LIST = tuple(f"zero_optimization.leaf_module.{name}" for name in ("classes", "names", "name_suffixes"))

# --- numbers: name -> (unit, smallest or None, largest or None), for every whole number and for floats that have limits
NUMBERS: dict[str, tuple[str, float | None, float | None]] = {
    # counts of elements and bytes
    "allgather_bucket_size": ("elements", 0, None),
    "block_size": ("bytes", 1, None),
    "buffer_size": ("elements", 0, None),
    "free_activation_threshold": ("bytes", 0, None),
    "io_buffer_size": ("bytes", 1, None),
    "max_in_cpu": ("elements", 0, None),
    "num_params": ("parameters", 1, None),
    "reduce_bucket_size": ("elements", 1, None),
    "stage3_max_live_parameters": ("elements", 0, None),
    "stage3_max_reuse_distance": ("elements", 0, None),
    "stage3_model_persistence_threshold": ("elements", 0, None),
    "stage3_module_granularity_threshold": ("elements", 0, None),
    "stage3_param_persistence_threshold": ("elements", 0, None),
    "stage3_prefetch_bucket_size": ("elements", 0, None),
    "sub_group_size": ("elements", 0, None),
    # samples, tokens, steps
    "activation_checkpoint_interval": ("layers", 0, None),
    "comm_max_tokens_per_rank": ("tokens", 0, None),
    "cycle_first_step_size": ("optimizer steps", 1, None),
    "cycle_second_step_size": ("optimizer steps", 0, None),
    "decay_step_size": ("optimizer steps", 0, None),
    "difficulty_step": ("units of difficulty", 1, None),
    "end_profile_step": ("steps", 0, None),
    "full_warm_up_rounds": ("rounds", 0, None),
    "gradient_accumulation_steps": ("micro-batches", 1, None),
    "loss_scale_window": ("steps", 1, None),
    "lr_range_test_step_size": ("optimizer steps", 1, None),
    "max_batch_size": ("samples", 1, None),
    "max_out_tokens": ("tokens", 1, None),
    "max_tokens": ("tokens", 1, None),
    "max_train_batch_size": ("samples", 1, None),
    "max_train_micro_batch_size_per_gpu": ("samples", 1, None),
    "min_batch_size": ("samples", 1, None),
    "min_train_batch_size": ("samples", 1, None),
    "min_train_micro_batch_size_per_gpu": ("samples", 1, None),
    "num_epochs": ("epochs", 1, None),
    "profile_step": ("steps", 0, None),
    "require_steps": ("steps", 1, None),
    "samples_log_interval": ("samples", 1, None),
    "select_interval": ("steps or epochs", 1, None),
    "start_profile_step": ("steps", 0, None),
    "steps_per_print": ("optimizer steps", 1, None),
    "total_curriculum_step": ("steps", 1, None),
    "total_layer_tokens": ("tokens", 1, None),
    "total_num_steps": ("optimizer steps", 1, None),
    "train_batch_size": ("samples", 1, None),
    "train_micro_batch_size_per_gpu": ("samples", 1, None),
    "update_interval": ("steps", 1, None),
    "warmup_layer_tokens": ("tokens", 0, None),
    "warmup_num_steps": ("optimizer steps", 1, None),
    # ranks, threads, layers, other counts
    "autoep_size": ("ranks", 1, None),
    "autotp_size": ("ranks", 0, None),
    "buffer_count": ("buffers", 0, None),
    "comm_num_sm": ("multiprocessors", 1, None),
    "comm_qp_margin": ("queue pairs", 0, None),
    "cycle_first_stair_count": ("stairs", 0, None),
    "cycle_second_stair_count": ("stairs", 0, None),
    "data_parallel_size": ("ranks", 1, None),
    "embedding_partition_dim": ("dimension", 0, None),
    "expert_tensor_parallel_size": ("ranks", 1, None),
    "group_dim": ("dimension", 0, None),
    "group_size": ("elements", 1, None),
    "hidden_size": ("elements", 1, None),
    "hysteresis": ("overflows", 1, None),
    "inference_tp_size": ("ranks", 1, None),
    "initial_scale_power": ("power of two", 0, None),
    "intra_op_parallelism": ("threads", 1, None),
    "io_multiplier": ("times", 1, None),
    "last_batch_iteration": ("optimizer steps", -1, None),
    "last_epoch": ("optimizer steps", -1, None),
    "min_loss_scale": ("factor", 1, None),
    "module_depth": ("levels, -1 for all", -1, None),
    "mp_size": ("ranks", 1, None),
    "num_bits": ("bits", 1, None),
    "num_expert_groups": ("groups", 1, None),
    "num_layers": ("layers", 1, None),
    "num_limited_groups": ("groups", 1, None),
    "num_tuning_micro_batch_sizes": ("micro-batch sizes", 1, None),
    "num_workers": ("processes", 0, None),
    "number_checkpoints": ("layers", 1, None),
    "partition_dim": ("dimension", 0, None),
    "q_groups": ("groups", 1, None),
    "queue_depth": ("requests", 1, None),
    "random_ltd_layer_num": ("layers", 1, None),
    "root_degree": ("degree", 1, None),
    "seed": ("seed", 0, None),
    "seq_per_step": ("tokens", 1, None),
    "sequence_parallel_size": ("ranks", 1, None),
    "stage": ("stage", 0, 3),
    "stages": ("pipeline stages", 1, None),
    "top_k": ("experts", 1, None),
    "top_modules": ("modules", 1, None),
    "total_layer_num": ("layers", 1, None),
    "tp_gather_partition_size": ("ranks", 1, None),
    "tp_grain_size": ("elements", 1, None),
    "tp_size": ("ranks", 1, None),
    "tuner_early_stopping": ("experiments", 0, None),
    "tuner_num_trials": ("experiments", 1, None),
    "vocabulary_size": ("token ids", 1, None),
    "zero_hpz_partition_size": ("ranks", 0, None),
    "max_difficulty": ("units of the metric", 0, None),
    "min_difficulty": ("units of the metric", 0, None),
    "max_value": ("tokens", 1, None),
    "min_value": ("tokens", 1, None),
    # parameters of torch's own schedulers and optimizers
    "T_0": ("optimizer steps", 1, None),
    "T_max": ("optimizer steps", 1, None),
    "T_mult": ("times", 1, None),
    "epochs": ("epochs", 1, None),
    "step_size": ("optimizer steps", 1, None),
    "step_size_down": ("optimizer steps", 1, None),
    "step_size_up": ("optimizer steps", 1, None),
    "steps_per_epoch": ("optimizer steps", 1, None),
    "total_iters": ("optimizer steps", 0, None),
    "total_steps": ("optimizer steps", 1, None),
    # floats with limits: torch refuses the negative ones, DeepSpeed's own optimizers take them in silence
    "adam_lr": ("", 0, None),
    "alpha": ("", 0, None),
    "cos_min_ratio": ("of the learning rate", 0, None),
    "cycle_max_lr": ("", 0, None),
    "cycle_min_lr": ("", 0, None),
    "eps": ("", 0, None),
    "gradient_clipping": ("L2 norm, 0 is off", 0, None),
    "loss_scale": ("factor, 0 is dynamic", 0, None),
    "lr": ("", 0, None),
    "lr_range_test_min_lr": ("", 0, None),
    "momentum": ("", 0, None),
    "muon_lr": ("", 0, None),
    "recompute_fwd_factor": ("of a forward pass", 0, None),
    "warmup_max_lr": ("", 0, None),
    "warmup_min_lr": ("", 0, None),
    "warmup_min_ratio": ("of the learning rate", 0, None),
    "weight_decay": ("", 0, None),
}
# name -> limits of each element
ELEMENTS: dict[str, tuple[str, float | None, float | None]] = {
    "betas": ("", 0, 1),
    "difficulty": ("units of the metric", 0, None),
    "max_step": ("steps", 1, None),
    "milestones": ("optimizer steps", 1, None),
    "random_ltd_layer_id": ("layer", 0, None),
}

# --- known, and refused: path or `*.name` for any place -> (what to write instead, why) ------------------------------
_OPTIM_CPU, _PARAM_CPU = "zero_optimization.offload_optimizer.device=cpu", "zero_optimization.offload_param.device=cpu"
REFUSED: dict[str, tuple[str, str]] = {
    "*.clip_grad": ("gradient_clipping", "DeepSpeed clips by the top-level key alone"),
    "*.grad_clip": ("gradient_clipping", "DeepSpeed clips by the top-level key alone"),
    "*.learning_rate": ("optimizer.params.lr", "DeepSpeed calls it lr"),
    "*.max_grad_norm": ("gradient_clipping", "DeepSpeed clips by the top-level key alone"),
    "*.zero_cpu_offload": (_OPTIM_CPU, "no release of DeepSpeed has this key"),
    "activation_checkpointing.partitioned_activations": (
        "activation_checkpointing.partition_activations",
        "a misspelling in DeepSpeed's own documentation",
    ),
    "aio.thread_count": ("aio.intra_op_parallelism", "renamed in DeepSpeed"),
    "allgather_size": ("zero_optimization.allgather_bucket_size", "read only beside the old zero_optimization: true"),
    "bf16.check_overflow": ("bf16.check_grad_overflow", "renamed in DeepSpeed"),
    "bfloat16": ("bf16", "the old name of the block, ignored where bf16 is given"),
    "disable_allgather": ("", "DeepSpeed reads it and uses it nowhere"),
    "fp32_allreduce": ("communication_data_type=fp32", "removed from DeepSpeed"),
    "optimizer.params.adamw_mode": ("optimizer.params.adam_w_mode", "the engine passes adamw_mode itself"),
    "tensor_parallel.dtype": ("bf16.enabled=true", "it takes a torch.dtype object, which no file can hold"),
    "tensor_parallel.tp.mpu": ("", "it takes a Python object, which no file can hold"),
    "tensor_parallel.tp.tp_group": ("", "it takes a Python object, which no file can hold"),
    "zero_optimization.cpu_offload": (_OPTIM_CPU, "deprecated in DeepSpeed"),
    "zero_optimization.cpu_offload_param": (_PARAM_CPU, "deprecated in DeepSpeed"),
    "zero_optimization.cpu_offload_params": (_PARAM_CPU, "a key of DeepSpeed's first releases"),
    "zero_optimization.cpu_offload_use_pin_memory": (
        "zero_optimization.offload_optimizer.pin_memory",
        "deprecated in DeepSpeed, and without effect",
    ),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "deprecated in DeepSpeed",
    ),
    "zero_optimization.zenflow.steps_per_epoch": ("", "DeepSpeed sets it while it runs"),
}
# What to do about a removed key, besides leaving it out.
INSTEAD = {
    "amp": "bf16.enabled=true",
    "curriculum_learning": "data_efficiency.data_sampling.curriculum_learning",
    "elasticity": "train_batch_size",
    "zero_optimization.mics_hierarchical_params_gather": "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.mics_shard_size": "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "zero_optimization.zero_quantized_gradients",
}
REFUSED_VALUES: dict[str, dict[str, tuple[str, str]]] = {
    "optimizer.type": {
        "onebitadam": ("optimizer.type=AdamW", "the 1-bit optimizers were removed from DeepSpeed"),
        "onebitlamb": ("optimizer.type=Lamb", "the 1-bit optimizers were removed from DeepSpeed"),
        "zerooneadam": ("optimizer.type=AdamW", "the 1-bit optimizers were removed from DeepSpeed"),
    },
    "scheduler.type": {},
}
# Attributes of DeepSpeed's config that nothing outside runtime/config.py may read, or a REFUSED entry is stale.
UNUSED = ("disable_allgather",)

# --- optimizers ------------------------------------------------------------------------------------------------------
# type -> {how it is built: class}. engine.py `_configure_basic_optimizer`: `torch` with torch_adam, `cpu` with
# offload_optimizer.device cpu or nvme, else `plain`. Others are torch.optim's own, by exact name.
OPTIMIZERS = {
    "adagrad": {"plain": "torch.optim:Adagrad", "cpu": "deepspeed.ops.adagrad:DeepSpeedCPUAdagrad"},
    "adam": {
        "plain": "deepspeed.ops.adam:FusedAdam",
        "cpu": "deepspeed.ops.adam:DeepSpeedCPUAdam",
        "torch": "torch.optim:Adam",
    },
    "adamw": {
        "plain": "deepspeed.ops.adam:FusedAdam",
        "cpu": "deepspeed.ops.adam:DeepSpeedCPUAdam",
        "torch": "torch.optim:AdamW",
    },
    "lamb": {"plain": "deepspeed.ops.lamb:FusedLamb"},
    "lion": {"plain": "deepspeed.ops.lion:FusedLion", "cpu": "deepspeed.ops.lion:DeepSpeedCPULion"},
    # The mup package is not installed with DeepSpeed; mup/optim.py 1.0 hands its keywords to these classes.
    "muadam": {"plain": "torch.optim:Adam"},
    "muadamw": {"plain": "torch.optim:AdamW"},
    "musgd": {"plain": "torch.optim:SGD"},
}
# What the engine takes out of optimizer.params itself (engine.py, `optimizer_parameters.pop`), or passes to the class.
POPPED = ("torch_adam", "fp32_optimizer_states", "foreach", "adam_w_mode")
PASSED = ("adam_w_mode", "adamw_mode", "max_grad_norm")
ADAM_EXTRA = {
    "torch_adam": ("bool = false", ()),
    "adam_w_mode": ("bool = true", ()),
    "fp32_optimizer_states": ("bool = true", ("cpu",)),
}
# engine.py `_MUON_HALF_KEYS`, `_ADAM_HALF_KEYS`, `_muon_half_defaults`; deepspeed/__init__.py: other keys are dropped.
MUON = {
    "lr": "float = 0.02",
    "muon_lr": "float",
    "adam_lr": "float",
    "momentum": "float = 0.95",
    "weight_decay": "float = 0.0",
    "betas": "list[float] = [0.9, 0.95]",
    "eps": "float = 1e-10",
    "ns_method": 'str = "gram"',
    "per_head_muon": "bool = false",
}
DEEPSPEED_SCHEDULERS = "deepspeed.runtime.lr_schedules"
TORCH_SCHEDULERS = "torch.optim.lr_scheduler"
