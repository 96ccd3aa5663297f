"""Claims about what recipe=profile measured: what is made of it, who uses it, and which files are refused.

Run by pytest; a real run of the recipe is in tests/train/test_profile_recipe.py.
Must never read or write the cache of the user who runs the tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher import profiled
from launcher.cluster.checks import room_needed
from launcher.cluster.value import Cluster, Host
from launcher.plan import build_plan
from launcher.planner.capacity import CONTEXT_BYTES, FRAGMENTATION, Machine, capacity_of
from launcher.planner.correction import correction, fragmentation
from launcher.planner.hardware import VERSION
from launcher.rundir import write_json
from launcher.schema import RunConfig
from tests.plan.asking import composed, planned, refused

GB = 10**9
SPEEDS = {
    **{"bf16_flops_per_s": 400e12, "fp32_flops_per_s": 40e12, "memory_bytes_per_s": 3e12, "node_bytes_per_s": 300e9},
    **{"pcie_bytes_per_s": 50e9, "host_memory_bytes_per_s": 200e9, "memory_bytes": 80 * GB},
}
ASKED = ("model=llama_7b", "zero=stage2", "precision=bf16", "train.micro_batch_size=1", "train.sequence_length=2048")
HERE = ("cluster.num_procs=2",)
MEASURED: dict[str, Any] = {"device": "Some chip", "ranks_per_host": 2} | SPEEDS
FILE = {
    "version": VERSION,
    "device": "Some chip",
    "date": "2026-01-02",
    "model": "llama_7b",
    "utilisation": 0.3,
} | SPEEDS


def corrected(tokens_per_s: float | None, **measured: Any) -> dict[str, Any]:
    """hardware.json of a run of ASKED that took so many tokens a second."""
    result = {"tokens_per_s": tokens_per_s, "hardware": MEASURED | measured}
    return correction(planned(*ASKED, *HERE), result, "2026-01-02")


def file_of(folder: Path, **content: Any) -> str:
    (folder / "hardware.json").write_text(json.dumps(content))
    return f"hardware.file={folder}/hardware.json"


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what this machine's devices are taken to be, in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(profiled, "device_name", lambda cluster: "Some chip")
    file = tmp_path / "zerolaunch" / "hardware" / "some-chip.json"
    file.parent.mkdir(parents=True)
    write_json(file, FILE)
    return file


def used(*overrides: str) -> tuple[RunConfig, dict[str, str]]:
    return profiled.with_measured(composed(*overrides), {})


# --- what is made of a run -------------------------------------------------------------------------------------------


def test_a_plan_with_the_numbers_of_a_run_estimates_the_time_that_it_took(tmp_path: Path) -> None:
    content = corrected(tokens_per_s=9000.0)
    time = planned(*ASKED, *HERE, file_of(tmp_path, **content)).estimate.time
    assert time is not None
    assert time.tokens_per_s == pytest.approx(9000.0, rel=1e-6)
    assert 0 < content["utilisation"] < 1


def test_a_step_that_computed_faster_than_was_measured_has_shown_a_higher_peak(tmp_path: Path) -> None:
    """bf16 on a CPU without its instructions: a large square product is a hundred times slower than a step's."""
    content = corrected(9000.0, bf16_flops_per_s=4e12)
    assert content["utilisation"] == 1.0
    time = planned(*ASKED, *HERE, file_of(tmp_path, **content)).estimate.time
    assert time is not None
    assert time.tokens_per_s == pytest.approx(9000.0, rel=1e-6)
    usual = corrected(9000.0)
    assert content["bf16_flops_per_s"] == pytest.approx(usual["bf16_flops_per_s"] * usual["utilisation"], rel=1e-6)


def test_a_step_faster_than_its_links_were_measured_leaves_the_peak_as_it_was() -> None:
    content = corrected(9e9)
    assert (content["utilisation"], content["bf16_flops_per_s"]) == (1.0, SPEEDS["bf16_flops_per_s"])


def test_a_step_that_is_not_computing_leaves_a_higher_utilisation() -> None:
    """Of a step of equal length, the more goes to a slow link the faster was the rest."""
    fast, slow = corrected(6000.0), corrected(6000.0, node_bytes_per_s=100e9)
    assert slow["utilisation"] > fast["utilisation"]


def test_what_was_not_measured_is_absent() -> None:
    content = corrected(None)
    assert {"utilisation", "fragmentation", "context_bytes", "disk_bytes_per_s"} & content.keys() == set()
    assert content["version"] == VERSION


