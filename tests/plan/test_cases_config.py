"""Requests from public threads about configurations that went wrong, each decided before anything is started.

Run by pytest; a test's id is the thread. What a checker says to such a value by itself is in test_ds_check.py and
test_ds_values.py: here the whole request is planned, so that nothing lies between a check and the user.
Must never start a run.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import ds_config
from launcher.batch import solve
from launcher.cluster.value import resolve
from launcher.command import deepspeed_command, needed_operators
from launcher.ds_file import leaves
from launcher.plan import Plan, build_plan
from launcher.rules import judge
from launcher.run import Outcome
from launcher.rundir import RunDir
from tests.plan.asking import composed, planned, refused, refuses

Cli = Callable[..., Any]
ZERO = "deepspeed.zero_optimization"


def thread(name: str, *values: Any) -> Any:
    """One case: its thread is the test's id."""
    return pytest.param(*values, id=name)


# --- refused, with the fix -------------------------------------------------------------------------------------------

REFUSED = [
    thread(
        "deepspeedai/DeepSpeed#1809",
        ["+deepspeed.gradient_cliping=0.5", "+deepspeed.activation_checkpoint.partition_activations=true"],
        {
            "deepspeed.gradient_cliping": "did you mean deepspeed.gradient_clipping?",
            "deepspeed.activation_checkpoint": "did you mean deepspeed.activation_checkpointing?",
        },
    ),
    thread(
        "deepspeedai/DeepSpeed#912",
        [
            "zero=stage3",
            f"{ZERO}.stage3_param_persitance_threshold=1e5",
            f"{ZERO}.cpu_offload_params=true",
            f"{ZERO}.cpu_offload=true",
        ],
        {
            f"{ZERO}.stage3_param_persitance_threshold": f"did you mean {ZERO}.stage3_param_persistence_threshold?",
            f"{ZERO}.cpu_offload_params": f"use {ZERO}.offload_param.device=cpu",
            f"{ZERO}.cpu_offload": f"use {ZERO}.offload_optimizer.device=cpu",
        },
    ),
    thread(
        "deepspeedai/DeepSpeed#1543",
        ["zero=stage3", f"+{ZERO}.aio.block_size=1048576"],
        {f"{ZERO}.aio": "it belongs at deepspeed.aio"},
    ),
    thread(
        "deepspeedai/DeepSpeed#313",
        ["+deepspeed.zero_cpu_offload=true"],
        {"deepspeed.zero_cpu_offload": f"use {ZERO}.offload_optimizer.device=cpu"},
    ),
    thread(
        "OpenRLHF/OpenRLHF#346",
        ["train.global_batch_size=256", "train.micro_batch_size=2", "cluster.num_procs=7"],
        {
            "train.global_batch_size": "use train.global_batch_size=252 or 266, another micro batch, "
            "or another number of ranks"
        },
    ),
    thread(
        "deepspeedai/DeepSpeed#1270",
        ["deepspeed.gradient_clipping=auto", "deepspeed.optimizer.params.lr=auto", f"{ZERO}.sub_group_size=auto"],
        {
            "deepspeed.gradient_clipping": "write a number, such as 0.1 or 1e-5; without the key DeepSpeed takes 1.0",
            "deepspeed.optimizer.params.lr": "write a number, such as 0.1 or 1e-5; "
            "without the key DeepSpeed takes 0.001",
            f"{ZERO}.sub_group_size": "write a whole number of elements, such as 1000000, 1e6 or 1M; "
            "without the key DeepSpeed takes 1000000000",
        },
    ),
    thread(
        "huggingface/accelerate#1828",
        ["deepspeed.optimizer.params.lr='1e-5x'"],
        {"deepspeed.optimizer.params.lr": None},
    ),
    thread(
        "snowflakedb/ArcticTraining#165",
        [f"{ZERO}.reduce_bucket_size=5.5e-1"],
        {f"{ZERO}.reduce_bucket_size": None},
    ),
    thread(
        "deepspeedai/DeepSpeed#771",
        ["deepspeed.scheduler.params.warmup_num_steps=200", "run.steps=100"],
        {"deepspeed.scheduler.params.warmup_num_steps": "use 10 or fewer, a longer run.steps, or schedule=constant"},
    ),
    thread(
        "deepspeedai/DeepSpeed#771 none",
        ["deepspeed.scheduler.params.warmup_num_steps=0"],
        {"deepspeed.scheduler.params.warmup_num_steps": "write a number that is at least 1"},
    ),
    thread(
        "deepspeedai/DeepSpeed#656",
        ["deepspeed.optimizer.params.max_grad_norm=1.0"],
        {"deepspeed.optimizer.params.max_grad_norm": "use deepspeed.gradient_clipping"},
    ),
    thread("deepspeedai/DeepSpeed#7839", ["zero=stage0", "precision=bf16"], {"precision": None}),
    thread("deepspeedai/DeepSpeed#3827", ["+deepspeed.sparse_gradients=true"], {"deepspeed.sparse_gradients": None}),
]


