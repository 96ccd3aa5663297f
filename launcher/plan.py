"""The Plan: one frozen value that says everything a run will do, and its fingerprint.

Built by `build_plan` on the launcher, written to plan.json, read back by every worker.
Must never execute anything or depend on the clock: the same request gives the same plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher import ds_config
from launcher.batch import Batch, solve
from launcher.cluster.value import Cluster, resolve
from launcher.ds_check import check, missing
from launcher.ds_schema import version_problem
from launcher.ds_values import normalise
from launcher.errors import Problem, UserError, raise_if
from launcher.own_code import missing_code
from launcher.planner import capacity, memory, shapes, traffic
from launcher.planner.assess import least_of, memory_of
from launcher.planner.collectives import Move
from launcher.planner.movement import movement_of, outlined
from launcher.planner.prediction import Memory
from launcher.planner.profile import Profile
from launcher.planner.setup import Setup
from launcher.planner.timing import StepTime
from launcher.rules import judge
from launcher.rules_peft import missing_package
from launcher.schema import RunConfig, from_dict

VERSION = 1
# On a CPU: the size from which glibc maps an allocation by itself, and gives it back once it is freed. Left alone that
# rises to 32 MiB, and what is smaller stays in heaps that do not shrink: of 303M at stage 3 on 4 ranks, with 1.5 GB
# allocated at the peak, a rank had 3.1 GB, and 2.1 with these, in the same time. With 1 MiB it had 1.9, and a step of
# model=tiny took half as long again.
GLIBC = {"MALLOC_MMAP_THRESHOLD_": "4194304", "MALLOC_TRIM_THRESHOLD_": "67108864"}  # 4 and 64 MiB
DERIVED = ("fingerprint", "world_size")  # in the file beside the plan's own fields


@dataclass(frozen=True)
class Estimate:
    """What the plan predicts. Bytes per rank; None where the model's size has to be measured first."""

    parameters: int | None
    textbook_bytes: int | None
    device_bytes: dict[str, int]
    host_bytes: dict[str, int]
    traffic_bytes: dict[str, int]
    checkpoint_bytes: int | None
    reduce_bucket_bytes: int | None
    """Gradient reduction buffers of a rank, allocated whole however small the model is."""
    memory: Memory | None
    """Moments of a step; null where the model's size is not known."""
    collectives: tuple[Move, ...] = ()
    """What DeepSpeed really calls in one optimizer step; `traffic_bytes` is the textbook's figure."""
    links: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of one optimizer step on each link; see `planner.links`."""
    active_parameters: int | None = None
    """Parameters that one token uses: fewer than all in a model with experts."""
    flops: int | None = None
    """Model FLOPs of one optimizer step over all ranks, recomputation left out."""
    time: StepTime | None = None
    """Estimated time of one optimizer step; null where hardware=... does not say how fast everything is."""
    not_measured: str | None = None
    """Why activations could not be measured; null where they were, or where nobody tried."""


@dataclass(frozen=True)
class ModelFacts:
    """What was measured of a model: its parameters, and a pass over a micro-batch."""

    parameters: int | None = None
    profile: Profile | None = None
    why: str | None = None
    """Why a pass was not possible; null where it was, or where nobody tried."""


@dataclass(frozen=True)
class Plan:
    """Everything a run needs. `config` is the composed request, `deepspeed` the dict the engine gets."""

    version: int
    config: RunConfig
    cluster: Cluster
    batch: Batch
    deepspeed: dict[str, Any]
    estimate: Estimate
    env: dict[str, str]
    resume_from: str | None
    """Checkpoint folder a resumed run starts from; null: initial weights."""

    @property
    def world_size(self) -> int:
        """Data-parallel ranks."""
        return self.cluster.world_size

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the DeepSpeed dict."""
        return ds_config.zero_stage(self.deepspeed)

    @property
    def precision(self) -> str:
        """bf16, fp16 or fp32."""
        return ds_config.precision(self.deepspeed)

    @property
    def accumulation(self) -> str:
        """bf16, fp16 or fp32: the element type gradients are accumulated in."""
        return ds_config.accumulation(self.deepspeed)

    def offload_device(self, what: str) -> str | None:
        """Device of `what` (optimizer or param) when it is offloaded."""
        return ds_config.offload_device(self.deepspeed, what)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the plan's canonical JSON: equal on every rank or the run is refused."""
        return fingerprint(dataclasses.asdict(self))

    def to_json(self) -> dict[str, Any]:
        """Plain dict for plan.json: every field, the fingerprint and the world size."""
        return dict(zip(DERIVED, (self.fingerprint, self.world_size), strict=True)) | dataclasses.asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> Plan:
        """Inverse of `to_json`; raises UserError when the content does not match its fingerprint."""
        plan: Plan | None = None
        try:
            plan = from_dict(Plan, value)
            content = f"fingerprint {plan.fingerprint}"
        except (TypeError, AttributeError) as error:  # a field is missing, or is no longer what it was
            content = f"no plan of version {VERSION} ({error})"
        if plan is None or plan.version != VERSION or _canonical(plan.to_json()) != _canonical(value):
            raise UserError(
                Problem(
                    "plan.json",
                    f"version {value.get('version')}, fingerprint {value.get('fingerprint')}",
                    f"its content has {content}: it was edited or written by another version",
                    "start a new run; plans are not edited by hand",
                )
            )
        return plan