def test_a_profile_needs_no_room_for_a_checkpoint() -> None:
    """A full disk is no reason to refuse five steps that save nothing."""
    assert (
        room_needed(planned(*ASKED, *HERE, "recipe=profile"), 0)[""] == 0 < room_needed(planned(*ASKED, *HERE), 0)[""]
    )


def test_fragments_are_told_by_a_run_that_used_the_gpu() -> None:
    whole = {"memory_bytes": 80 * GB, "reserved_bytes": 50 * GB}
    assert fragmentation(whole | {"allocated_bytes": 45 * GB}) == pytest.approx(0.1)
    assert fragmentation({"memory_bytes": 80 * GB, "reserved_bytes": 2 * GB, "allocated_bytes": GB}) is None
    assert fragmentation({}) is None


# --- who uses it -----------------------------------------------------------------------------------------------------


def test_a_request_that_names_no_hardware_gets_what_was_measured_here(known: Path) -> None:
    config, origin = used(*ASKED, *HERE)
    assert config.hardware.name == "Some chip, measured by recipe=profile on 2026-01-02 with model=llama_7b"
    assert (config.hardware.utilisation, config.hardware.node_bytes_per_s) == (0.3, 300e9)
    assert origin["hardware.utilisation"] == f"solved: {known}"
    assert build_plan(config, {}).estimate.time is not None


@pytest.mark.parametrize("named", ["hardware=h200", "hardware.node_bytes_per_s=1.0e+9"])
def test_named_hardware_stays_as_it_is_named(known: Path, named: str) -> None:
    assert used(*HERE, named) == (composed(*HERE, named), {})


def test_another_machine_is_not_corrected_by_this_one(known: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("alpha slots=8\nbeta slots=8\n")
    words = ("cluster=hostfile", f"cluster.hostfile={tmp_path}/hosts", "cluster.accelerator=cuda")
    assert used(*words)[1] == {}


@pytest.mark.parametrize("content", [{"version": VERSION + 1}, {"utilisation": "much"}])
def test_a_kept_file_that_cannot_be_used_is_as_if_nothing_had_been_measured(
    known: Path, content: dict[str, Any]
) -> None:
    write_json(known, FILE | content)
    assert used(*HERE) == (composed(*HERE), {})


def test_the_reserve_is_the_measured_context_and_fragmentation(tmp_path: Path) -> None:
    config = composed(*HERE, file_of(tmp_path, memory_bytes=80 * GB, context_bytes=2 * GB, fragmentation=0.05))
    assumed = composed(*HERE, "hardware.memory_bytes=80000000000")
    cluster = Cluster((Host("localhost", (0, 1)),), "cuda", True)
    usable = [capacity_of(each, cluster, Machine(None, None)) for each in (config, assumed)]
    assert [each.device_bytes for each in usable if each is not None] == [
        round(78 * GB * 0.95),
        round((80 * GB - CONTEXT_BYTES) * (1 - FRAGMENTATION)),
    ]


def test_what_mode_check_prints_as_json_can_be_named(tmp_path: Path) -> None:
    said = {"ok": True, "findings": [], "measured": {"all_reduce": {}, "hardware": {"node_bytes_per_s": 100e9}}}
    slow, fast = (
        planned(*ASKED, *HERE, "hardware=h200", *words).estimate.time for words in ([file_of(tmp_path, **said)], [])
    )
    assert slow is not None and fast is not None and slow.node_s > 4 * fast.node_s > 0


# --- which files are refused -----------------------------------------------------------------------------------------


def test_a_file_of_another_version_says_how_to_measure_again(tmp_path: Path) -> None:
    word = file_of(tmp_path, **(FILE | {"version": 7}))
    problem = refused(word)[0]
    assert (problem.where, problem.why) == ("hardware.file", f"this product reads version {VERSION}")
    assert problem.got.endswith("hardware.json: version 7") and "recipe=profile" in (problem.fix or "")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"utilisation": 1.5}, "not a share"),
        ({"utilisation": 0}, "not a share"),
        ({"fragmentation": 1}, "not a share"),
        ({"context_bytes": -1}, "not a number of bytes"),
        ({"fragmentation": "none"}, "not a share"),
        ({"node_bytes_per_s": True}, "not a number above 0"),
    ],
)
def test_nonsense_in_a_file_is_refused_by_its_name(tmp_path: Path, content: dict[str, Any], why: str) -> None:
    problem = refused(file_of(tmp_path, **(FILE | content)))[0]
    name, value = next(iter(content.items()))
    assert problem.where.endswith(f"hardware.json: {name}") and problem.got == repr(value)
    assert problem.why == why and problem.fix
