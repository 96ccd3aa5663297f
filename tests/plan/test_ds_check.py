"""The check of a DeepSpeed configuration: nothing in it can be wrong in silence, and nothing right is refused.

Run by pytest. Cases cite the public thread they come from; the property tests change valid configurations.
Must never rely on DeepSpeed itself: it takes most of these without a word.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.ds_check import check, missing
from launcher.ds_schema import Key, schema
from launcher.ds_values import normalise
from launcher.errors import Problem, format_problems
from tests.ds_configs import called, leaves, legal_beside, placed, shown
from tests.plan import goldens

GOLDEN_DICTS = Path(__file__).parent / "golden" / "deepspeed.json"
NAMED = [key for key in schema().keys.values() if not key.name.endswith(("]", "*"))]  # what a user writes by its name


def by_place(config: Any, **options: Any) -> dict[str, Problem]:
    """The problems by the path they stand at; a path has one."""
    problems = check(config, **options)
    found = {problem.where: problem for problem in problems}
    assert len(found) == len(problems)
    return found


# --- public cases ----------------------------------------------------------------------------------------------------


def test_a_misspelt_top_level_key_is_named_with_the_nearest() -> None:
    """Case 1 (deepspeedai/DeepSpeed#1809): unknown top-level keys have no effect and no warning."""
    found = by_place({"gradient_cliping": 0.5, "activation_checkpoint": {"partition_activations": True}})
    assert found["deepspeed.gradient_cliping"].fix == "did you mean deepspeed.gradient_clipping?"
    assert found["deepspeed.activation_checkpoint"].fix == "did you mean deepspeed.activation_checkpointing?"
    assert all("DeepSpeed would ignore it in silence" in problem.why for problem in found.values())


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        ("activation_checkpointing.partition_activations", "partition_activation"),
        ("aio.queue_depth", "queue_dept"),
        ("optimizer.params[adamw].weight_decay", "weigth_decay"),
        ("scheduler.params[WarmupLR].warmup_num_steps", "warmup_steps"),
        ("wandb.project", "projet"),
        ("flops_profiler.profile_step", "profile_steps"),
        ("checkpoint.writer.io_buffer_size", "io_buffersize"),
        ("data_types.grad_accum_dtype", "grad_accumulation_dtype"),
    ],
)
def test_a_misspelt_key_is_found_in_every_kind_of_block(path: str, wrong: str) -> None:
    """Case 1 (deepspeedai/DeepSpeed#1809): the blocks DeepSpeed reads as plain dictionaries too."""
    (problem,) = check(placed(path, schema().keys[path].default, wrong))
    assert problem.fix == f"did you mean {shown(path)}?"


def test_one_list_holds_a_typo_and_two_obsolete_flags() -> None:
    """Case 2 (deepspeedai/DeepSpeed#912): the misspelt threshold never applied while memory was being compared."""
    zero = {"stage": 3, "stage3_param_persitance_threshold": 1e5, "cpu_offload_params": True, "cpu_offload": True}
    found = by_place({"zero_optimization": zero})
    block = "deepspeed.zero_optimization"
    assert {where: problem.fix for where, problem in found.items()} == {
        f"{block}.stage3_param_persitance_threshold": f"did you mean {block}.stage3_param_persistence_threshold?",
        f"{block}.cpu_offload_params": f"use {block}.offload_param.device=cpu",
        f"{block}.cpu_offload": f"use {block}.offload_optimizer.device=cpu",
    }


def test_aio_inside_zero_optimization_belongs_at_the_top() -> None:
    """Case 3 (deepspeedai/DeepSpeed#1543): composed one level too deep, it fails in the swapper."""
    offload = {"device": "nvme", "nvme_path": "/nvme"}
    (problem,) = check({"zero_optimization": {"stage": 3, "offload_param": offload, "aio": {"block_size": 1048576}}})
    assert problem.where == "deepspeed.zero_optimization.aio"
    assert problem.fix == "it belongs at deepspeed.aio"


