"""Claims about what this machine says of its memory: the container's limit counts, and a driver that is silent is none.

Run by pytest; a script stands for nvidia-smi.
Must never need a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import machine
from launcher.cluster.value import Cluster, Host
from launcher.machine import MIB, device_name, gpu_bytes, host_bytes, this_machine

CARDS = "0, 81559\n1, 40960\n3, 24564\n"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The nvidia-smi of this test, which says CARDS."""
    script = tmp_path / "nvidia-smi"
    script.write_text(
        f"#!/bin/sh\nprintf '{CARDS}'\n".replace("\n1", "\\n1").replace("\n3", "\\n3").replace("\n'", "\\n'")
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return script


def hosts(accelerator: str, slots: tuple[int, ...], local: bool = True) -> Cluster:
    return Cluster((Host("here", slots),), accelerator, local)


def test_the_smallest_of_the_used_gpus_counts(smi: Path) -> None:
    assert gpu_bytes((0,)) == 81_559 * MIB
    assert gpu_bytes((0, 1)) == 40_960 * MIB
    assert gpu_bytes((7,)) is None


@pytest.mark.parametrize("script", ["exit 9", "echo No devices were found", "echo '0, [N/A]'"])
def test_a_driver_that_does_not_say_is_not_known(smi: Path, script: str) -> None:
    smi.write_text(f"#!/bin/sh\n{script}\n")
    assert gpu_bytes((0,)) is None


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_bytes((0,)) is None


@pytest.mark.parametrize(("limit", "expected"), [("1000000\n", 1_000_000), ("max\n", 2_048_000), (None, 2_048_000)])
def test_a_containers_limit_is_its_memory(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       2000 kB\nMemFree:        1000 kB\n")
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "memory.max")
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit)
    assert host_bytes() == expected


def test_other_machines_are_not_asked_for(smi: Path) -> None:
    elsewhere = this_machine(hosts("cuda", (0, 1), local=False))
    assert (elsewhere.host_bytes, elsewhere.device_bytes) == (None, None)
    assert this_machine(hosts("cuda", (0, 1))).device_bytes == 40_960 * MIB
    assert this_machine(hosts("cpu", (0, 1))).device_bytes is None


@pytest.mark.parametrize(
    ("said", "slots", "expected"),
    [
        ("0, Chip A\\n1, Chip A\\n", (0, 1), "Chip A"),
        ("0, Chip A\\n1, Chip B\\n", (0, 1), None),
        ("0, Chip A\\n1, Chip B\\n", (1,), "Chip B"),
        ("no devices\\n", (0,), None),
    ],
)
def test_gpus_have_one_name_or_none(smi: Path, said: str, slots: tuple[int, ...], expected: str | None) -> None:
    smi.write_text(f"#!/bin/sh\nprintf '{said}'\n")
    assert device_name(hosts("cuda", slots)) == expected


def test_the_name_of_a_cpu_says_how_many_ranks_share_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What each of two ranks can do is not what one can."""
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU\n")
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    names = [device_name(hosts("cpu", slots)) for slots in ((0,), (0, 1))]
    assert names[0] != names[1] and all(name is not None and name.startswith("Some CPU, ") for name in names)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "none")
    assert device_name(hosts("cpu", (0,))) is None
