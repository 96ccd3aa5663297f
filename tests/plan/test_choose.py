"""Claims about `auto` and the gate: what is chosen fits, nothing cheaper does, and what is proposed can be pasted.

Run by pytest. Memory limits are those of a rank on CPU, where device and host are one memory.
Must never start a run: what would is replaced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher import cli as front_door
from launcher import compose, planning
from launcher.cluster.value import Cluster, resolve
from launcher.errors import EXIT_DOES_NOT_FIT, UserError
from launcher.plan import Plan
from launcher.planner.candidates import Choice, choices, lacking, with_choice
from launcher.planner.capacity import BUCKETS, CONTEXT_BYTES, PROCESS_BYTES, Capacity, Machine, capacity_of, needed
from launcher.planner.choose import Chosen, autos, choose
from launcher.planner.gate import CHANGES, FORCE, cheapest, unfit
from launcher.planner.prediction import Memory, Moment
from launcher.planner.wider import resized
from launcher.run import Outcome
from launcher.rundir import RunDir
from launcher.schema import RunConfig
from tests.plan.asking import CONF, composed, planned, refuses, unmeasured

Cli = Callable[..., Any]
BASE = ("model=llama_125m", "precision=bf16", "cluster.num_procs=4")
NVME = "deepspeed.zero_optimization.offload_optimizer.nvme_path=/nvme"
GROUPS = ("zero", "offload", "activation")
ALL_AUTO = tuple(f"{group}=auto" for group in GROUPS)


def limit(size: int) -> Capacity:
    """A rank's memory on CPU."""
    return Capacity(size, 0, None, True, "the test")


def choice_for(size: int, *overrides: str) -> Chosen:
    config = composed(*overrides)
    return choose(config, resolve(config.cluster).world_size, limit(size), unmeasured)


def peak_bytes(plan: Plan) -> int:
    """What a rank needs on CPU."""
    assert plan.estimate.memory is not None
    return needed(plan.estimate.memory, limit(0))["memory"][0]


def growing(config: RunConfig, cluster: Cluster | None = None, within: Capacity | None = None) -> Plan:
    """A plan whose activations are known: 10 MB a sample, a tenth of it where they are recomputed."""
    plan = unmeasured(config, cluster)
    memory = plan.estimate.memory
    assert memory is not None
    each = 1_000_000 if config.activation.checkpointing else 10_000_000
    terms = memory.moments[2].terms | {"activations": each * plan.batch.micro_batch_size}
    known = Memory((*memory.moments[:2], Moment("backward", terms), memory.moments[3]), memory.host, {}, True)
    return dataclasses.replace(plan, estimate=dataclasses.replace(plan.estimate, memory=known))


# --- candidates ------------------------------------------------------------------------------------------------------

EVERY = list(choices(composed(*BASE, "zero=stage3", "offload=nvme", NVME), set(GROUPS)))


def test_every_stage_offload_and_checkpointing_is_a_candidate_once() -> None:
    assert len(EVERY) == len(set(EVERY)) == 2 * (4 + 3 + 1 + 1)
    assert "nvme" not in {choice.offload for choice in choices(composed(), set(GROUPS))}


@pytest.mark.parametrize("choice", EVERY, ids=lambda choice: "-".join(map(str, dataclasses.astuple(choice))))
@pytest.mark.parametrize("base", [("zero=stage2",), ("zero=stage3", "offload=cpu_all", "activation=full")])
def test_a_candidate_is_what_its_overrides_compose_to(choice: Choice, base: tuple[str, ...]) -> None:
    path = (NVME,) if choice.offload == "nvme" else ()
    made = with_choice(composed(*BASE, *base, *path), choice)
    groups = [word for word in base if word.partition("=")[0] not in GROUPS]
    assert made == composed(*BASE, *groups, *path, *choice.overrides())