def fingerprint(content: dict[str, Any]) -> str:
    """SHA-256 of a plan's own fields, as text that does not depend on their order."""
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


def _canonical(value: dict[str, Any]) -> str:
    """One text for one content: keys are sorted as the strings they become in the file, tuples are lists."""
    plain = json.loads(json.dumps(value, allow_nan=False))
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def installed_versions() -> dict[str, str | None]:
    """Versions, in this environment, of what decides a run's numbers."""
    found: dict[str, str | None] = {}
    for name in ("deepspeed", "torch", "transformers", "peft", "hydra-core", "omegaconf", "wandb", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def read_plan(path: Path) -> Plan:
    """The plan in the file `path`."""
    return Plan.from_json(json.loads(path.read_text(encoding="utf-8")))


def build_plan(
    config: RunConfig,
    env: dict[str, str],
    facts_of: Callable[[RunConfig, int, str], ModelFacts] | None = None,
    resume_from: str | None = None,
    cluster: Cluster | None = None,
    within: capacity.Capacity | None = None,
) -> Plan:
    """Judges the request and returns its plan; raises one UserError with every problem.

    `facts_of` a request, its micro-batch size and its precision: what was measured of the model, asked when nothing
    else is wrong. Without it, families that `planner.shapes` does not know have no size. `cluster`: instead of the
    request's own, for what is only compared. `within`: for what is only judged by it, never shown or run: no traffic
    and no time, and where it is too little for what every pass needs, that is all the memory estimated.
    """
    config = dataclasses.replace(config, deepspeed=normalise(config.deepspeed)[0])
    cluster, batch, deepspeed = _judged(config, cluster)
    facts = ModelFacts()
    if facts_of is not None:
        facts = facts_of(config, batch.micro_batch_size, ds_config.precision(deepspeed))
    return Plan(
        version=VERSION,
        config=config,
        cluster=cluster,
        batch=batch,
        deepspeed=deepspeed,
        estimate=_estimate(facts, config, deepspeed, cluster, batch, within),
        env=_accelerator_environment(cluster) | env,
        resume_from=resume_from,
    )


def _judged(config: RunConfig, other: Cluster | None) -> tuple[Cluster, Batch, dict[str, Any]]:
    """Cluster, batch and DeepSpeed dict of a request in which nothing is wrong; else one UserError with everything."""
    problems = [problem for problem in (version_problem(), missing_package(config)) if problem is not None]
    problems += missing_code(config)
    unfit = check(config.deepspeed, ds_config.SOLVED, ds_config.BATCH_KEYS)
    problems += unfit
    cluster: Cluster | None = None
    batch: Batch | None = None
    deepspeed: dict[str, Any] | None = None
    try:
        cluster = other or resolve(config.cluster, config.launch)
        batch = solve(config.train, cluster.world_size)
    except UserError as error:
        problems += error.problems
    try:
        if not unfit and cluster is not None:
            ds_config.refuse_batch_keys(config.deepspeed)
            deepspeed = ds_config.build(config, cluster, batch) if batch is not None else None
    except UserError as error:
        problems += error.problems
    if cluster is not None:  # the rules need blocks of the right shape: without one they see the other options alone
        seen = dataclasses.replace(config, deepspeed={}) if unfit else config
        problems += judge(seen, cluster, deepspeed if deepspeed is not None else seen.deepspeed)
    if deepspeed is not None:
        problems += missing(deepspeed) + ds_config.missing_optimizer(deepspeed)
    raise_if(problems)
    assert cluster is not None and batch is not None and deepspeed is not None
    raise_if(check(deepspeed, owned=ds_config.BATCH_KEYS))  # what was filled in, too: no "auto" is left
    return cluster, batch, deepspeed


def _accelerator_environment(cluster: Cluster) -> dict[str, str]:
    """On CPU: DeepSpeed is told so on every host, the ranks of a host share its cores, and give freed memory back."""
    if cluster.accelerator != "cpu":
        return {}
    threads = (os.cpu_count() or 1) // max(len(host.slots) for host in cluster.hosts)
    return {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, threads)), **GLIBC}


