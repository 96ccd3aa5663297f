"""Asks the engine server whether DeepSpeed takes a request, with a tiny model on this machine's CPU.

Used by the proofs of rules and by the test of all combinations, through the fixture `engines`.
Must never judge a request itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher import ds_config
from launcher.batch import solve
from launcher.cluster.value import resolve
from launcher.plan import VERSION, Estimate, Plan
from launcher.rundir import RunDir
from tests.plan.asking import composed

SERVER = Path(__file__).with_name("engine_server.py")
TIMEOUT_S = 60  # for one case; the slowest takes 5 s
TRAIN = (
    "train.sequence_length=16",
    "train.micro_batch_size=2",
    "train.gradient_accumulation_steps=1",
    "cluster.num_procs=2",
)
LLAMA = (
    *TRAIN,
    "model.config.vocab_size=64",
    "model.config.hidden_size=32",
    "model.config.intermediate_size=64",
    "model.config.num_hidden_layers=1",
    "model.config.num_attention_heads=2",
    "model.config.num_key_value_heads=2",
)
GPT2 = (
    *TRAIN,
    "model=gpt2_small",
    "model.config.vocab_size=64",
    "model.config.n_positions=16",
    "model.config.n_embd=32",
    "model.config.n_layer=1",
    "model.config.n_head=2",
)


def request(*overrides: str, base: Sequence[str] = LLAMA) -> tuple[str, ...]:
    """`overrides` over the tiny model; a constant schedule and two ranks unless they say otherwise."""
    given = {override.partition("=")[0] for override in overrides}
    default = () if "schedule" in given else ("schedule=constant",)
    return (*(option for option in base if option.partition("=")[0] not in given), *default, *overrides)


def unjudged(*overrides: str) -> Plan:
    """The plan of a request that no rule has seen."""
    config = composed(*overrides)
    cluster = resolve(config.cluster)
    batch = solve(config.train, cluster.world_size)
    nothing = Estimate(None, None, {}, {}, {}, None, None, None)
    return Plan(VERSION, config, cluster, batch, ds_config.build(config, cluster, batch), nothing, {}, None)


class Engines:
    """The server, started once; one case at a time."""

    def __init__(self, log: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        ready = self._answer()
        self.operators: list[str] = ready["operators"]
        self.fp16: bool = ready["fp16"]
        """Whether this CPU computes in it: one without AVX512-FP16 does not, and DeepSpeed refuses it there."""

    def lacks(self, plan: Plan) -> str | None:
        """What this machine lacks for the engine of `plan`, else None."""
        if (operator := missing_operator(plan, self.operators)) is not None:
            return f"the operator {operator} is not compiled here"
        return "this CPU does not compute in fp16" if plan.precision == "fp16" and not self.fp16 else None

    def run(
        self,
        plan: Plan,
        steps: int = 3,
        ask: Sequence[str] = (),
        save: Path | None = None,
        load: Path | None = None,
        slots: int | None = None,
    ) -> dict[str, Any]:
        """What an engine of `plan` did in `steps` steps: losses and facts, or `error` and the end of a rank's log.

        `slots`: ranks of each pretended host. `ask`: attributes of the engine to read afterwards.
        """
        case = {"steps": steps, "ask": list(ask), "save": str(save or ""), "load": str(load or "")}
        return self.call("__main__:train", plan.world_size, slots, plan=plan.to_json(), **case)

    def run_recipe(self, plan: Plan, run: Path, resaved: Path | None = None, unchecked_room: bool = False) -> None:
        """Runs the plan's recipe in `run` as workers do; what it restores it also saves in the run folder `resaved`.

        `unchecked_room`: saves begin whatever is free. Raises AssertionError with the first failing rank's error.
        """
        for folder in filter(None, (run, resaved)):
            RunDir(folder).create()
        case = {"plan": plan.to_json(), "run_dir": str(run), "resaved": str(resaved or "")}
        case["unchecked_room"] = unchecked_room
        answer = self.call("__main__:run_recipe", plan.world_size, **case)
        assert "error" not in answer, answer["error"] + answer["log"]

    def call(self, function: str, world_size: int, slots: int | None = None, **case: Any) -> dict[str, Any]:
        """What rank 0 got from `function`, "module:name", which every rank of a new group calls with the case."""
        asked = {"call": function, "world_size": world_size, "slots": slots or world_size, "timeout_s": TIMEOUT_S}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asked | case) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the server."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the engine server died"
        return dict(json.loads(line))


def missing_operator(plan: Plan, compiled: Sequence[str]) -> str | None:
    """Name of a compiled operator that the engine of `plan` needs and does not find, else None."""
    device = plan.offload_device("optimizer")
    optimizer = plan.deepspeed.get("optimizer", {})
    kind, torch_adam = str(optimizer.get("type")).lower(), optimizer.get("params", {}).get("torch_adam")
    needed = {"nvme": ["async_io"]}.get(device or "", [])
    if kind in ("adam", "adamw", "muon") and not torch_adam:
        needed = [*needed, "cpu_adam" if device else "fused_adam"]
    if kind in ("lion", "adagrad") and device:
        needed = [*needed, f"cpu_{kind}"]
    return next((name for name in needed if name not in compiled), None)
