"""Claims about a step's computation and time: FLOPs by the published formula, seconds from bytes and speeds.

Run by pytest. A step's time is an estimate; what is claimed here is what it is made of.
Must never take a FLOP count from the code it checks.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from launcher.plan import Estimate
from launcher.plan_words import head, moved
from launcher.planner.timing import UTILISATION, StepTime
from tests.plan.asking import CONF, composed, planned, refused, refuses

STEP = ("precision=bf16", "train.micro_batch_size=1", "train.gradient_accumulation_steps=1")
PARTS = ("compute_s", "node_s", "network_s", "pcie_s", "optimizer_s", "disk_s")
MEASURED = ("context_bytes", "fragmentation", "utilisation")
SLOW = "hardware.network_bytes_per_s=1.0e+9"


def estimate(*overrides: str) -> Estimate:
    """Of a step of 2,048 tokens a rank."""
    return planned(*STEP, "train.sequence_length=2048", *overrides).estimate


def timed(*overrides: str) -> StepTime:
    """On H200 unless the overrides say otherwise."""
    given = estimate(
        *(() if any(word.startswith("hardware=") for word in overrides) else ("hardware=h200",)), *overrides
    )
    assert given.time is not None
    return given.time


def two_hosts(folder: Path) -> tuple[str, ...]:
    """A cluster of two hosts with eight GPUs each."""
    (folder / "hosts").write_text("alpha slots=8\nbeta slots=8\n")
    return ("cluster=hostfile", f"cluster.hostfile={folder}/hosts", "cluster.accelerator=cuda")


# --- FLOPs -----------------------------------------------------------------------------------------------------------


def test_flops_of_a_dense_model_are_those_of_the_published_formula() -> None:
    """Narayanan et al., 2021: 72 B s l h^2 (1 + s / 6h + V / 12 l h) without recomputation; half the scores are causal.

    It leaves out biases, norms and what the optimizer does: under 0.1 % at this width.
    """
    batch, length, layers, hidden, vocabulary = 2, 1024, 48, 1600, 50257
    scores, head = length / (12 * hidden), vocabulary / (12 * layers * hidden)
    published = 72 * batch * length * layers * hidden**2 * (1 + scores + head)
    ours = planned("model=gpt2_xl", "zero=stage2", *STEP, f"train.sequence_length={length}").estimate.flops
    assert ours == pytest.approx(published, rel=1e-3)


def test_flops_follow_the_parameters_that_a_token_uses() -> None:
    """AlexsJones/llmfit#230: 12.9e9 of 46.7e9; the plan carries both."""
    found = estimate("model=mixtral_8x7b", "zero=stage3")
    assert (found.parameters or 0) / (found.active_parameters or 1) == pytest.approx(46.7 / 12.9, rel=0.005)
    assert found.flops == pytest.approx(6 * 12.75e9 * 2 * 2048, rel=0.05)  # the looked-up table less, attention more


def test_flops_of_frozen_weights_leave_their_gradients_out() -> None:
    """Two thirds of full training, less what attention costs both of them."""
    lora = ("peft=lora", "peft.rank=8", "peft.target=[q_proj,v_proj]", "model=llama_7b", "zero=stage2")
    whole, adapted = estimate("model=llama_7b", "zero=stage2").flops, estimate(*lora).flops
    assert 2 / 3 < (adapted or 0) / (whole or 1) < 0.69


def test_a_model_of_unknown_shapes_has_no_flops_and_no_time() -> None:
    config = ("model.config.model_type=falcon", "hardware=h200")
    assert (planned(*config).estimate.flops, planned(*config).estimate.time) == (None, None)


# --- time ------------------------------------------------------------------------------------------------------------


def test_without_hardware_there_is_no_time() -> None:
    assert estimate("model=llama_7b", "zero=stage2").time is None


@pytest.mark.parametrize("hardware", sorted(path.stem for path in (CONF / "hardware").glob("*.yaml")))
def test_every_shipped_hardware_times_every_link(hardware: str) -> None:
    numbers = dataclasses.asdict(composed(f"hardware={hardware}").hardware)
    unknown = {name for name, value in numbers.items() if value is None}
    assert unknown == {
        "none": numbers.keys() - {"name"},
        "cpu": {"file", "memory_bytes", *MEASURED},
    }.get(hardware, {"file", *MEASURED})


def test_the_parts_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    found = timed("model=llama_70b", "zero=stage3", "offload=cpu_all", "activation=full", *two_hosts(tmp_path))
    assert sum(getattr(found, name) for name in PARTS) == pytest.approx(found.step_s)
    assert found.tokens_per_s == pytest.approx(16 * 2048 / found.step_s)
    assert min(found.compute_s, found.pcie_s, found.optimizer_s) > 0 and found.disk_s == 0


def test_compute_is_flops_over_the_peak_at_the_stated_utilisation() -> None:
    found, flops = timed("model=llama_7b", "zero=stage2"), estimate("model=llama_7b", "zero=stage2").flops
    assert found.compute_s == pytest.approx((flops or 0) / 2 / (989.5e12 * UTILISATION))
    assert found.mfu < UTILISATION and found.bound == "compute"


