"""What the answers of hosts mean: every finding with its reason and its fix; a host that is fine has none.

Run by pytest. The probe itself runs here once, on this machine; hosts are told of in its words.
Must never start anything.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.cluster.checks import FAIL, OK, WARN, interface_matches
from launcher.cluster.preflight import Answer, Finding, collective_findings, failed, judge, request, unreachable
from launcher.onhost import probe
from launcher.plan import Plan
from launcher.rundir import RunDir
from tests.plan.asking import planned

TOKEN = "the token"
GPU = {"uuid": "GPU-1", "name": "NVIDIA H100", "total_mib": "81559", "used_mib": "0", "driver": "570.1", "users": []}
FINE: dict[str, Any] = {
    "identity": {"hostname": "alpha", "user": "root", "cores": 16},
    "versions": {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.1", "numpy": "2.3"},
    "code": "c0de",
    "folders": {"/shared": {"exists": True, "free_bytes": 10**15, "writable": True}},
    "token": TOKEN,
    "missing_files": [],
    "interfaces": ["eth0", "lo"],
    "own_address": "10.0.0.1",
    "gpus": [GPU | {"index": index} for index in range(4)],
    "limits": {"open_files": 65536, "locked_bytes": -1, "shm_free_bytes": 10**11},
    "memory": 10**12,
    "cpu_fp16": None,
    "operators": {"missing": [], "tools_missing": []},
    "master": {"ok": True, "address": "10.0.0.1"},
}

Change = Callable[[dict[str, Any]], None]
HERE = {name: FINE[name] for name in ("versions", "code", "gpus")} | {"checkpoints": 0}


def answers(plan: Plan, change: Change | None = None, **fields: Any) -> list[Answer]:
    """Two hosts, alpha and beta; beta is as `change` leaves it."""
    found = []
    for host in plan.cluster.hosts:
        facts = copy.deepcopy(FINE)
        if host.name == "beta" and change is not None:
            change(facts)
        found.append(Answer(host.name, facts, "", 0.0, 0.5))
    found[-1] = Answer(**(vars(found[-1]) | fields))
    return found


def findings(plan: Plan, change: Change | None = None, **fields: Any) -> list[Finding]:
    """What is not ok about those hosts."""
    return [finding for finding in judge(plan, HERE, answers(plan, change, **fields), TOKEN) if finding.status != OK]


def assign(path: str, value: Any) -> Change:
    """Sets facts[a][b] for path "a.b"."""

    def change(facts: dict[str, Any]) -> None:
        *blocks, last = path.split(".")
        for block in blocks:
            facts = facts[int(block) if block.isdigit() else block]
        facts[last] = value

    return change


@pytest.fixture(scope="module")
def gpus(two_hosts: tuple[str, ...]) -> Plan:
    return planned(*two_hosts, "zero=stage3", "offload=cpu", "precision=bf16", "model=llama_1b")


def test_hosts_that_are_fine_have_nothing_found(gpus: Plan) -> None:
    assert findings(gpus) == []
    everything = judge(gpus, HERE, answers(gpus), TOKEN)
    assert not failed(everything)
    assert {finding.host for finding in everything} == {"alpha", "beta"}


USER = {"pid": 4711, "used_mib": "30000", "user": "somebody"}
CASES = [
    ("versions", FAIL, assign("versions.torch", "2.12.0"), "torch 2.12.0 (here 2.13.0)"),
    ("versions", FAIL, assign("versions.transformers", None), "transformers missing (here 5.1)"),
    ("versions", FAIL, assign("versions.python", "3.12.1"), "python 3.12.1 (here 3.11.7)"),
    ("code", FAIL, assign("code", "beef"), "beef, here c0de"),
    ("code", FAIL, assign("code", None), "no /"),
    ("folders", FAIL, assign("folders./shared.exists", False), "/shared: missing"),
    ("folders", FAIL, assign("folders./shared.free_bytes", 10**9), "1.0 GB free of"),
    ("missing_files", FAIL, assign("missing_files", ["/models/x"]), "/models/x: missing"),
    ("accelerators", FAIL, assign("gpus", None), "no nvidia-smi"),
    ("accelerators", FAIL, assign("gpus", {"error": "Driver/library version mismatch"}), "version mismatch"),
    ("accelerators", FAIL, assign("gpus", [GPU | {"index": 0}]), "1 GPUs, slots 1,2,3 missing"),
    ("accelerators", FAIL, assign("gpus.2.users", [USER]), "GPU 2: process 4711 of somebody, 30000 MiB"),
    ("rendezvous", FAIL, assign("master", {"ok": False, "error": "timed out", "address": "10.0.0.1"}), "timed out"),
    ("rendezvous", FAIL, assign("listens", {"ok": False, "error": "Address already in use"}), "already in use"),
    ("limits", FAIL, assign("limits.shm_free_bytes", 64 * 2**20), "/dev/shm: 67 MB free of 256 MB"),
    ("limits", WARN, assign("limits.open_files", 1024), "1024 open files"),
    ("limits", WARN, assign("limits.locked_bytes", 65536), "65536 bytes may be locked"),
    ("memory", FAIL, assign("memory", 10**9), "1.0 GB free of"),
    ("operators", WARN, assign("operators.missing", ["CPUAdam"]), "CPUAdam not compiled"),
    ("shared_folder", FAIL, assign("token", None), "does not see what this machine writes"),
    ("shared_folder", FAIL, assign("token", "another"), "another file of that name"),
]


@pytest.mark.parametrize(
    ("check", "status", "change", "got"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_one_thing_that_is_wrong_is_one_finding_that_names_the_host(
    gpus: Plan, check: str, status: str, change: Change, got: str
) -> None:
    """deepspeedai/Megatron-DeepSpeed#126 among them: a folder that one host lacks."""
    [finding] = findings(gpus, change)
    assert (finding.host, finding.check, finding.status) == ("beta", check, status)
    assert got in finding.got and finding.why and finding.fix