@pytest.mark.parametrize("block", [(), ("zero_optimization",)])
def test_a_key_that_never_was_one_names_the_real_one(block: tuple[str, ...]) -> None:
    """Case 5 (deepspeedai/DeepSpeed#313): a test suite of offload that never offloaded."""
    config: dict[str, Any] = {"zero_cpu_offload": True}
    for name in block:
        config = {name: config}
    (problem,) = check(config)
    assert problem.fix == "use deepspeed.zero_optimization.offload_optimizer.device=cpu"


def test_every_auto_is_listed() -> None:
    """Case 9 (deepspeedai/DeepSpeed#1270): it crashed at the first step, comparing text with a number."""
    config = {
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": ["auto", 0.9]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "offload_param": {"device": "auto"}},
        "wandb": {"project": "auto"},
        "datastates_ckpt": {"config": {"host_cache_size": ["auto"]}},
    }
    found = by_place(config)
    assert set(found) == {
        "deepspeed.gradient_clipping",
        "deepspeed.optimizer.params.lr",
        "deepspeed.optimizer.params.betas[0]",
        "deepspeed.scheduler.params.total_num_steps",
        "deepspeed.zero_optimization.stage",
        "deepspeed.zero_optimization.reduce_bucket_size",
        "deepspeed.zero_optimization.offload_param.device",
        "deepspeed.wandb.project",
        "deepspeed.datastates_ckpt.config.host_cache_size[0]",
    }
    assert all(problem.got == '"auto"' for problem in found.values())
    assert "takes its default in silence" in found["deepspeed.zero_optimization.stage"].why
    assert "once training has started" in found["deepspeed.gradient_clipping"].why


@pytest.mark.parametrize("prefix", ["", "deepspeed."])
def test_an_auto_that_the_plan_solves_is_left_alone(prefix: str) -> None:
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": "auto", "sub_group_size": "auto"}}
    found = by_place(config, resolvable=[f"{prefix}zero_optimization.zero_hpz_partition_size"])
    assert set(found) == {"deepspeed.zero_optimization.sub_group_size"}


def test_an_auto_that_deepspeed_itself_solves_is_legal() -> None:
    own = {
        "pipeline": {"stages": "auto"},
        "data_types": {"keep_in_fp32_modules": "auto"},
        "expert_parallel": {"top_k": "auto", "score_func": "auto"},
        "zero_optimization": {"zenflow": {"select_strategy": "auto", "update_interval": "auto"}},
    }
    assert check(own) == []


@pytest.mark.parametrize("kind", ["AdamW", "Lamb", "Muon", "SGD"])
def test_max_grad_norm_belongs_to_gradient_clipping(kind: str) -> None:
    """Case 19 (deepspeedai/DeepSpeed#656): the engine refuses it after the model is built, on every rank."""
    (problem,) = check({"optimizer": {"type": kind, "params": {"lr": 0.1, "max_grad_norm": 1.0}}})
    assert problem.where == "deepspeed.optimizer.params.max_grad_norm"
    assert problem.fix == "use deepspeed.gradient_clipping"