def test_recomputation_adds_a_forward_of_the_layers() -> None:
    plain, again = (timed("model=llama_7b", "zero=stage2", f"activation={kind}") for kind in ("none", "full"))
    assert 1.30 < again.compute_s / plain.compute_s < 1 + 1 / 3
    assert again.mfu < plain.mfu  # recomputation is no work of the model


def test_a_slow_network_bounds_a_step_across_hosts(tmp_path: Path) -> None:
    """And hpZ, which keeps the backward's gathers within a host, takes less of it."""
    words = ("model=llama_7b", "zero=stage3", SLOW, *two_hosts(tmp_path))
    plain, near = timed(*words), timed(*words, "zeropp=hpz")
    assert plain.bound == "network"
    assert near.network_s < 0.8 * plain.network_s


def test_a_link_of_unknown_speed_gives_no_time(tmp_path: Path) -> None:
    words = ("model=llama_7b", "zero=stage3", "hardware=h200", *two_hosts(tmp_path))
    assert estimate(*words).time is not None
    assert estimate(*words, "hardware.network_bytes_per_s=null").time is None


def test_the_optimizer_in_host_memory_takes_longer_than_in_the_devices() -> None:
    device, host = (timed("model=llama_7b", "zero=stage2", f"offload={where}") for where in ("none", "cpu"))
    assert host.optimizer_s > device.optimizer_s
    assert (device.pcie_s, host.pcie_s > 0) == (0, True)


# --- links -----------------------------------------------------------------------------------------------------------


def test_one_rank_sends_nothing() -> None:
    """deepspeedai/DeepSpeed#237."""
    found = estimate("model=llama_7b", "zero=stage3", "cluster.num_procs=1")
    assert (found.collectives, found.links) == ((), {})


def test_stages_1_and_2_really_send_three_times_the_weights() -> None:
    """The textbook's reduce-scatter is an all-reduce in DeepSpeed 0.19.8, unless gradients go to their owners alone."""
    parameters = estimate("model=llama_7b", "zero=stage2").parameters or 0
    one_way = 2 * parameters * (8 - 1) / 8
    ranks = ("model=llama_7b", "zero=stage2", "cluster.num_procs=8")
    owners = "deepspeed.zero_optimization.use_multi_rank_bucket_allreduce=false"
    assert estimate(*ranks).links["node"] == pytest.approx(3 * one_way, rel=1e-6)
    assert estimate(*ranks, owners).links["node"] == pytest.approx(2 * one_way, rel=1e-6)


def test_zeropp_leaves_a_quarter_of_stage_3_between_hosts(tmp_path: Path) -> None:
    """The ZeRO++ paper: 3 become about 0.75 in units of the weights; int8 gathers, then int4 gradients of 8 ranks."""
    words = ("model=llama_7b", "zero=stage3", *two_hosts(tmp_path))
    plain, less = (estimate(*words, *more).links["network"] for more in ((), ("zeropp=full",)))
    assert 0.15 < less / plain < 0.3


def test_nvme_moves_the_whole_optimizer_state_both_ways() -> None:
    """Masters, moments and gradients: 16 bytes a parameter read and written."""
    path = "deepspeed.zero_optimization.offload_optimizer.nvme_path=/nvme"
    found = estimate("model=llama_7b", "zero=stage3", "offload=nvme", path)
    assert found.links["disk_read"] == found.links["disk_write"] == 16 * -(-(found.parameters or 0) // 2)


# --- hardware.file ---------------------------------------------------------------------------------------------------


def test_measured_numbers_go_before_the_groups(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text(json.dumps({"bf16_flops_per_s": 989.5e12 / 2, "pcie_bytes_per_s": None}))
    words = ("model=llama_7b", "zero=stage2")
    ratio = timed(*words, f"hardware.file={tmp_path}/measured.json").compute_s / timed(*words).compute_s
    assert ratio == pytest.approx(2)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "it cannot be read"), ('{"speed": 1}', "none of the numbers"), ('{"memory_bytes": "80G"}', "above 0")],
)
def test_a_file_without_numbers_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "measured.json").write_text(content)
    with refuses(said):
        planned(f"hardware.file={tmp_path}/measured.json")
    problems: Any = refused(f"hardware.file={tmp_path}/measured.json")
    assert len(problems) == 1


# --- on screen -------------------------------------------------------------------------------------------------------


def test_a_plan_says_what_a_step_sends_and_how_long_it_takes(tmp_path: Path) -> None:
    """AlexsJones/llmfit#230 asks for both sizes of a model with experts."""
    words = (*STEP, "model=mixtral_8x7b", "zero=stage3", SLOW, *two_hosts(tmp_path), "train.sequence_length=2048")
    shown = planned(*words, "hardware=h200")
    assert "46,702,792,704 parameters, of which a token uses 12,879,925,248" in dict(head(shown))["model"]
    said = dict(moved(shown))
    assert "GB sent by a host to others" in said["each step"] and "textbook" in said["each step"]
    assert "a step on h200, most of it network" in said["time"]
    assert "time" not in dict(moved(planned(*words)))