def test_a_key_within_an_offload_outlives_the_choice() -> None:
    unpinned = "deepspeed.zero_optimization.offload_optimizer.pin_memory=false"
    made = with_choice(composed("offload=auto", unpinned), Choice("stage3", "cpu_all"))
    assert made.deepspeed == composed("zero=stage3", "offload=cpu_all", unpinned).deepspeed


# --- capacity --------------------------------------------------------------------------------------------------------


def test_without_a_known_size_there_is_no_capacity(two_hosts: tuple[str, ...]) -> None:
    config = composed(*two_hosts)
    cluster = resolve(config.cluster)
    assert capacity_of(config, cluster, Machine(10**12, 10**11)) is None
    assert capacity_of(composed(), resolve(composed().cluster), Machine(None, None)) is None


def test_a_cpus_memory_is_shared_by_its_ranks_and_a_gpu_keeps_a_reserve(two_hosts: tuple[str, ...]) -> None:
    config = composed("cluster.num_procs=4")
    shared = capacity_of(config, resolve(config.cluster), Machine(4 * 10**9, None))
    assert shared is not None and shared.one_memory
    assert (shared.device_bytes, shared.reserve_bytes) == (10**9 - PROCESS_BYTES, PROCESS_BYTES)
    small = capacity_of(config, resolve(config.cluster), Machine(4_000, None))
    assert small is not None and small.device_bytes == 0
    config = composed(*two_hosts, "plan.memory_bytes=80000000000")
    card = capacity_of(config, resolve(config.cluster), Machine(None, None))
    assert card is not None and not card.one_memory
    assert card.device_bytes == round((80_000_000_000 - CONTEXT_BYTES) * 0.9)
    assert card.device_bytes + card.reserve_bytes == 80_000_000_000


def test_named_hardware_says_how_much_memory_there_is_unless_a_number_is_given(two_hosts: tuple[str, ...]) -> None:
    config = composed(*two_hosts, "hardware=h200")
    named = capacity_of(config, resolve(config.cluster), Machine(None, None))
    assert named is not None and named.source == "hardware=h200"
    assert named.device_bytes + named.reserve_bytes == config.hardware.memory_bytes
    config = composed(*two_hosts, "hardware=h200", "plan.memory_bytes=5000000000")
    given = capacity_of(config, resolve(config.cluster), Machine(None, None))
    assert given is not None and given.device_bytes + given.reserve_bytes == 5_000_000_000


def test_in_a_hosts_own_memory_a_bucket_counts_only_where_somebody_gave_a_limit() -> None:
    """It is allocated whole, 2 GB, and a small model never writes most of it: no reason to refuse a run."""
    plan = planned()
    assert plan.estimate.memory is not None and plan.estimate.memory.peak.terms[BUCKETS] == 2_000_000_000
    own = capacity_of(plan.config, plan.cluster, Machine(2_000_000_000, None))
    assert own is not None and unfit(plan, own, unmeasured) is None
    told = capacity_of(composed("plan.memory_bytes=1000000000"), plan.cluster, Machine(2_000_000_000, None))
    assert told is not None and unfit(plan, told, unmeasured) is not None


# --- choosing --------------------------------------------------------------------------------------------------------

FREE = st.sets(st.sampled_from(GROUPS), min_size=1).map(sorted)


@settings(max_examples=15, deadline=None)
@given(st.integers(10**8, 5 * 10**9), FREE, st.booleans())
def test_the_chosen_one_fits_and_none_before_it_does(size: int, free: list[str], disk: bool) -> None:
    request = [*BASE, *(f"{group}=auto" for group in free), *([NVME] if disk and "offload" in free else [])]
    config = composed(*request)
    order = list(choices(config, set(free)))
    try:
        chosen = choice_for(size, *request)
    except UserError as error:
        assert error.code in (2, EXIT_DOES_NOT_FIT)
        assert not [choice for choice in order if fits(with_choice(config, choice), size)]
        return
    assert autos(chosen.config) == []
    assert peak_bytes(chosen.plan) <= size
    before = order[: len(chosen.rejected)]
    assert [candidate.overrides for candidate in chosen.rejected] == [choice.overrides() for choice in before]
    assert not [choice for choice in before if fits(with_choice(config, choice), size)]
    assert chosen.overrides == order[len(before)].overrides()