@pytest.mark.parametrize("value", [None, False, {"enabled": True}])
def test_removed_keys_are_refused_whatever_they_hold(value: Any) -> None:
    """Case 30 (deepspeedai/DeepSpeed#3827): DeepSpeed 0.19 refuses them even when they are off."""
    for name in ("elasticity", "sparse_gradients", "amp", "compression_training"):
        (problem,) = check({name: value})
        assert "removed" in problem.why
    (problem,) = check({"zero_optimization": {"mics_shard_size": value}})
    assert problem.fix == "use deepspeed.zero_optimization.zero_hpz_partition_size"


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "path"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("Zero_Optimization", "zero_optimization"),
        ("zero-optimization", "zero_optimization"),
        ("zeroOptimization", "zero_optimization"),
        ("ZERO_OPTIMIZATION", "zero_optimization"),
        ("zero_optimizations", "zero_optimization"),
        ("optimiser", "optimizer"),
        ("optimizers", "optimizer"),
        ("sheduler", "scheduler"),
        ("lr_scheduler", "scheduler"),
        ("steps_per_prints", "steps_per_print"),
        ("gradient-clipping", "gradient_clipping"),
        ("gradients_clipping", "gradient_clipping"),
        ("train_batchsize", "train_batch_size"),
        ("micro_batch_size", "train_micro_batch_size_per_gpu"),
        ("bf-16", "bf16"),
        ("comm_logger", "comms_logger"),
        ("tensor_board", "tensorboard"),
        ("hybrid_engines", "hybrid_engine"),
        ("zero", "zero_optimization"),
    ],
)
def test_case_hyphens_plurals_and_british_spelling_are_typos(wrong: str, path: str) -> None:
    (problem,) = check({wrong: {}})
    assert problem.fix == f"did you mean deepspeed.{path}?"


@pytest.mark.parametrize(
    ("config", "where", "home"),
    [
        ({"overlap_comm": True}, "overlap_comm", "deepspeed.zero_optimization.overlap_comm"),
        ({"stage": 2}, "stage", "deepspeed.zero_optimization.stage"),
        ({"loss_scale": 0}, "loss_scale", "deepspeed.fp16.loss_scale"),
        ({"lr": 1}, "lr", "deepspeed.optimizer.params.lr"),
        ({"warmup_num_steps": 1}, "warmup_num_steps", "deepspeed.scheduler.params.warmup_num_steps"),
        ({"queue_depth": 1}, "queue_depth", "deepspeed.aio.queue_depth"),
        ({"offload_optimiser": {}}, "offload_optimiser", "deepspeed.zero_optimization.offload_optimizer"),
        ({"fp16": {"train_batch_size": 1}}, "fp16.train_batch_size", "deepspeed.train_batch_size"),
        ({"bf16": {"gradient_clipping": 1}}, "bf16.gradient_clipping", "deepspeed.gradient_clipping"),
        ({"optimizer": {"type": "AdamW", "lr": 1}}, "optimizer.lr", "deepspeed.optimizer.params.lr"),
        (
            {"zero_optimization": {"device": "cpu"}},
            "zero_optimization.device",
            "deepspeed.zero_optimization.offload_optimizer.device or deepspeed.zero_optimization.offload_param.device",
        ),
        ({"zero_optimization": {"fp16": {}}}, "zero_optimization.fp16", "deepspeed.fp16"),
        ({"zero_optimization.stage": 3}, "zero_optimization.stage", "deepspeed.zero_optimization.stage"),
    ],
)  # fmt: skip
def test_a_key_in_the_wrong_block_is_told_its_home(config: dict[str, Any], where: str, home: str) -> None:
    (problem,) = check(config)
    assert problem.where == f"deepspeed.{where}"
    assert problem.fix == f"it belongs at {home}"


@pytest.mark.parametrize(
    ("path", "use"),
    [
        ("bfloat16", "bf16"),
        ("fp32_allreduce", "communication_data_type=fp32"),
        ("bf16.check_overflow", "bf16.check_grad_overflow"),
        ("aio.thread_count", "aio.intra_op_parallelism"),
        ("activation_checkpointing.partitioned_activations", "activation_checkpointing.partition_activations"),
        ("zero_optimization.cpu_offload_param", "zero_optimization.offload_param.device=cpu"),
        ("zero_optimization.cpu_offload_use_pin_memory", "zero_optimization.offload_optimizer.pin_memory"),
        (
            "zero_optimization.stage3_gather_fp16_weights_on_model_save",
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        ),
    ],
)
def test_old_names_lead_to_their_successors(path: str, use: str) -> None:
    (problem,) = check(placed(path, True))
    assert problem.where == f"deepspeed.{path}"
    assert problem.fix == f"use deepspeed.{use}"


