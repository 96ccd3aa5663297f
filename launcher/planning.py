"""Request -> plan: measured where it has to be, chosen where it is left open, and judged by what a rank may use.

Called by `launcher.cli` once a request is typed. Starts a short job where a model's size is not known by formula.
Must never start a run or write anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher import provenance, run
from launcher.cluster.value import Cluster, resolve
from launcher.errors import EXIT_DOES_NOT_FIT, Problem, UserError, raise_if
from launcher.machine import this_machine
from launcher.plan import Plan, build_plan
from launcher.planner.candidates import Build
from launcher.planner.capacity import Capacity, Machine, capacity_of
from launcher.planner.choose import MICRO, Chosen, autos, choose
from launcher.planner.gate import unfit
from launcher.planner.hardware import problems
from launcher.schema import RunConfig

AUTO_OPTIONS = (
    *("zero", "offload", "activation", MICRO, "activation.checkpointing"),
    *("deepspeed.zero_optimization.stage", "deepspeed.zero_optimization.offload_optimizer.device"),
)


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


def prospect(config: RunConfig) -> Prospect:
    """The plan of a request and how it stands to the memory there is; raises UserError for one that is none."""
    build = builder(config)
    if not autos(config):
        plan = build(config, None)
        machine = this_machine(plan.cluster)
        return Prospect(plan, machine, capacity_of(plan.config, plan.cluster, machine), build, None)
    raise_if(problems(config.hardware))
    cluster = resolve(config.cluster, config.launch)
    machine = this_machine(cluster)
    capacity = capacity_of(config, cluster, machine)
    chosen = choose(config, cluster.world_size, capacity, build)
    return Prospect(chosen.plan, machine, capacity, build, chosen)


def builder(config: RunConfig) -> Build:
    """Plans `config` and requests that differ from it in anything but the model, which is measured once at most."""
    environment = run.worker_environment(config)
    measured: list[int | None] = []

    def build(asked: RunConfig, cluster: Cluster | None) -> Plan:
        plan = build_plan(asked, environment, measured[0] if measured else None, cluster=cluster)
        if plan.estimate.parameters is not None or measured:
            return plan
        measured.append(run.measured_parameters(asked))
        return build_plan(asked, environment, measured[0], cluster=cluster)

    return build


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