def fits(config: RunConfig, size: int) -> bool:
    """By planning it, with nothing of `choose`."""
    try:
        return peak_bytes(unmeasured(config)) <= size
    except UserError:
        return False


def test_what_is_recorded_composes_to_the_chosen_plan_without_a_choice() -> None:
    request = [*BASE, *ALL_AUTO, "run.steps=7"]
    chosen = choice_for(peak_bytes(planned(*BASE, "zero=stage3")), *request)
    recorded = planning.settled(request, chosen)
    assert not [text for text in recorded if "auto" in text]
    assert recorded[-3:] == chosen.overrides
    assert planned(*recorded) == chosen.plan


def test_a_rejected_one_says_by_how_much_it_missed() -> None:
    chosen = choice_for(3_000_000_000, *BASE, "zero=auto")
    assert [candidate.overrides for candidate in chosen.rejected] == [["zero=stage0"]]
    assert chosen.rejected[0].refused is not None  # bf16 at stage 0
    config = composed("zero=stage1", "activation=auto")
    size = peak_bytes(growing(composed("zero=stage1", "activation=full")))
    chosen = choose(config, 2, limit(size), growing)
    assert chosen.overrides == ["activation=full"]
    [big] = chosen.rejected
    assert big.lacks == {"memory": peak_bytes(growing(composed("zero=stage1"))) - size}


@pytest.mark.parametrize(("samples", "expected"), [(1, 1), (5, 4), (64, 64), (5000, 1024)])
def test_the_largest_micro_batch_that_fits_is_taken(samples: int, expected: int) -> None:
    request = ("zero=stage1", "deepspeed.zero_optimization.reduce_bucket_size=2")
    size = peak_bytes(growing(composed(*request, f"train.micro_batch_size={samples}")))
    chosen = choose(composed(*request, "train.micro_batch_size=auto"), 2, limit(size), growing)
    assert chosen.plan.batch.micro_batch_size == expected
    assert chosen.overrides == [f"train.micro_batch_size={expected}"]


def test_a_chosen_micro_batch_divides_the_global_batch() -> None:
    config = composed("zero=stage1", "train.micro_batch_size=auto", "train.global_batch_size=24")
    chosen = choose(config, 2, limit(10**12), growing)
    assert (chosen.plan.batch.micro_batch_size, chosen.plan.batch.gradient_accumulation_steps) == (4, 3)


def test_no_batch_is_chosen_where_activations_are_not_known() -> None:
    with refuses("train.micro_batch_size", "auto", "activations"):
        choice_for(10**12, "train.micro_batch_size=auto")


def test_nothing_is_chosen_without_a_capacity() -> None:
    with refuses("zero", "plan.memory_bytes"):
        choose(composed("zero=auto"), 2, None, unmeasured)


# --- nothing fits ----------------------------------------------------------------------------------------------------


WIDE = ("zero=stage3", "activation=full", "deepspeed.zero_optimization.reduce_bucket_size=50000000")


def wide_bytes(ranks: int) -> int:
    """What a rank of so many needs at stage 3 with small buckets."""
    request = composed(*BASE, *WIDE)
    return peak_bytes(unmeasured(request, resized(resolve(request.cluster), ranks)))


def test_where_nothing_fits_the_number_of_ranks_that_does_is_the_least() -> None:
    size = wide_bytes(12)
    with pytest.raises(UserError) as caught:
        choice_for(size, *BASE, *ALL_AUTO)
    assert caught.value.code == EXIT_DOES_NOT_FIT
    [problem] = caught.value.problems
    assert "GB too much for the memory" in problem.got
    assert f"more ranks: 12 of them at zero=stage3 offload=none activation=full {WIDE[2]} (here are 4)" in problem.fix
    assert wide_bytes(8) > size