def test_operators_that_could_not_be_compiled_fail(gpus: Plan) -> None:
    [finding] = findings(gpus, assign("operators", {"missing": ["CPUAdam"], "tools_missing": ["c++"]}))
    assert finding.status == FAIL and "no c++" in finding.got


@pytest.mark.parametrize(("skew", "status"), [(1.0, None), (-5.0, WARN), (3600.0, FAIL)])
def test_clocks(gpus: Plan, skew: float, status: str | None) -> None:
    assert [finding.status for finding in findings(gpus, skew_s=skew)] == ([status] if status else [])


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("root@beta: Permission denied (publickey,password).", "it wants a password or has no key of ours"),
        ("Host key verification failed.", "its key is not known here"),
        ("ssh: Could not resolve hostname beta: Name or service not known", "its name has no address here"),
        ("ssh: connect to host beta port 22: Connection refused", "nothing listens on its SSH port"),
        ("timed out after 20 s", "it did not answer in time"),
        ("bash: line 1: /opt/env/bin/python: No such file or directory", "this interpreter is not there"),
        ("exit code 255", "SSH must work without a prompt"),
    ],
)
def test_a_host_that_does_not_answer_fails_with_what_ssh_said(gpus: Plan, error: str, why: str) -> None:
    """deepspeedai/DeepSpeed#4907: only the first host was looked at; the others hung later."""
    [finding] = findings(gpus, facts=None, error=error)
    assert (finding.host, finding.check, finding.status, finding.got) == ("beta", "reachable", FAIL, error)
    assert (finding.why, finding.fix) == unreachable(error, "beta", None) and finding.why == why


def test_every_bad_host_is_told_of_at_once(gpus: Plan) -> None:
    def change(facts: dict[str, Any]) -> None:
        facts["versions"]["torch"], facts["code"], facts["token"] = "2.12.0", "beef", None

    assert [finding.check for finding in findings(gpus, change)] == ["versions", "code", "shared_folder"]


@pytest.mark.parametrize(
    ("wanted", "interfaces", "fits"),
    [
        ("eth", ["eth0", "lo"], True),
        ("eno1", ["eth0", "lo"], False),
        ("eno,eth", ["eth0", "lo"], True),
        ("=eth", ["eth0", "lo"], False),
        ("=eth0", ["eth0", "lo"], True),
        ("^eth", ["eth0", "lo"], False),
        ("^docker", ["docker0", "eth0", "lo"], True),
    ],
)
def test_interfaces_are_read_as_nccl_reads_them(wanted: str, interfaces: list[str], fits: bool) -> None:
    assert interface_matches(wanted, interfaces) is fits


