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
    Case("launcher_is_known", ("cluster.launcher=telnet",), ("cluster.launcher=openmpi",), hosts=2),
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
    Case("tracker_is_known", ("tracker.kind=pigeon",), ("tracker.kind=wandb",)),
    Case("counts_are_positive", ("train.sequence_length=1",), ("train.sequence_length=2",)),
    Case("counts_are_positive", ("eval.every=-1",), ("eval.every=0",)),
    Case("counts_are_positive", ("eval.samples=-1",), ("eval.samples=0",)),
    Case("counts_are_positive", ("checkpoint.every=-1",), ("checkpoint.every=0",)),
    Case("counts_are_positive", ("checkpoint.keep=-1",), ("checkpoint.keep=0",)),
    Case("counts_are_positive", ("export.max_shard_bytes=0",), ("export.max_shard_bytes=1",)),
    Case("counts_are_positive", ("train.fallback_micro_batch_size=0",), ("train.fallback_micro_batch_size=1",)),
    Case("counts_are_positive", ("run.steps=0", "schedule=constant"), ("run.steps=1", "schedule=constant")),
    Case("numbers_are_finite", ("deepspeed.gradient_clipping=inf",), ("deepspeed.gradient_clipping=1e30",)),
    Case("numbers_are_finite", ("deepspeed.optimizer.params.betas=[0.9,nan]",), ("deepspeed.optimizer.params.eps=0",)),
    Case("export_dtype_is_known", ("export.dtype=int3",), ("export.dtype=fp16",)),
    Case("sequence_fits_the_model", ("train.sequence_length=2049",), ("train.sequence_length=2048",)),
    Case("sequence_fits_the_model", ("model=gpt2_small", "train.sequence_length=1025"), ("model=gpt2_small",)),
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
    Case("zeropp_needs_stage3", ("zero=stage2", "zeropp=hpz"), ("zero=stage3", "zeropp=hpz"), hosts=2),
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
    Case(
        "one_reduced_precision",
        ("precision=bf16", "+deepspeed.fp16.enabled=true"),
        ("precision=bf16", "+deepspeed.fp16.enabled=false"),
    ),
    Case(
        "stage0_reduced_precision_decays_at_start",
        ("zero=stage0", "precision=bf16"),
        ("zero=stage1", "precision=bf16"),
    ),
    Case("lion_on_cpu_needs_offload", ("optim=lion",), ("optim=lion", "offload=cpu")),
    Case(
        "muon_at_stage3_needs_plain_reduction",
        ("optim=muon", "zero=stage3"),
        ("optim=muon", "zero=stage3", "+deepspeed.zero_optimization.reduce_scatter=false"),
    ),
    Case("adagrad_cannot_resume_at_stage3", ("optim=adagrad", "zero=stage3"), ("optim=adagrad", "zero=stage2")),
    Case("warmup_fits_the_run", (f"{WARMUP}=201",), (f"{WARMUP}=200",)),
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