def test_an_old_name_misspelt_or_misplaced_still_leads_to_its_successor() -> None:
    fixes = {problem.where: problem.fix for problem in check({"cpu_ofload": True, "CPU-Offload": True})}
    assert set(fixes.values()) == {"use deepspeed.zero_optimization.offload_optimizer.device=cpu"}


def test_every_refused_key_is_refused_with_its_reason() -> None:
    for path, refusal in schema().refused.items():
        (problem,) = check(placed(path.removeprefix("*."), True))
        assert problem.why == refusal.why


def test_a_fix_names_the_option_that_owns_a_key() -> None:
    owned = {"train_batch_size": "train.global_batch_size", "train_micro_batch_size_per_gpu": "train.micro_batch_size"}
    found = by_place(
        {"micro_batch_size": 4, "zero_optimization": {"train_batch_size": 8}, "elasticity": {}}, owned=owned
    )
    assert found["deepspeed.micro_batch_size"].fix == "use train.micro_batch_size"
    assert found["deepspeed.zero_optimization.train_batch_size"].fix == "use train.global_batch_size"
    assert found["deepspeed.elasticity"].fix == "use train.global_batch_size"


def test_two_names_of_one_key_are_refused() -> None:
    zero = {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}
    (problem,) = check({"zero_optimization": zero})
    assert problem.where == "deepspeed.zero_optimization.prefetch_bucket_size"
    assert "stage3_prefetch_bucket_size, which is given too" in problem.why


