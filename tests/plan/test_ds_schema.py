"""The schema of DeepSpeed's configuration: what it knows, how it is looked up, and what it costs to load.

Run by pytest. That it is the installed DeepSpeed's is shown by tests/run/test_ds_schema_current.py, which may load it.
Must never import DeepSpeed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from launcher.ds_schema import Level, levels, lookup, optimizer_mode, schema, version_problem
from tests.ds_configs import leaves

REPO = Path(__file__).resolve().parents[2]
LOAD_S = 0.02  # what planning may pay for it


def test_it_loads_in_a_fiftieth_of_a_second() -> None:
    def seconds() -> float:
        start = time.process_time()  # of this process alone: other work on the machine does not count
        schema.__wrapped__()
        return time.process_time() - start

    assert min(seconds() for _ in range(5)) < LOAD_S


def test_it_loads_nothing_heavy() -> None:
    code = (
        "import sys, launcher.ds_check as c; c.check({'x': 1}); "
        "print([m for m in ('torch', 'deepspeed', 'numpy', 'omegaconf', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "kind", "default"),
    [
        ("gradient_clipping", "float", 1.0),
        ("steps_per_print", "int", None),
        ("bf16.check_grad_overflow", "bool", True),
        ("fp16.initial_scale_power", "int", 16),
        ("aio.block_size", "int", 1048576),
        ("activation_checkpointing.partition_activations", "bool", False),
        ("zero_optimization.reduce_bucket_size", "int", 500_000_000),
        ("zero_optimization.stage3_prefetch_bucket_size", "int", 50_000_000),
        ("zero_optimization.stage3_model_persistence_threshold", "int", sys.maxsize),
        ("zero_optimization.offload_optimizer.pin_memory", "bool", True),
        ("zero_optimization.offload_optimizer.device", "str", "none"),
        ("zero_optimization.offload_param.buffer_size", "int", 100_000_000),
        ("zero_optimization.zenflow.topk_ratio", "float", 0.1),
        ("checkpoint.writer.type", "str", "FAST"),
        ("timers.throughput.synchronized", "bool", True),
        ("tensor_parallel.tp.tp_size", "int", 1),
        ("pipeline.stages", "int", "auto"),
        ("expert_parallel.comm_num_sm", "int", 12),
        ("data_efficiency.data_sampling.dynamic_batching.lr_scaling_method", "str", "linear"),
    ],
)
def test_types_and_defaults_are_those_deepspeed_resolves(path: str, kind: str, default: Any) -> None:
    key = lookup(path)
    assert key is not None
    assert (key.type, key.default) == (kind, default)
    assert lookup(f"deepspeed.{path}") is key


@pytest.mark.parametrize(
    ("path", "unit"),
    [
        ("zero_optimization.reduce_bucket_size", "elements"),
        ("zero_optimization.offload_param.buffer_size", "elements"),
        ("aio.block_size", "bytes"),
        ("train_batch_size", "samples"),
        ("gradient_accumulation_steps", "micro-batches"),
        ("scheduler.params.warmup_num_steps", "optimizer steps"),
    ],
)
def test_numbers_carry_their_unit(path: str, unit: str) -> None:
    key = lookup(path)
    assert key is not None
    assert key.unit == unit


def test_every_whole_number_has_a_unit_or_its_legal_values() -> None:
    bare = [key.path for key in leaves() if key.type == "int" and not key.unit and not key.values]
    assert bare == []


def test_a_block_has_keys_or_says_why_not() -> None:
    empty = [path for path, names in schema().levels.items() if not names and not schema().keys[path].by]
    why = {path: schema().keys[path].open for path in empty}
    # custom schedules take a function set in code; the other two are not DeepSpeed's to define
    assert sorted(path for path, reason in why.items() if not reason) == [
        "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.*.schedule_config[custom]"
    ]
    assert sorted(path for path, reason in why.items() if reason) == ["autotuning.arg_mappings", "datastates_ckpt"]


def test_every_top_level_block_is_there() -> None:
    blocks = {path for path, key in schema().keys.items() if key.type == "object" and "." not in path}
    assert blocks == {
        "activation_checkpointing", "aio", "autotuning", "bf16", "checkpoint", "comet", "comms_logger", "compile",
        "csv_monitor", "data_efficiency", "data_types", "datastates_ckpt", "expert_parallel", "flops_profiler", "fp16",
        "hybrid_engine", "optimizer", "pipeline", "scheduler", "tensor_parallel", "tensorboard", "timers",
        "torch_autocast", "wandb", "weight_quantization", "zero_optimization",
    }  # fmt: skip
    counts = Counter(key.path.partition(".")[0] for key in leaves())
    assert counts["zero_optimization"] >= 60
    assert counts["optimizer"] >= 150
    assert counts["scheduler"] >= 70


def test_both_names_of_a_stage3_key_find_it() -> None:
    assert lookup("zero_optimization.param_persistence_threshold") == lookup(
        "zero_optimization.stage3_param_persistence_threshold"
    )


def test_parameters_follow_the_type() -> None:
    warmup = lookup("scheduler.params.total_num_steps", "WarmupLR")
    decay = lookup("scheduler.params.total_num_steps", "WarmupDecayLR")
    assert warmup is None
    assert decay is not None
    assert decay.required
    adamw, sgd = lookup("optimizer.params.betas", "AdamW"), lookup("optimizer.params.momentum", "SGD")
    assert adamw is not None
    assert adamw.path == "optimizer.params[adamw].betas"
    assert sgd is not None
    assert lookup("optimizer.params.momentum", "AdamW") is None


@pytest.mark.parametrize(
    "path", ["", "zero", "zero_optimization.aio", "fp16.enabled.enabled", "optimizer.params.max_grad_norm"]
)
def test_an_unknown_path_finds_nothing(path: str) -> None:
    assert lookup(path) is None


def test_free_names_lead_on_to_known_keys() -> None:
    metric = "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics.seqlen"
    assert lookup(metric) is not None
    assert lookup(f"{metric}.min_difficulty") is not None
    assert lookup(f"{metric}.schedule_config.root_degree", "fixed_root") is not None
    assert lookup(f"{metric}.schedule_config.root_degree", "fixed_linear") is None


def test_levels_are_walked_from_the_outside() -> None:
    config = {
        "zero_optimization": {"offload_param": {"device": "cpu"}, "unknown": {"x": 1}},
        "tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": ["a"]}, {"patterns": ["b"]}]}},
        "datastates_ckpt": {"host_cache": {"anything": 1}},
    }
    places = [level.where for level in levels(config)]
    assert places == [
        "deepspeed",
        "deepspeed.zero_optimization",
        "deepspeed.zero_optimization.offload_param",
        "deepspeed.tensor_parallel",
        "deepspeed.tensor_parallel.partition_config",
        "deepspeed.tensor_parallel.partition_config.layer_specs[0]",
        "deepspeed.tensor_parallel.partition_config.layer_specs[1]",
    ]


def test_without_a_type_the_parameters_of_all_types_are_legal() -> None:
    level = next(level for level in levels({"optimizer": {"params": {"lr": 1}}}) if level.where.endswith("params"))
    assert isinstance(level, Level)
    assert {"momentum", "betas", "ns_method"} <= set(level.names())


@pytest.mark.parametrize(
    ("zero", "params", "mode"),
    [
        ({}, {}, "plain"),
        ({"offload_optimizer": {"device": "none"}}, {}, "plain"),
        ({"offload_optimizer": {"device": "cpu"}}, {}, "cpu"),
        ({"offload_optimizer": {"device": "nvme"}}, {}, "cpu"),
        ({"offload_optimizer": {"device": "cpu"}}, {"torch_adam": True}, "torch"),
        ({"offload_optimizer": None}, {"torch_adam": False}, "plain"),
    ],
)
def test_the_way_an_optimizer_is_built(zero: dict[str, Any], params: dict[str, Any], mode: str) -> None:
    assert optimizer_mode({"zero_optimization": zero, "optimizer": {"params": params}}) == mode


@pytest.mark.parametrize(
    "name",
    ["elasticity", "sparse_gradients", "amp", "nebula", "curriculum_learning", "zero_optimization.mics_shard_size"],
)
def test_keys_that_deepspeed_removed_are_refused_in_its_own_words(name: str) -> None:
    """Case 30 (deepspeedai/DeepSpeed#3827), the reverse: templates still hold keys that 0.19 removed."""
    assert "removed" in schema().refused[name].why
    assert lookup(name) is None


@pytest.mark.parametrize("version", ["0.19.8", "0.19.8+cpu", "0.19.9", "0.19.10.dev3"])
def test_this_deepspeed_and_later_patches_are_admitted(version: str) -> None:
    assert version_problem(version) is None


@pytest.mark.parametrize("version", ["0.9.5", "0.19.7", "0.19", "0.19.8rc1", "0.0.0", "unknown"])
def test_an_older_deepspeed_is_named_with_the_version_needed(version: str) -> None:
    """Case 30 (deepspeedai/DeepSpeed#3827): keys that the installed DeepSpeed does not know yet."""
    problem = version_problem(version)
    assert problem is not None
    assert problem.why.startswith(f"needs deepspeed >= {schema().version}, found {version}")
    assert problem.fix == f"pip install deepspeed=={schema().version}"


@pytest.mark.parametrize("version", ["0.20.0", "1.0"])
def test_another_minor_release_is_refused(version: str) -> None:
    problem = version_problem(version)
    assert problem is not None
    assert problem.why.startswith(f"needs deepspeed {schema().version}, found {version}")


def test_the_installed_version_is_asked_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.18.0" if name == "deepspeed" else "")
    problem = version_problem()
    assert problem is not None
    assert "found 0.18.0" in problem.why

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    problem = version_problem()
    assert problem is not None
    assert "found none" in problem.why
