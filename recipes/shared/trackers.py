"""Experiment trackers behind one small interface: none, or Weights & Biases on global rank 0.

Made by recipes before the first step; metrics report to it.
Must never stop or slow training: a thread of its own does the talking, and a failure only ends the tracking.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import queue
import sys
import threading
import uuid
from typing import Any

from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes.shared.state import TrainState

QUEUE_LIMIT = 10_000  # records waiting for a slow tracker; more are dropped and counted


class Tracker:
    """No tracking; also what every rank but 0 has."""

    run_id: str | None = None
    sync_command: str | None = None

    def log(self, record: dict[str, Any]) -> None:
        """Takes one object of metrics.jsonl."""

    def finish(self) -> None:
        """Ends the tracked run."""


class WandbTracker(Tracker):
    """One W&B run, continued on resume, with its own step axis; the plan makes it offline when there is no key."""

    def __init__(self, plan: Plan, run: RunDir, run_id: str | None, parent: str | None) -> None:
        self.section, self.plan, self.folder = plan.config.tracker, plan, run.path
        self.run_id = run_id or uuid.uuid4().hex[:12]
        self.parent = parent
        self.records: queue.Queue[dict[str, Any] | None] = queue.Queue(QUEUE_LIMIT)
        self.dropped = 0
        self.alive = True
        self.thread = threading.Thread(target=self._work, daemon=True, name="wandb")
        self.thread.start()

    def log(self, record: dict[str, Any]) -> None:
        if not self.alive:
            return
        try:
            self.records.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def finish(self) -> None:
        if self.alive:
            self.records.put(None)
            self.thread.join(self.section.timeout_s)
        if self.thread.is_alive() or self.dropped:
            print(f"wandb: gave up after {self.section.timeout_s} s, {self.dropped} records dropped", file=sys.stderr)

    def _work(self) -> None:
        try:
            self._talk()
        except Exception as error:  # whatever a tracker raises, training goes on
            print(f"wandb: tracking ended: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            self.alive = False

    def _talk(self) -> None:
        import wandb

        run = wandb.init(
            id=self.run_id,
            name=self.folder.name,
            project=self.section.project,
            entity=self.section.entity,
            group=self.section.group,
            tags=self.section.tags or None,
            config=self.plan.to_json() | {"env": None, "parent_run_id": self.parent},
            dir=str(self.folder),
            resume="allow",
            settings=wandb.Settings(init_timeout=self.section.timeout_s, console="off"),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        if run.settings.mode == "offline":
            self.sync_command = f"wandb sync {run.dir.removesuffix('/files')}"
        while (record := self.records.get()) is not None:
            run.log(record)
        run.finish()


def make_tracker(state: TrainState) -> Tracker:
    """The plan's tracker on global rank 0, a silent one elsewhere.

    A resume continues the tracked run of its checkpoint. Where what is trained has changed since, or where it is
    tracked, it begins a new run that names the old one as `parent_run_id`: one curve never mixes two experiments.
    """
    plan, earlier = state.plan, state.tracker_run_id
    if plan.config.tracker.kind != "wandb" or not state.ranks.is_main:
        return Tracker()
    same = state.tracked_as == tracked_as(plan)
    return WandbTracker(plan, state.run, earlier if same else None, None if same else earlier)


def tracked_as(plan: Plan) -> str:
    """SHA-256 of what one tracked run stands for: the experiment and its project.

    How long it runs, where, on how many ranks and at which stage, what it evaluates and what it keeps may change.
    """
    config = dataclasses.asdict(plan.config)
    content = {name: config[name] for name in ("model", "activation")}
    content["data"] = {name: value for name, value in config["data"].items() if name != "cache_dir"}
    content["deepspeed"] = {name: value for name, value in config["deepspeed"].items() if name != "zero_optimization"}
    content["batch"] = [plan.batch.global_batch_size, plan.config.train.sequence_length]
    content["seed"] = plan.config.run.seed
    content["tracker"] = [config["tracker"][name] for name in ("project", "entity")]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