def test_a_parameter_of_another_scheduler_is_refused() -> None:
    (problem,) = check({"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}}})
    assert problem.why.endswith("in scheduler.params: WarmupLR does not take it")
    assert problem.fix == "leave it out; it belongs to WarmupCosineLR or WarmupDecayLR"


def test_a_parameter_of_the_class_that_is_not_built_is_refused() -> None:
    adamw = {"optimizer": {"type": "AdamW", "params": {"fp32_optimizer_states": True, "foreach": True}}}
    found = by_place(adamw)
    states = found["deepspeed.optimizer.params.fp32_optimizer_states"]
    assert states.why == "FusedAdam, which DeepSpeed builds here, does not take it"
    assert states.fix == "leave it out; it is for DeepSpeedCPUAdam with the optimizer offloaded"
    assert set(found) == {"deepspeed.optimizer.params.fp32_optimizer_states", "deepspeed.optimizer.params.foreach"}
    offloaded = adamw | {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    assert set(by_place(offloaded)) == {"deepspeed.optimizer.params.foreach"}


def test_without_a_known_type_any_type_s_parameters_pass() -> None:
    params = {"lr": 0.1, "fp32_optimizer_states": True, "momentum": 0.9}
    assert check({"optimizer": {"params": params}}) == []
    assert set(by_place({"optimizer": {"type": "AdamX", "params": params}})) == {"deepspeed.optimizer.type"}


def test_muon_drops_what_it_does_not_know_so_it_is_refused_here() -> None:
    (problem,) = check({"optimizer": {"type": "Muon", "params": {"lr": 0.02, "nesterov": True}}})
    assert problem.where == "deepspeed.optimizer.params.nesterov"


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        ({"zero_optimization": 3}, "write deepspeed.zero_optimization.stage=3"),
        ({"zero_optimization": True}, "write deepspeed.zero_optimization.stage=0, 1, 2 or 3"),
        ({"optimizer": "AdamW"}, "write deepspeed.optimizer.type=AdamW"),
        ({"bf16": True}, "write deepspeed.bf16.enabled=true"),
        ({"scheduler": ["WarmupLR"]}, "write its keys, such as deepspeed.scheduler.params=VALUE"),
        ({"zero_optimization": {"offload_param": "cpu"}}, "write deepspeed.zero_optimization.offload_param.device=cpu"),
    ],
)
def test_one_value_for_a_block_is_refused(config: dict[str, Any], fix: str) -> None:
    (problem,) = check(config)
    assert problem.why == "a single value, where DeepSpeed expects a block of keys"
    assert problem.fix == fix


def test_null_blocks_are_refused_where_deepspeed_fails_on_them() -> None:
    nullable = {"aio", "zero_optimization.offload_param", "zero_optimization.offload_optimizer", "checkpoint.writer"}
    for key in schema().keys.values():
        if key.type == "object" and key in NAMED:
            problems = check(placed(key.path, None))
            assert bool(problems) != key.null, key.path
    assert all(schema().keys[path].null for path in nullable)


@pytest.mark.parametrize(
    ("path", "value", "why"),
    [
        ("zero_optimization.stage", 4, "not a value of stage"),
        ("zero_optimization.offload_param.device", "gpu", "not a value of device"),
        ("zero_optimization.offload_param.device", "CPU", "DeepSpeed tells upper and lower case apart here"),
        ("zero_optimization.reduce_bucket_size", -1, "it is more than 0 (elements)"),
        ("zero_optimization.reduce_bucket_size", 0, "it is more than 0 (elements)"),
        ("zero_optimization.offload_optimizer.ratio", 1.5, "it is at most 1"),
        ("zero_optimization.zenflow.topk_ratio", 1.0, "it is less than 1"),
        ("zero_optimization.legacy_stage1", True, "not a value of legacy_stage1"),
        ("aio.block_size", -4096, "it is at least 1 (bytes)"),
        ("gradient_clipping", -1.0, "it is at least 0 (L2 norm, 0 is off)"),
        ("gradient_clipping", "one", "not a number, where a number stands"),
        ("bf16.enabled", "maybe", "neither true nor false"),
        ("wandb.project", 7, "a number, where text stands"),
        ("optimizer.type", "AdamX", "not a value of type"),
        ("optimizer.type", "sgd", "DeepSpeed tells upper and lower case apart here"),
        ("optimizer.type", "OneBitAdam", "the 1-bit optimizers were removed from DeepSpeed"),
        ("scheduler.type", "LambdaLR", "it takes Python objects, which no file can hold"),
        ("optimizer.params[adamw].lr", -0.1, "it is at least 0"),
        ("optimizer.params[adamw].betas", [0.9], "a list of 1, where DeepSpeed takes one of 2"),
        ("optimizer.params[adamw].betas", [0.9, 1.0], "it is less than 1"),
        ("optimizer.params[adamw].betas", 0.9, "not a list, where a list of numbers stands"),
        ("optimizer.params[adamw].adam_w_mode", False, "not a value of adam_w_mode"),
        ("scheduler.params[WarmupLR].warmup_type", "cosine", "not a value of warmup_type"),
        ("scheduler.params[WarmupLR].warmup_num_steps", 0, "it is at least 1 (optimizer steps)"),
        ("checkpoint.tag_validation", "strict", "not a value of tag_validation"),
        ("compile.passes", ["z3", "z9"], "not a value of passes"),
        ("expert_parallel.load_balance_coeff", 0.1, "DeepSpeed takes null alone here"),
    ],
)
def test_values_that_deepspeed_would_misread_or_refuse(path: str, value: Any, why: str) -> None:
    (problem,) = check(placed(path, value))
    assert problem.where.startswith(shown(path))
    assert problem.why == why


@pytest.mark.parametrize("name", ["AdamW", "adamw", "ADAMW", "Adam", "Lion", "Muon", "Adagrad", "SGD", "RMSprop"])
def test_optimizer_types_are_taken_as_deepspeed_takes_them(name: str) -> None:
    assert check({"optimizer": {"type": name, "params": {"lr": 0.1}}}) == []


def test_anything_but_a_mapping_is_one_problem() -> None:
    for config in (None, 3, "x", [1]):
        (problem,) = check(config)
        assert problem.where == "deepspeed"


def test_keys_that_are_no_text_are_unknown() -> None:
    assert set(by_place({3: 1, None: 2, True: 3})) == {"deepspeed.3", "deepspeed.None", "deepspeed.True"}


def test_what_a_block_cannot_do_without_is_found() -> None:
    config = {
        "optimizer": {"params": {"lr": 1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 1}},
    }
    assert check(config) == []
    assert {problem.where for problem in missing(config)} == {
        "deepspeed.optimizer.type",
        "deepspeed.scheduler.params.total_num_steps",
    }


# --- no valid key is refused -----------------------------------------------------------------------------------------


def test_every_key_with_its_default_passes() -> None:
    refused = {key.path: check(placed(key.path, key.default)) for key in leaves() if key.has_default}
    assert len(refused) > 500
    assert {path: problems for path, problems in refused.items() if problems} == {}


def test_every_other_name_of_a_key_passes() -> None:
    aliases = [(key, name) for key in leaves() for name in key.aliases]
    assert len(aliases) >= 9
    for key, name in aliases:
        assert check(placed(key.path, key.default, name)) == []


def test_every_legal_value_passes() -> None:
    for key in leaves():
        for value in (*key.values, *key.words, *key.any_case, *(word.lower() for word in key.any_case)):
            assert check(placed(key.path, value)) == [], (key.path, value)


def test_the_dicts_of_every_legal_combination_pass() -> None:
    dicts = json.loads(GOLDEN_DICTS.read_text(encoding="utf-8"))
    assert len(dicts) >= 20
    for name, deepspeed in dicts.items():
        assert normalise(deepspeed) == (deepspeed, []), name
        assert check(deepspeed) == missing(deepspeed) == [], name


def test_a_large_valid_configuration_passes() -> None:
    config = {
        "train_batch_size": 16,
        "steps_per_print": 10,
        "communication_data_type": "BF16",
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True},
            "offload_param": {"device": "cpu", "pin_memory": False},
            "stage3_max_live_parameters": 0,
            "leaf_module": {"classes": ["a.B"], "names": []},
        },
        "aio": {"block_size": 262144, "queue_depth": 32},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "adam_w_mode": False}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0, "cycle_max_lr": [0.1, 0.2]}},
        "tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": [".*"], "partition_type": "row"}]}},
        "datastates_ckpt": {"config": {"host_cache_size": 16}},
        "autotuning": {"arg_mappings": {"anything": "--goes"}},
        "weight_quantization": {
            "post_init_quant": {"attn": {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}}
        },
    }
    assert check(config) == []