def test_an_interface_that_one_host_lacks_is_found(two_hosts: tuple[str, ...]) -> None:
    """NVIDIA/nccl#286: eno1 on one host, eth0 on the other."""
    plan = planned(*two_hosts, "zero=stage2")
    plan = Plan(**(vars(plan) | {"env": {"NCCL_SOCKET_IFNAME": "eth0"}}))
    [finding] = findings(plan, assign("interfaces", ["eno1", "lo"]))
    assert (finding.check, finding.status) == ("interface", FAIL)
    assert finding.got == "NCCL_SOCKET_IFNAME=eth0; it has eno1, lo"


def test_on_cpu_a_name_that_leads_to_loopback_is_found(two_hosts: tuple[str, ...]) -> None:
    plan = planned(*two_hosts[:2], "cluster.accelerator=cpu")
    assert findings(plan) == []
    [finding] = findings(plan, assign("own_address", "127.0.1.1"))
    assert (finding.host, finding.check, finding.status) == ("beta", "own_name", FAIL)


@pytest.mark.parametrize(
    ("able", "status"), [(True, None), (False, FAIL), ({"error": "TimeoutExpired: 15 s"}, WARN), (None, None)]
)
def test_a_cpu_that_does_not_compute_in_fp16_is_found(
    two_hosts: tuple[str, ...], able: bool | dict[str, str] | None, status: str | None
) -> None:
    """DeepSpeed says so on the ranks, once the model is built."""
    plan = planned(*two_hosts[:2], "cluster.accelerator=cpu", "precision=fp16")
    found = [(finding.host, finding.check, finding.status) for finding in findings(plan, assign("cpu_fp16", able))]
    assert found == ([("beta", "precision", status)] if status else [])


@pytest.mark.parametrize(
    ("accelerator", "precision", "asked"),
    [("cpu", "fp16", True), ("cpu", "bf16", False), ("cuda", "fp16", False)],
)
def test_torch_is_asked_for_fp16_only_where_a_cpu_would_compute_in_it(
    two_hosts: tuple[str, ...], tmp_path: Path, accelerator: str, precision: str, asked: bool
) -> None:
    plan = planned(*two_hosts[:2], f"cluster.accelerator={accelerator}", f"precision={precision}", "zero=stage2")
    found = request(plan, plan.cluster.hosts[0], RunDir(tmp_path / "run"), tmp_path / "token", None, 0)
    assert found["cpu_fp16"] is asked
    assert asked or probe.cpu_fp16(found) is None


def test_two_names_of_one_machine_are_found(gpus: Plan) -> None:
    """deepspeedai/DeepSpeed#2626: aliases pass a look at the file and oversubscribe the GPUs."""
    twice = answers(gpus, assign("identity.machine", "m1"))
    assert not failed(judge(gpus, HERE, twice, TOKEN))
    assert twice[0].facts is not None
    twice[0].facts["identity"]["machine"] = "m1"
    [finding] = [finding for finding in judge(gpus, HERE, twice, TOKEN) if finding.status != OK]
    assert (finding.host, finding.check, finding.got) == ("beta", "own_machine", "the same machine as alpha")


def test_a_slow_pair_of_hosts_is_named(gpus: Plan) -> None:
    pairs = [
        {"hosts": ["a", "b"], "gb_per_s": 10.0},
        {"hosts": ["a", "c"], "gb_per_s": 9.0},
        {"hosts": ["b", "c"], "gb_per_s": 2.0},
    ]
    reduce = {"bytes": 10**6, "ranks": 3, "gb_per_s": 5.0, "seconds": 0.1}
    found = collective_findings(gpus, {"all_reduce": reduce, "pairs": pairs})
    assert [(finding.host, finding.status) for finding in found] == [("all hosts", OK), ("b - c", WARN)]


def test_the_probe_looks_at_this_machine_and_leaves_nothing(tmp_path: Path) -> None:
    plan = planned("zero=stage2")
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    asked = request(plan, plan.cluster.hosts[0], RunDir(tmp_path / "run"), token_file, None, 0)
    facts = {name: look(asked) for name, look in probe.LOOKS.items()}
    assert not [name for name, value in facts.items() if isinstance(value, dict) and "error" in value]
    assert facts["token"] == TOKEN and facts["missing_files"] == []
    assert facts["folders"][str(tmp_path)]["writable"] is True
    assert facts["versions"]["deepspeed"] == "0.19.8" and len(facts["code"]) == 16
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    found = judge(plan, facts | {"checkpoints": 0}, [Answer(plan.cluster.hosts[0].name, facts, "", 0.0, 0.1)], TOKEN)
    assert [finding for finding in found if finding.status == FAIL and finding.check != "operators"] == []