@pytest.mark.parametrize(("overrides", "fixes"), REFUSED)
def test_it_is_refused_in_one_list_with_the_fix(overrides: list[str], fixes: dict[str, str | None]) -> None:
    problems = {problem.where: problem.fix for problem in refused(*overrides)}
    assert set(problems) == set(fixes)
    assert {where: problems[where] for where, fix in fixes.items() if fix} == {k: v for k, v in fixes.items() if v}


# --- honoured exactly ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        thread("huggingface/accelerate#1828", "deepspeed.optimizer.params.lr='1e-5'", "optimizer.params.lr", 1e-5),
        thread("huggingface/accelerate#1828 eps", "deepspeed.optimizer.params.eps=1e-8", "optimizer.params.eps", 1e-8),
        thread(
            "snowflakedb/ArcticTraining#165",
            f"{ZERO}.reduce_bucket_size=5e8",
            "zero_optimization.reduce_bucket_size",
            500_000_000,
        ),
        thread(
            "snowflakedb/ArcticTraining#165 text",
            f"{ZERO}.reduce_bucket_size='500_000_000'",
            "zero_optimization.reduce_bucket_size",
            500_000_000,
        ),
        thread(
            "snowflakedb/ArcticTraining#165 fraction",
            f"{ZERO}.allgather_bucket_size=0.5e9",
            "zero_optimization.allgather_bucket_size",
            500_000_000,
        ),
        thread(
            "snowflakedb/ArcticTraining#287 suffix",
            f"{ZERO}.reduce_bucket_size=500M",
            "zero_optimization.reduce_bucket_size",
            500_000_000,
        ),
        thread("snowflakedb/ArcticTraining#287 true", "precision=bf16", "bf16.enabled", True),
        thread(
            "snowflakedb/ArcticTraining#287 false",
            f"{ZERO}.overlap_comm=false",
            "zero_optimization.overlap_comm",
            False,
        ),
        thread("snowflakedb/ArcticTraining#287 stage", "zero=stage3", "zero_optimization.stage", 3),
        thread(
            "deepspeedai/DeepSpeed#771",
            "deepspeed.scheduler.params.warmup_num_steps=1",
            "scheduler.params.warmup_num_steps",
            1,
        ),
        thread("axolotl-ai-cloud/axolotl#1382", "run.steps=200", "gradient_clipping", 1.0),
        thread("axolotl-ai-cloud/axolotl#1382 off", "deepspeed.gradient_clipping=0", "gradient_clipping", 0.0),
        thread("axolotl-ai-cloud/axolotl#1382 0.3", "deepspeed.gradient_clipping=0.3", "gradient_clipping", 0.3),
    ],
)
def test_it_is_honoured_exactly(override: str, path: str, value: Any) -> None:
    found = dict(leaves(planned(override).deepspeed))[path]
    assert (type(found), found) == (type(value), value)


def test_the_plan_keeps_the_request_with_the_types_it_has() -> None:
    plan = planned(f"{ZERO}.reduce_bucket_size=500M")
    assert plan.config.deepspeed["zero_optimization"]["reduce_bucket_size"] == 500_000_000


def test_an_auto_we_solve_may_be_asked_for_anywhere() -> None:
    zero = planned("zero=stage3", f"{ZERO}.reduce_bucket_size=auto").deepspeed["zero_optimization"]
    assert zero["reduce_bucket_size"] == 128**2


def test_lists_of_hydra_are_plain_lists_in_the_plan() -> None:
    """NVIDIA/physicsnemo#133."""
    plan = planned("deepspeed.optimizer.params.betas=[0.9,0.95]")
    assert type(plan.deepspeed["optimizer"]["params"]["betas"]) is list
    assert json.loads(json.dumps(plan.to_json()))["deepspeed"] == plan.deepspeed


def test_planning_does_not_change_the_request() -> None:
    """huggingface/transformers#10760."""
    config = composed("zero=stage3", f"{ZERO}.prefetch_bucket_size=5e7")
    before = copy.deepcopy(config)
    first, second = build_plan(config, {}), build_plan(config, {})
    assert config == before
    assert first == second


@pytest.mark.parametrize(
    ("override", "variable", "value"),
    [
        thread(
            "NVIDIA/cloudai#557", "+cluster.env.NCCL_IB_HCA='mlx5_0:1,mlx5_3:1'", "NCCL_IB_HCA", "mlx5_0:1,mlx5_3:1"
        ),
        thread("NVIDIA/cloudai#557 ucx", "cluster.env.UCX_TLS='cuda_copy,rc'", "UCX_TLS", "cuda_copy,rc"),
        thread("hydra-ecosystem/hydra#1074", "cluster.env.NOTE='#1 실험 a=b @x 50%'", "NOTE", "#1 실험 a=b @x 50%"),
    ],
)
def test_a_value_like_a_list_stays_one_text(override: str, variable: str, value: str) -> None:
    config = composed(override)
    assert config.cluster.env[variable] == value


# --- all at once -----------------------------------------------------------------------------------------------------


