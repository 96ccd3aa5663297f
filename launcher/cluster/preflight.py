"""Preflight without the wires: what each host is asked, and what its answers mean. Pure.

`launcher.check` sends the requests and shows the findings; `launcher.onhost.probe` answers on the host.
Must never pass over a host that did not answer.
"""

from __future__ import annotations

import collections
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.cluster.checks import CHECKS, FAIL, NCCL, OK, WARN, needs_cpu_fp16
from launcher.cluster.value import Host
from launcher.command import ROOT, needed_operators
from launcher.plan import Plan
from launcher.rundir import RunDir

# Compared between the hosts and this machine.
DISTRIBUTIONS = ("torch", "deepspeed", "transformers", "numpy", *NCCL)
CLOCK_WARN_S, CLOCK_FAIL_S = 2.0, 60.0
SLOW_PAIR = 0.5  # of the median bandwidth between two hosts
# What lies in the folder of a compiled operator, by DeepSpeed's name of its builder.
OPERATOR_FILES = {
    "ShareMemComm": "deepspeed_shm_comm",
    "FusedAdam": "fused_adam",
    "CPUAdam": "cpu_adam",
    "CPULion": "cpu_lion",
    "CPUAdagrad": "cpu_adagrad",
    "AsyncIO": "async_io",
}


@dataclass(frozen=True)
class Finding:
    """One check of one host: what was found, and for anything but ok why it matters and what to do."""

    host: str
    check: str
    status: str
    got: str
    why: str = ""
    fix: str = ""


@dataclass(frozen=True)
class Answer:
    """What came back from a host. `facts` is None when nothing did: then `error` says what was seen instead."""

    host: str
    facts: dict[str, Any] | None
    error: str
    skew_s: float
    """Its clock minus ours; late by the time the answer travelled."""
    seconds: float


def request(plan: Plan, host: Host, run: RunDir, token_file: Path, address: str | None, port: int) -> dict[str, Any]:
    """What `onhost.probe.main` is asked on `host`; plain JSON. `address`: of the rendezvous, None on one host."""
    zero = plan.deepspeed.get("zero_optimization", {})
    writes = {str(token_file.parent)}
    for what in ("optimizer", "param"):
        block = zero.get(f"offload_{what}") or {}
        if block.get("device") == "nvme":
            writes.add(str(block["nvme_path"]))
    folders = {path: {"write": True} for path in sorted(writes)}
    files = [path for path in (plan.config.model.path, plan.config.run.source) if path]
    files += [plan.resume_from] if plan.resume_from else []
    return {
        "root": str(ROOT),
        "distributions": list(DISTRIBUTIONS),
        "folders": folders,
        "files": files,
        "token_file": str(token_file),
        "accelerator": plan.cluster.accelerator,
        "cpu_fp16": needs_cpu_fp16(plan),
        "master_addr": address,
        "master_port": port,
        "is_master": host == plan.cluster.hosts[0],
        "extensions": plan.env.get("TORCH_EXTENSIONS_DIR", ""),
        "operators": {name: f"{OPERATOR_FILES[name]}/*.so" for name in needed_operators(plan)},
    }


def judge(plan: Plan, here: dict[str, Any], answers: list[Answer], token: str) -> list[Finding]:
    """Every finding about every host, in the hosts' order. `here`: the facts of the machine that launches."""
    findings = []
    addresses = collections.Counter(
        str(answer.facts["own_address"]) for answer in answers if answer.facts and len(answers) > 1
    )
    for host, answer in zip(plan.cluster.hosts, answers, strict=True):
        if answer.facts is None:
            why, fix = unreachable(answer.error, host.name, plan.config.cluster.ssh_port)
            findings.append(Finding(host.name, "reachable", FAIL, answer.error or "no answer", why, fix))
            continue
        findings.append(Finding(host.name, "reachable", OK, f"{answer.seconds:.1f} s"))
        for check in CHECKS:
            for status, got, why, fix in check(plan, host, here, answer.facts):
                findings.append(Finding(host.name, check.__name__, status, got, why, fix))
        findings += _clock(host.name, answer)
        findings += _shared(host.name, answer.facts, token)
        findings += _name_is_known(plan, host.name, answer.facts, addresses)
    return findings + _same_machine(answers)


def _same_machine(answers: list[Answer]) -> list[Finding]:
    """Two names of one machine: its accelerators would be given to two ranks each."""
    names: dict[str, list[str]] = {}
    for answer in answers:
        if answer.facts and "machine" in answer.facts["identity"]:
            names.setdefault(answer.facts["identity"]["machine"], []).append(answer.host)
    why, fix = "its accelerators would be given to two ranks each", "keep one of the names, with all its slots"
    return [
        Finding(host, "own_machine", FAIL, f"the same machine as {hosts[0]}", why, fix)
        for hosts in names.values()
        for host in hosts[1:]
    ]