# --- changed configurations ------------------------------------------------------------------------------------------


def drop(name: str, at: int) -> str:
    return name[:at] + name[at + 1 :]


def double(name: str, at: int) -> str:
    return name[: at + 1] + name[at:]


def swap(name: str, at: int) -> str:
    return name[:at] + name[at + 1 : at + 2] + name[at : at + 1] + name[at + 2 :]


def hyphen(name: str, at: int) -> str:
    return name.replace("_", "-")


def upper(name: str, at: int) -> str:
    return name[:at] + name[at:].upper()


def plural(name: str, at: int) -> str:
    return name.removesuffix("s") if at % 2 else f"{name}s"


CHANGES: tuple[Callable[[str, int], str], ...] = (drop, double, swap, hyphen, upper, plural)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(NAMED), st.sampled_from(CHANGES), st.integers(0, 40))
def test_a_changed_name_is_caught_at_every_level(key: Key, change: Callable[[str, int], str], at: int) -> None:
    name = change(key.name, at % len(key.name))
    legal = legal_beside(key.path)
    if name in legal or "*" in legal or not name:
        return
    (problem,) = check(placed(key.path, {} if key.type == "object" else key.default, name))
    assert problem.where == shown(key.path)[: -len(called(key.name))] + name
    rivals = [other for other in legal if other != key.name and name in (drop(other, at) for at in range(len(other)))]
    if len(key.name) > 8 and not rivals:  # shorter ones may be as near to another key: f16; expert_w is to two
        # "use": the changed name is one that the key once had
        assert problem.fix in (f"did you mean {shown(key.path)}?", f"use {shown(key.path)}")


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(NAMED), st.sampled_from(NAMED))
def test_a_key_moved_to_another_block_is_caught(key: Key, beside: Key) -> None:
    legal = legal_beside(beside.path)
    if key.name in legal or "*" in legal:
        return
    (problem,) = check(placed(beside.path, {} if key.type == "object" else key.default, key.name))
    assert problem.where == shown(beside.path)[: -len(called(beside.name))] + key.name
    assert problem.fix


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([key for key in NAMED if "." not in key.path]), unique=True, min_size=1, max_size=6),
    st.integers(0, 40),
)
def test_all_problems_are_reported_at_once(keys: list[Key], at: int) -> None:
    wrong = {double(key.name, at % len(key.name)) for key in keys}
    assert set(by_place(dict.fromkeys(wrong, 1))) == {f"deepspeed.{name}" for name in wrong}