def test_what_no_number_of_ranks_makes_fit_is_said_to_need_another_parallelism() -> None:
    with refuses("tensor or pipeline parallelism: ", "split 5 ways at least"):
        choice_for(wide_bytes(2**16) // 5 + 1, *BASE, *ALL_AUTO)


def test_smaller_buckets_are_named_where_they_are_enough() -> None:
    with refuses(f"on these ranks: zero=stage3 offload=none activation=full {WIDE[2]}"):
        choice_for(wide_bytes(4), *BASE, *ALL_AUTO)


@pytest.mark.parametrize("ranks", [1, 3, 4, 6, 8, 9])
def test_a_resized_cluster_has_as_many_ranks_on_hosts_of_as_many_slots(ranks: int, two_hosts: tuple[str, ...]) -> None:
    cluster = resized(resolve(composed(*two_hosts).cluster), ranks)
    assert cluster.world_size == ranks
    assert [len(host.slots) for host in cluster.hosts[:-1]] == [4] * (-(-ranks // 4) - 1)


# --- the gate --------------------------------------------------------------------------------------------------------


@settings(max_examples=10, deadline=None)
@given(st.integers(3 * 10**8, 2 * 10**9), st.sampled_from(["stage1", "stage3"]))
def test_the_changes_that_the_gate_proposes_fit_when_pasted(size: int, zero: str) -> None:
    plan = planned(*BASE, f"zero={zero}")
    found = cheapest(plan, limit(size), unmeasured)
    assert len(found) <= CHANGES
    for candidate in found:
        kept = [word for word in (*BASE, f"zero={zero}") if not any(_same(word, new) for new in candidate.overrides)]
        assert peak_bytes(planned(*kept, *candidate.overrides)) <= size


def _same(one: str, other: str) -> bool:
    return one.partition("=")[0] == other.partition("=")[0]


def closely(config: RunConfig, cluster: Cluster | None = None, within: Capacity | None = None) -> Plan:
    """As `unmeasured`, but everything of a plan is estimated whether it fits or not."""
    return unmeasured(config, cluster)


@pytest.mark.parametrize("size", [5 * 10**7, 3 * 10**8, 8 * 10**8, 12 * 10**8])
@pytest.mark.parametrize("zero", ["stage1", "stage3"])
def test_a_refusal_names_what_it_would_had_every_candidate_been_estimated_to_the_end(size: int, zero: str) -> None:
    plan = planned(*BASE, f"zero={zero}")
    problem = unfit(plan, limit(size), unmeasured)
    assert problem is not None and problem == unfit(plan, limit(size), closely)


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_every_pass_needs_is_never_more_than_what_is_planned(
    accelerator: str, optimizer: str, precision: str, two_hosts: tuple[str, ...]
) -> None:
    nothing = Capacity(0, 0, 0, accelerator == "cpu", "the test")
    ranks = (BASE[2],) if accelerator == "cpu" else two_hosts
    base = (BASE[0], *ranks, f"precision={precision}", f"optim={optimizer}")
    compared = 0
    for choice in EVERY:
        try:
            config = composed(*base, *choice.overrides(), *((NVME,) if choice.offload == "nvme" else ()))
            whole, least = unmeasured(config), unmeasured(config, within=nothing)
        except UserError:
            continue  # a rule refuses it
        assert whole.estimate.memory is not None and least.estimate.memory is not None
        wants, floor = needed(whole.estimate.memory, nothing), needed(least.estimate.memory, nothing)
        assert all(0 < floor[where][0] <= wants[where][0] for where in wants if wants[where][0]), choice
        compared += 1
    assert compared >= 6


def test_a_smaller_micro_batch_keeps_the_global_batch() -> None:
    plan = growing(composed("zero=stage1", "deepspeed.zero_optimization.reduce_bucket_size=1", "cluster.num_procs=2"))
    first = cheapest(plan, limit(peak_bytes(plan) - 30_000_000), growing)[0]
    assert first.overrides == ["train.micro_batch_size=4", "train.global_batch_size=16"]
    assert first.plan is not None and first.plan.batch.global_batch_size == plan.batch.global_batch_size


def test_what_fits_or_is_not_known_is_not_refused() -> None:
    plan = planned()
    assert unfit(plan, limit(10**12), unmeasured) is None
    assert unfit(plan, None, unmeasured) is None
    unknown = planned("model.config.model_type=falcon")
    assert lacking(unknown, limit(1)) is None
    assert unfit(unknown, limit(1), unmeasured) is None


def test_a_launch_that_cannot_fit_is_refused_and_leaves_nothing(cli: Cli) -> None:
    answer = cli("plan.memory_bytes=1900000000", "run.dir=runs/a")
    assert (answer.code, answer.out) == (EXIT_DOES_NOT_FIT, "")
    for words in (" GB of memory", "may use 1.90 GB (plan.memory_bytes)", "zero=stage0", FORCE):
        assert words in answer.err
    assert list(Path.cwd().iterdir()) == []


def test_a_forced_launch_goes_ahead_and_says_so(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Plan] = []

    def train(plan: Plan, overrides: list[str], sources: dict[str, str]) -> Outcome:
        started.append(plan)
        return Outcome(0, None, overrides)

    monkeypatch.setattr(front_door.run, "train", train)
    answer = cli("plan.memory_bytes=1900000000", "plan.force=true")
    assert (answer.code, len(started)) == (0, 1)
    assert "plan.force=true: a peak of" in answer.err and "(plan.memory_bytes)" in answer.err


def test_a_run_records_what_was_chosen_and_not_auto(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """recipe=resume composes what is recorded: it has nothing left to choose."""
    kept: list[tuple[Plan, list[str], dict[str, str]]] = []

    def train(plan: Plan, overrides: list[str], sources: dict[str, str]) -> Outcome:
        kept.append((plan, overrides, sources))
        return Outcome(0, None, overrides)

    monkeypatch.setattr(front_door.run, "train", train)
    assert cli("zero=auto", "offload=auto", "run.steps=9", "plan.memory_bytes=1000000000000").code == 0
    [(plan, overrides, sources)] = kept
    assert overrides == ["run.steps=9", "plan.memory_bytes=1000000000000", "zero=stage0", "offload=none"]
    assert autos(plan.config) == []
    assert sources["deepspeed.zero_optimization.stage"].startswith("solved: zero=auto")


def test_a_resumed_run_has_what_was_chosen_though_more_memory_is_said(tmp_path: Path) -> None:
    request = [*BASE, "zero=auto", "offload=auto"]
    chosen = choice_for(peak_bytes(planned(*BASE, "zero=stage3")), *request)
    run = RunDir(tmp_path)
    run.config.write_text(compose.composed_yaml(chosen.config))
    run.overrides.write_text("\n".join(planning.settled(request, chosen)))
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        again, recorded, _ = compose.recompose(run, ["recipe=resume", "plan.memory_bytes=99000000000"], "pretrain")
    back = compose.to_run_config(again)
    assert autos(back) == []
    assert back.deepspeed == chosen.config.deepspeed
    assert back.plan.memory_bytes == 99_000_000_000
    assert not [text for text in recorded if "auto" in text]


def test_a_micro_batch_that_was_given_stays() -> None:
    chosen = choice_for(10**12, *BASE, *ALL_AUTO, "train.micro_batch_size=3")
    assert chosen.plan.batch.micro_batch_size == chosen.config.train.micro_batch_size == 3