def collective_findings(plan: Plan, measured: dict[str, Any]) -> list[Finding]:
    """What the measured collective says: its bandwidth, and every pair of hosts that is far below the median."""
    reduce = measured["all_reduce"]
    got = f"all-reduce of {reduce['bytes'] / 1e6:.0f} MB over {reduce['ranks']} ranks: {reduce['gb_per_s']:.2f} GB/s"
    findings = [Finding("all hosts", "collective", OK, got)]
    speeds = [pair["gb_per_s"] for pair in measured["pairs"]]
    if len(speeds) > 2:
        median = statistics.median(speeds)
        for pair in measured["pairs"]:
            if pair["gb_per_s"] < SLOW_PAIR * median:
                got = f"{pair['gb_per_s']:.2f} GB/s between them, {median:.2f} between the others"
                why = "every collective waits for the slowest link"
                fix = "see cable, switch port and interface of the host that is in most slow pairs"
                findings.append(Finding(" - ".join(pair["hosts"]), "collective", WARN, got, why, fix))
    return findings


def failed(findings: list[Finding]) -> bool:
    """Whether any host may not take part."""
    return any(finding.status == FAIL for finding in findings)


def unreachable(error: str, host: str, port: int | None) -> tuple[str, str]:
    """(why, fix) of what ssh, or the shell behind it, said."""
    login = f"ssh {f'-p {port} ' if port else ''}{host} true"
    known = (
        ("Permission denied", "it wants a password or has no key of ours", f"copy your key: ssh-copy-id {host}"),
        ("Host key verification", "its key is not known here", f"accept it once: {login}"),
        ("REMOTE HOST IDENTIFICATION", "its key is another than the one known here", f"make sure, then: {login}"),
        ("Could not resolve", "its name has no address here", "correct the hostfile, or /etc/hosts"),
        ("Name or service not known", "its name has no address here", "correct the hostfile, or /etc/hosts"),
        ("Connection refused", "nothing listens on its SSH port", "start sshd there, or set cluster.ssh_port"),
        ("timed out", "it did not answer in time", f"see whether it is up: {login}"),
        ("No route", "there is no way to it", "see its network"),
        ("No such file or directory", "this interpreter is not there", "install the same environment at the same path"),
        ("not found", "this interpreter is not there", "install the same environment at the same path"),
    )
    for sign, why, fix in known:
        if sign.lower() in error.lower():
            return why, fix
    return "SSH must work without a prompt", f"make this work: {login}"


def _clock(host: str, answer: Answer) -> list[Finding]:
    got = f"{answer.skew_s:+.1f} s"
    if abs(answer.skew_s) < CLOCK_WARN_S:
        return [Finding(host, "clock", OK, got)]
    status = FAIL if abs(answer.skew_s) >= CLOCK_FAIL_S else WARN
    why = "logs, trackers and credentials of different hosts will not fit together"
    return [Finding(host, "clock", status, got, why, "start chrony or ntpd there")]


def _shared(host: str, facts: dict[str, Any], token: str) -> list[Finding]:
    if facts["token"] == token:
        return [Finding(host, "shared_folder", OK, "sees what this machine writes")]
    why = "the plan, the logs and the checkpoints lie in one folder that every host reads and writes"
    got = "another file of that name" if facts["token"] else "does not see what this machine writes"
    return [Finding(host, "shared_folder", FAIL, got, why, "put run.root on a file system that all hosts mount")]


def _name_is_known(plan: Plan, host: str, facts: dict[str, Any], seen: collections.Counter[str]) -> list[Finding]:
    """gloo listens on the address that a host's own name has: on loopback no other host finds it."""
    address = facts["own_address"]
    chosen = plan.env.get("GLOO_SOCKET_IFNAME")
    if chosen or plan.cluster.accelerator == "cuda" or sum(seen.values()) < 2:
        return []
    got = address if isinstance(address, str) else address["error"]
    if isinstance(address, str) and not re.match(r"127\.", address):
        return [Finding(host, "own_name", OK, got)]
    name = facts["identity"].get("hostname", host)
    why = f"its own name {name} does not lead to an address that other hosts reach"
    return [Finding(host, "own_name", FAIL, got, why, "correct /etc/hosts there, or cluster.env.GLOO_SOCKET_IFNAME=IF")]