WRONG: dict[str, tuple[Any, ...]] = {
    "int": (True, 0.5, "many", [1, 2], {"a": 1}, float("nan"), float("inf"), -(10**30)),
    "float": (True, "many", {"a": 1}, float("nan"), float("-inf"), 10**400),
    "bool": (2, "maybe", 1.0, [], {"a": 1}),
    "str": (5, True, 1.5, ["x"], {"a": 1}),
    "list": (5, True, {"a": 1}),
}


@settings(max_examples=400, deadline=None)
@given(st.sampled_from([key for key in leaves() if key.type in WRONG]), st.data())
def test_a_value_of_another_type_is_caught(key: Key, data: st.DataObject) -> None:
    value = data.draw(st.sampled_from(WRONG[key.type]))
    if key.or_list and isinstance(value, list):
        return
    (problem,) = check(placed(key.path, value))
    assert problem.where == shown(key.path)
    assert problem.why
    assert problem.fix


@given(st.sampled_from([key for key in leaves() if not key.null and key.type != "null"]))
def test_null_is_caught_where_it_is_no_value(key: Key) -> None:
    (problem,) = check(placed(key.path, None))
    assert problem.where == shown(key.path)
    assert problem.why.startswith("null, where ")


@given(st.sampled_from([key for key in leaves() if key.min is not None and key.type in ("int", "float")]))
def test_a_value_below_the_smallest_is_caught(key: Key) -> None:
    assert key.min is not None
    (problem,) = check(placed(key.path, key.min - 1))
    assert problem.where == shown(key.path)
    assert problem.why.startswith("it is at least ")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(sorted({key.name for key in NAMED}))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(names, st.dictionaries(names, json_values, max_size=3) | json_values, max_size=4))
def test_no_configuration_breaks_the_check(config: dict[str, Any]) -> None:
    for problem in check(config) + missing(config):
        assert problem.where.startswith("deepspeed")
        assert problem.got
        assert problem.why
        assert problem.fix


# --- wording ---------------------------------------------------------------------------------------------------------


def test_the_messages_are_the_committed_ones() -> None:
    config = {
        "gradient_cliping": 0.5,
        "gradient_clipping": "auto",
        "elasticity": {"enabled": True},
        "bf16": None,
        "overlap_comm": True,
        "zero_optimization": {
            "stage": 5,
            "cpu_offload": True,
            "aio": {},
            "enabled": True,
            "reduce_bucket_size": 0.5,
            "offload_param": "cpu",
        },
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "1e-5x", "max_grad_norm": 1.0, "foreach": True, "betas": [0.9]},
        },
        "scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}},
        "aio": {"block_size": "1M"},
    }
    goldens.compare("ds_check.txt", format_problems(check(config), "DeepSpeed configuration") + "\n")