def test_names_batch_cluster_and_options_are_refused_in_one_list(two_hosts: tuple[str, ...]) -> None:
    problems = refused(
        *two_hosts,
        *("deepspeed.gradient_cliping=1", "train.global_batch_size=9", "train.micro_batch_size=1", "run.steps=0"),
    )
    assert {p.where for p in problems} == {"deepspeed.gradient_cliping", "train.global_batch_size", "run.steps"}
    with refuses("deepspeed.gradient_cliping", "there is no such file"):
        planned("deepspeed.gradient_cliping=1", "cluster=hostfile", "cluster.hostfile=/nowhere")


def test_rules_do_not_guess_from_a_block_of_the_wrong_shape() -> None:
    """A stage that is no number must not bring a problem about what another stage could not do."""
    [problem] = refused("offload=cpu_all", "deepspeed.zero_optimization.stage=three")
    assert problem.where == "deepspeed.zero_optimization.stage"
    [problem] = refused("deepspeed.zero_optimization=3", "precision=bf16")
    assert problem.where == "deepspeed.zero_optimization"


def test_no_rule_refuses_a_request_without_deepspeed_keys() -> None:
    """What the rules are asked while the DeepSpeed dict is not well-formed."""
    config = composed()
    config.deepspeed = {}
    assert judge(config, resolve(config.cluster), {}) == []


def test_a_deepspeed_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """deepspeedai/DeepSpeed#3827."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.5")
    [problem] = refused()
    assert problem.why.startswith("needs deepspeed >= ") and "found 0.9.5" in problem.why


def test_every_solved_auto_is_solved() -> None:
    config = composed("zero=stage3", "schedule=warmup_decay")
    for path in ds_config.SOLVED:
        *blocks, name = path.split(".")
        inner: Any = config.deepspeed
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[name] = "auto"
    cluster = resolve(config.cluster)
    built = ds_config.build(config, cluster, solve(config.train, cluster.world_size))
    assert "auto" not in [value for _, value in leaves(built)]
    assert "auto" not in [value for _, value in leaves(build_plan(config, {}).deepspeed)]


# --- judge first -----------------------------------------------------------------------------------------------------


def test_a_model_is_measured_only_when_nothing_else_is_wrong(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []

    def measured(request: Any) -> dict[str, Any]:
        asked.append(request["config"]["model"]["config"]["model_type"])
        return {"parameters": 1000, "timeline": None, "why": "it is only counted here"}

    monkeypatch.setattr("launcher.run.when_asked", lambda job: contextlib.nullcontext(measured))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cli("mode=plan", "model.config.model_type=falcon", "run.steps=0").code == 2
    assert asked == []
    assert cli("mode=plan", "model.config.model_type=llama").code == 0
    answer = cli("mode=plan", "plan.format=json", "model.config.model_type=falcon")
    assert asked == ["llama", "falcon"]
    assert json.loads(answer.out)["estimate"]["parameters"] == 1000


# --- world size and trials -------------------------------------------------------------------------------------------


def test_the_batch_is_solved_with_the_real_number_of_ranks() -> None:
    """bigcode-project/starcoder#41: parsed before the process group stood, 256 was not 4 x 8 x 1."""
    plan = planned("cluster.num_procs=8", "train.global_batch_size=256", "train.micro_batch_size=4")
    assert (plan.world_size, plan.deepspeed["gradient_accumulation_steps"]) == (8, 8)


def test_hpz_is_left_out_where_every_gather_is_inside_the_host(one_host: tuple[str, ...]) -> None:
    """deepspeedai/DeepSpeedExamples#717."""
    assert "zero_hpz_partition_size" not in dict(leaves(planned(*one_host, "zero=stage3", "zeropp=hpz").deepspeed))


def test_an_offloaded_adamw_is_deepspeeds_own() -> None:
    """deepspeedai/DeepSpeed#2971."""
    plan = planned("zero=stage2", "offload=cpu")
    assert "CPUAdam" in needed_operators(plan)
    assert "zero_allow_untested_optimizer" not in plan.deepspeed


def test_trials_of_a_sweep_are_single_requests(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning-AI/pytorch-lightning#11617: children started the sweep again."""
    kept: list[tuple[Plan, list[str]]] = []

    def train(plan: Plan, overrides: list[str], sources: dict[str, str]) -> Outcome:
        kept.append((plan, overrides))
        return Outcome(0, None, overrides)

    monkeypatch.setattr("launcher.run.train", train)
    assert cli("-m", "deepspeed.optimizer.params.lr=1e-4,1e-3").code == 0
    assert [plan.deepspeed["optimizer"]["params"]["lr"] for plan, _ in kept] == [1e-4, 1e-3]
    assert [overrides for _, overrides in kept] == [
        ["++deepspeed.optimizer.params.lr=0.0001"],
        ["++deepspeed.optimizer.params.lr=0.001"],
    ]
    assert all("-m" not in deepspeed_command(plan, RunDir("x"), 0, None) for plan, _ in kept)
