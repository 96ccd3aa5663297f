"""Request -> plan: measured where it has to be, chosen where it is left open, and judged by what a rank may use.

Called by `launcher.cli` once a request is typed. Starts a short job where a model's size is not known by formula.
Must never start a run or write anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from launcher import provenance, run
from launcher.cluster.value import Cluster, resolve
from launcher.errors import EXIT_DOES_NOT_FIT, Problem, UserError, raise_if
from launcher.machine import this_machine
from launcher.measured import profiles
from launcher.plan import Plan, build_plan
from launcher.planner.candidates import Build
from launcher.planner.capacity import Capacity, Machine, capacity_of, needed
from launcher.planner.choose import MICRO, Chosen, autos, choose
from launcher.planner.gate import unfit
from launcher.planner.hardware import problems
from launcher.schema import RunConfig

AUTO_OPTIONS = (
    *("zero", "offload", "activation", MICRO, "activation.checkpointing"),
    *("deepspeed.zero_optimization.stage", "deepspeed.zero_optimization.offload_optimizer.device"),
)
# Of a rank's memory: where all but activations take no more than this, a batch that does not fit beside it is rare, and
# measuring it would cost every launch of a new model some seconds.
SURE_SHARE = 0.25


@dataclass(frozen=True)
class Prospect:
    """A plan, and what it takes to judge it and others like it."""

    plan: Plan
    machine: Machine
    capacity: Capacity | None
    build: Build
    chosen: Chosen | None
    """How the autos of the request came to what the plan has; None for a request without."""

    def problem(self) -> Problem | None:
        """Why the plan cannot be run, with what would fit; None where it fits or where nobody knows."""
        return unfit(self.plan, self.capacity, self.build)


@contextmanager
def prospect(config: RunConfig) -> Iterator[Prospect]:
    """The plan of a request and how it stands to the memory there is; raises UserError for one that is none.

    A model is measured for a plan that is shown or chosen. For a launch what is remembered of it serves, and where
    nothing is it is measured only if the rest of its memory comes near to what there is: nobody waits for it otherwise.
    The process that measures ends with the block.
    """
    with run.when_asked("profile") as ask:
        yield _prospect(config, ask)


def _prospect(config: RunConfig, ask: run.Ask) -> Prospect:
    chosen = bool(autos(config))
    build = builder(config, ask, measure=chosen or config.mode == "plan")
    if not chosen:
        plan = build(config, None)
        machine = this_machine(plan.cluster)
        capacity = capacity_of(plan.config, plan.cluster, machine)
        if _may_not_fit(plan, capacity):
            build = builder(config, ask, measure=True)
            plan = build(config, None)
        return Prospect(plan, machine, capacity, build, None)
    raise_if(problems(config.hardware))
    cluster = resolve(config.cluster, config.launch)
    machine = this_machine(cluster)
    capacity = capacity_of(config, cluster, machine)
    found = choose(config, cluster.world_size, capacity, build)
    return Prospect(found.plan, machine, capacity, build, found)


def builder(config: RunConfig, ask: run.Ask, measure: bool) -> Build:
    """Plans `config` and requests that differ from it in stage, offload, batch or cluster; see `measured.profiles`.

    Without `measure` the job is asked only for a model whose size is not known either.
    """
    environment, measured = run.worker_environment(config), profiles(ask)
    remembered = measured if measure else profiles(None)
    # The gate, which names no cluster, and a comparison, which names the plan's own, ask for the same plans.
    built: dict[tuple[str, Cluster | None], Plan] = {}

    def build(asked: RunConfig, cluster: Cluster | None = None, within: Capacity | None = None) -> Plan:
        differs = repr((asked.deepspeed, dataclasses.astuple(asked.train), asked.activation.checkpointing))
        if (differs, cluster) in built:
            return built[differs, cluster]
        plan = build_plan(asked, environment, remembered, cluster=cluster, within=within)
        if plan.estimate.parameters is None and not measure:
            plan = build_plan(asked, environment, measured, cluster=cluster, within=within)
        if within is None:
            built[differs, cluster] = built[differs, plan.cluster] = plan
        return plan

    return build


def _may_not_fit(plan: Plan, capacity: Capacity | None) -> bool:
    """Whether a plan without activations comes so near to what a rank may use that they have to be measured."""
    memory = plan.estimate.memory
    if memory is None or memory.measured or capacity is None:
        return False
    return any(wants > SURE_SHARE * has for wants, has in needed(memory, capacity).values())


def refuse_unfit(found: Prospect) -> str | None:
    """Raises UserError, exit 3, for a plan that cannot fit; what to note of one that is forced."""
    problem = found.problem()
    if problem is None:
        return None
    if not found.plan.config.plan.force:
        raise UserError(problem, code=EXIT_DOES_NOT_FIT)
    return f"plan.force=true: a peak of {problem.got} is planned, and {problem.why}"


def settled(overrides: list[str], chosen: Chosen) -> list[str]:
    """The command line as if the choice had been typed: what a run records, so that it is never chosen again."""
    kept = []
    for text in overrides:
        option, _, value = text.lstrip("+").partition("=")
        if not (option in AUTO_OPTIONS and value.strip("'\"") == "auto"):
            kept.append(text)
    return kept + chosen.overrides


def settled_origin(origin: dict[str, str], chosen: Chosen) -> dict[str, str]:
    """Where options come from, with the chosen ones."""
    found = dict(origin)
    for text in chosen.overrides:
        option, _, value = text.partition("=")
        paths = [option] if option == MICRO else [*provenance.values_of(f"{option}/{value}")]
        found |= dict.fromkeys(paths, f"solved: {option}=auto, the least costly that fits")
    return found
