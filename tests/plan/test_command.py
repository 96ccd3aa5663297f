"""Claims about argument lists: the `deepspeed` command of each kind of cluster, its hostfile, our own processes.

Run by pytest; golden/commands.txt holds the commands, with {python}, {bin} and {root} for this machine's paths.
Must never execute one.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from launcher import env
from launcher.cluster.hostfile import parse_lines
from launcher.cluster.value import Cluster, Host
from launcher.command import (
    WORKER,
    batch_script,
    deepspeed_command,
    hostfile_text,
    local_worker_command,
    needed_operators,
    operators_command,
)
from launcher.plan import Plan
from launcher.rundir import RunDir
from tests.plan import goldens
from tests.plan.asking import ROOT, planned, refused

RUN = RunDir("/shared/runs/a b")
PORT = 29512


@pytest.fixture
def three_hosts(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "three"
    path.write_text("alpha slots=4\nbeta slots=4\ngamma slots=2\n")
    return ("cluster=hostfile", f"cluster.hostfile={path}", "cluster.accelerator=cuda")


def on_local_gpus(*slots: int) -> Plan:
    """A plan for these GPUs of this machine, whatever it has."""
    return dataclasses.replace(planned(), cluster=Cluster((Host("here", slots),), "cuda", local=True))


def shown(name: str, argv: list[str]) -> str:
    """An argument a line, the machine's own folders replaced."""
    places = {sys.executable: "{python}", str(Path(sys.executable).parent): "{bin}", str(ROOT): "{root}"}
    for path, place in places.items():
        argv = [word.replace(path, place, 1) if word.startswith(path) else word for word in argv]
    return "\n  ".join([name, *argv])


def test_commands_are_the_committed_ones(three_hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "slurm", lambda: {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "8"})
    several = {
        "hostfile": three_hosts,
        "filtered hostfile": (*three_hosts, 'cluster.exclude="alpha:0,2@gamma"'),
        "hostfile, every option": (
            *three_hosts,
            *("cluster.ssh_port=2222", "cluster.master_addr=10.0.0.9", "cluster.launcher_args=-v"),
        ),
        "openmpi, whole hosts": (*three_hosts, "cluster.launcher=openmpi", "cluster.include=alpha@beta"),
        "slurm, whole hosts": (*three_hosts, "cluster.launcher=slurm", "cluster.include=alpha@beta"),
        "slurm": ("cluster=slurm", "cluster.accelerator=cuda"),
    }
    texts = [
        shown("local CPU", deepspeed_command(planned("cluster.num_procs=3"), RUN, PORT, None)),
        shown("local CUDA", deepspeed_command(on_local_gpus(1, 3), RUN, PORT, None)),
        *(shown(name, deepspeed_command(planned(*words), RUN, PORT, "10.0.0.1")) for name, words in several.items()),
        shown("one process of ours", local_worker_command("--job", "prepare")),
        shown("operators of zero=stage3 offload=nvme", operators_command(planned(*NVME))),
    ]
    goldens.compare("commands.txt", "\n".join(texts) + "\n")


NVME = ("zero=stage3", "offload=nvme", "deepspeed.zero_optimization.offload_optimizer.nvme_path=/nvme")


def test_only_the_plans_path_follows_the_script(three_hosts: tuple[str, ...]) -> None:
    """khanrc/honeybee#24 and hydra#2038: flags behind the script, or --local_rank, reached the wrong parser."""
    secretive = planned(*three_hosts, 'cluster.env.NOTE="50% $(id) ; rm"', "run.name=x")
    for plan in (secretive, planned(), on_local_gpus(0)):
        argv = deepspeed_command(plan, RUN, PORT, "10.0.0.1")
        assert argv[argv.index(str(WORKER)) :] == [str(WORKER), "/shared/runs/a b/plan.json"]
        assert "--no_local_rank" in argv
        assert not any("$(id)" in word for word in argv)


@pytest.mark.parametrize("address", [None, ""])
def test_an_unknown_master_address_is_left_out_and_never_empty(
    address: str | None, three_hosts: tuple[str, ...]
) -> None:
    """deepspeedai/DeepSpeed#2612."""
    argv = deepspeed_command(planned(*three_hosts), RUN, PORT, address)
    assert not any(word.startswith("--master_addr") for word in argv)


def test_the_front_end_reads_a_hostfile_of_the_runs_own(three_hosts: tuple[str, ...]) -> None:
    """determined-ai/determined#4297: a file at a fixed path is overwritten by the next user."""
    argv = deepspeed_command(planned(*three_hosts), RUN, PORT, "10.0.0.1")
    assert argv[argv.index("--hostfile") + 1] == str(RUN.hostfile)
    assert RUN.hostfile.is_relative_to(RUN.path)


def test_the_runs_hostfile_has_a_slot_for_the_highest_id_of_each_chosen_host(three_hosts: tuple[str, ...]) -> None:
    plan = planned(*three_hosts, 'cluster.include="gamma@alpha:0,2"')
    assert hostfile_text(plan) == "alpha slots=3\ngamma slots=2\n"
    listed = parse_lines(hostfile_text(plan), "hosts")
    assert all(set(host.slots) <= set(listed[host.name]) for host in plan.cluster.hosts)


def test_without_a_filter_no_filter_is_passed(three_hosts: tuple[str, ...]) -> None:
    assert "--include" not in deepspeed_command(planned(*three_hosts), RUN, PORT, "10.0.0.1")


@pytest.mark.parametrize(
    ("request_words", "operators"),
    [
        ((), ["ShareMemComm", "FusedAdam"]),
        (("offload=cpu",), ["ShareMemComm", "CPUAdam"]),
        (("optim=sgd",), ["ShareMemComm"]),
        (("+deepspeed.optimizer.params.torch_adam=true",), ["ShareMemComm"]),
        (("optim=lion", "offload=cpu"), ["ShareMemComm", "CPULion"]),
        (("optim=adagrad", "offload=cpu"), ["ShareMemComm", "CPUAdagrad"]),
        (NVME, ["ShareMemComm", "CPUAdam", "AsyncIO"]),
    ],
)
def test_only_operators_the_plan_loads_are_compiled(request_words: tuple[str, ...], operators: list[str]) -> None:
    assert needed_operators(planned(*request_words)) == operators


def test_on_gpus_the_cpus_collectives_are_not_compiled() -> None:
    assert needed_operators(on_local_gpus(0, 1)) == ["FusedAdam"]


def test_the_batch_script_is_the_committed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("cluster=slurm", "cluster.accelerator=cuda", "launch.submit=sbatch", "launch.nodes=2", "launch.slots=8")
    asked = (*options, "launch.sbatch=['--partition=gpu','--time=24:00:00']")
    plan = planned(*asked, "zero=stage3")
    assert plan.world_size == 16
    script = batch_script(
        plan, RunDir("/shared/runs/it's a b"), [*asked, "zero=stage3", "tracker.tags=[a b]"], "/home/me"
    )
    for path, place in {sys.executable: "{python}", str(ROOT): "{root}"}.items():
        script = script.replace(path, place)
    goldens.compare("batch.txt", script)


def test_a_batch_job_says_what_it_needs() -> None:
    problems = refused("cluster=slurm", "launch.submit=sbatch", "cluster.accelerator=auto")
    assert [problem.where for problem in problems] == ["launch.nodes", "launch.slots"]