def _estimate(
    facts: ModelFacts,
    config: RunConfig,
    deepspeed: dict[str, Any],
    cluster: Cluster,
    batch: Batch,
    within: capacity.Capacity | None,
) -> Estimate:
    """Where it is not known how many parameters an adapter has, all of the model's count as trained."""
    known = shapes.count_parameters(config.model.config) if config.model.target is None else None
    parameters = known or facts.parameters
    if parameters is None:
        return Estimate(None, None, {}, {}, {}, None, None, None, not_measured=facts.why)
    stage, precision = ds_config.zero_stage(deepspeed), ds_config.precision(deepspeed)
    peft, trained, frozen = config.peft, parameters, 0
    if peft.kind == "lora" and peft.rank is not None:
        adapter = shapes.count_adapter(config.model.config, peft.rank, peft.target, peft.modules_to_save)
        trained, frozen = (parameters, 0) if adapter is None else (adapter, parameters)
    if facts.profile is not None:
        trained, frozen = facts.profile.trained, facts.profile.frozen
    setup = Setup.of(config, deepspeed, cluster)
    state = memory.model_state(
        trained,
        stage,
        cluster.world_size,
        precision,
        offload_optimizer=ds_config.offload_device(deepspeed, "optimizer") is not None,
        offload_param=ds_config.offload_device(deepspeed, "param") is not None,
        frozen=frozen,
        averaged=config.ema.decay is not None,
        state_bytes=setup.state_at_most,
    )
    passes = batch.gradient_accumulation_steps
    moved = traffic.bytes_per_step(trained, stage, cluster.world_size, precision, passes, frozen)
    checkpoint = memory.WEIGHT_BYTES[precision] * (trained + frozen) + (4 + setup.state_at_most) * trained
    checkpoint += memory.AVERAGE_BYTES * trained * (config.ema.decay is not None)
    if stage == 0 and precision == "fp32":
        checkpoint -= trained * 4  # the weights are their own masters
    buckets = memory.reduce_bucket_bytes(deepspeed, stage, precision)
    profile = facts.profile or outlined(parameters, config)
    sizes = (state.textbook_bytes, state.device, state.host, moved, checkpoint, buckets)
    if within is not None:
        least = least_of(setup, profile)
        predicted = least if capacity.missing(least, within) else memory_of(setup, profile)
        return Estimate(parameters, *sizes, predicted, not_measured=facts.why)
    movement = movement_of(profile, setup, config, batch)
    return Estimate(parameters, *sizes, memory_of(setup, profile), **vars(movement), not_measured=facts.why)
