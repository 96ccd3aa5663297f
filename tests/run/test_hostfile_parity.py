"""Claims that DeepSpeed's own launcher reads our hostfiles, filters and commands as we mean them.

Run by pytest; one process imports DeepSpeed and answers for all cases.
Must never start a launch.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from launcher.cluster.hostfile import parse_lines
from launcher.command import WORKER, deepspeed_command, hostfile_text
from launcher.plan import Plan
from launcher.rundir import RunDir
from tests.plan.asking import planned

# Reads {hostfiles: [[text, include], ...], commands: [argv, ...]}; answers as DeepSpeed's front-end resolves them.
THEIRS = """
import json, os, sys, tempfile
answer_to = os.dup(1)
os.dup2(2, 1)
from deepspeed.launcher.runner import fetch_hostfile, parse_args, parse_inclusion_exclusion
request = json.load(sys.stdin)
hosts = []
for text, include in request["hostfiles"]:
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        hosts.append(parse_inclusion_exclusion(fetch_hostfile(file.name), include, ""))
with os.fdopen(answer_to, "w") as out:
    json.dump({"hosts": hosts, "options": [vars(parse_args(argv)) for argv in request["commands"]]}, out)
"""
LEGAL = [
    "alpha slots=2\nbeta slots=3\n",
    "alpha slots=2\nbeta slots=3",
    "# rack A\n\nalpha slots=2 # two bad GPUs\n  beta\t slots=3# x\n\n",
    "alpha slots=0002\r\nbeta slots=3\r\n",
    "pod-0.svc.ns.local slots=2\n10.0.0.7 slots=8\nNODE_7 slots=1\ntoken-ring slots=4\n",
    "z slots=1\na slots=1024\nm slots=1\n",
]
REQUESTS: dict[str, tuple[str, ...]] = {
    "all": (),
    "a host": ("cluster.include=beta",),
    "hosts and slots": ('cluster.include="gamma:1,2@alpha"',),
    "excluded slots": ('cluster.exclude="beta:0@gamma:3"',),
    "dashes": ("cluster.launcher_args=-v", "cluster.ssh_port=2222"),
    "several words": ("cluster.launcher=openmpi", 'cluster.launcher_args="--mca btl ^openib"'),
    "slurm": ("cluster.launcher=slurm", "cluster.exclude=alpha"),
}
RUN = RunDir("/shared/runs/a b")


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """The plans of REQUESTS for three hosts."""
    path = tmp_path_factory.mktemp("hosts") / "hosts"
    path.write_text("alpha slots=2\nbeta slots=4\ngamma slots=4\n")
    where = ("cluster=hostfile", f"cluster.hostfile={path}")
    return {name: planned(*where, *words) for name, words in REQUESTS.items()}


def command(plan: Plan) -> list[str]:
    return deepspeed_command(plan, RUN, 29512, "10.0.0.1")


@pytest.fixture(scope="module")
def theirs(plans: dict[str, Plan]) -> dict[str, Any]:
    """What DeepSpeed makes of LEGAL, then of each plan's own hostfile with its filter, and of each plan's command."""
    commands = [command(plan)[1:] for plan in plans.values()]
    filters = [argv[argv.index("--include") + 1] if "--include" in argv else "" for argv in commands]
    own = [[hostfile_text(plan), words] for plan, words in zip(plans.values(), filters, strict=True)]
    request = {"hostfiles": [[text, ""] for text in LEGAL] + own, "commands": commands}
    done = subprocess.run(
        [sys.executable, "-c", THEIRS], input=json.dumps(request), stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(done.stdout))


def test_deepspeed_reads_legal_hostfiles_as_we_do(theirs: dict[str, Any]) -> None:
    ours = [parse_lines(text, "hosts") for text in LEGAL]
    answers = theirs["hosts"][: len(LEGAL)]
    assert answers == [{host: list(slots) for host, slots in hosts.items()} for hosts in ours]
    assert [list(answer) for answer in answers] == [list(hosts) for hosts in ours], "ranks follow this order"


def test_deepspeed_resolves_the_runs_hostfile_and_filter_to_the_plans_hosts(
    theirs: dict[str, Any], plans: dict[str, Plan]
) -> None:
    for plan, answer in zip(plans.values(), theirs["hosts"][len(LEGAL) :], strict=True):
        assert list(answer.items()) == [(host.name, list(host.slots)) for host in plan.cluster.hosts]


def test_deepspeed_reads_every_command_as_it_is_meant(theirs: dict[str, Any], plans: dict[str, Plan]) -> None:
    """deepspeedai/DeepSpeedExamples#575: a misplaced option became the script, and the job ran locally."""
    for plan, options in zip(plans.values(), theirs["options"], strict=True):
        section = plan.config.cluster
        assert (options["user_script"], options["user_args"]) == (str(WORKER), [str(RUN.plan)])
        assert (options["hostfile"], options["force_multi"]) == (str(RUN.hostfile), True)
        assert (options["master_addr"], options["master_port"]) == ("10.0.0.1", 29512)
        assert (options["launcher"], options["ssh_port"]) == (section.launcher, section.ssh_port)
        assert options["launcher_args"] == (section.launcher_args or "")
        assert (options["no_local_rank"], options["num_nodes"], options["num_gpus"]) == (True, -1, -1)
        if section.launcher == "openmpi":
            assert options["include"] == "", "DeepSpeed's MPI runners refuse filters"
