"""Words for launch.py -> its plan, a run that it trained for one step, and ranks that do a piece of work of a bench.

Used by the benches that measure inside of ranks, and by `benches.sides`; ranks start in `benches.rank`.
Must never start ranks otherwise than launch.py would: the same launcher, the same options, the same variables.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from benches.request import BenchError, with_defaults
from benches.timing import base_environment, run_to_end
from launcher.command import ROOT, WORKER, deepspeed_command
from launcher.plan import Plan
from launcher.rundir import RunDir

RANK = Path(__file__).resolve().parent / "rank.py"
LAUNCH = [sys.executable, str(ROOT / "launch.py")]
# Samples are short and few: what is measured is the state, and a step on a CPU is long enough.
DEFAULTS = [
    "schedule=constant",
    "cluster.accelerator=cpu",
    "cluster.num_procs=2",
    "train.sequence_length=32",
    "train.micro_batch_size=2",
    "train.gradient_accumulation_steps=1",
    "eval.samples=4",
]
SMALL_BUCKET = "deepspeed.zero_optimization.reduce_bucket_size=20000000"  # DeepSpeed's own takes 2 GB of each rank
# Overrides of a Llama with 32,000 tied embeddings, by millions of parameters.
MODELS = {
    130: ["model=llama_125m", "model.config.num_hidden_layers=15"],
    300: [
        "model=llama_125m",
        "model.config.hidden_size=1024",
        "model.config.intermediate_size=2816",
        "model.config.num_hidden_layers=21",
        "model.config.num_attention_heads=16",
        "model.config.num_key_value_heads=16",
        SMALL_BUCKET,
    ],
    400: [
        "model=llama_125m",
        "model.config.hidden_size=1280",
        "model.config.intermediate_size=3456",
        "model.config.num_hidden_layers=18",
        "model.config.num_attention_heads=20",
        "model.config.num_key_value_heads=20",
    ],
    1000: [
        "model=llama_125m",
        "model.config.hidden_size=2048",
        "model.config.intermediate_size=5504",
        "model.config.num_hidden_layers=18",
        "model.config.num_attention_heads=16",
        "model.config.num_key_value_heads=16",
        SMALL_BUCKET,
    ],
}
READ_BYTES = 8 * 2**20


def saved_run(folder: Path, millions: int, stage: int, overrides: list[str]) -> RunDir:
    """A run of one optimizer step by launch.py, with its checkpoint; `overrides` win over the model's and DEFAULTS."""
    if millions not in MODELS:
        raise BenchError(f"millions is one of {', '.join(map(str, MODELS))}, not {millions}")
    if stage not in (1, 2, 3):
        raise BenchError(f"stage is 1, 2 or 3, not {stage}")
    run = RunDir(folder / "run")
    words = with_defaults([*DEFAULTS, *MODELS[millions]], overrides)
    own = [f"zero=stage{stage}", "run.steps=1", "checkpoint.every=0", f"run.dir={run.path}"]
    run_to_end([*LAUNCH, *words, *own], folder / "run.log", base_environment())
    return run


def resumed(run: RunDir, *overrides: str) -> Plan:
    """The plan that continues `run` from its checkpoint."""
    return ask_plan(["recipe=resume", f"run.dir={run.path}", "run.steps=1000000", *overrides], base_environment())


def ask_plan(overrides: list[str], environment: dict[str, str]) -> Plan:
    """What launch.py would do; raises BenchError where it refuses."""
    argv = [*LAUNCH, "mode=plan", "plan.format=json", *overrides]
    answer = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise BenchError(f"launch.py refuses this request\n{answer.stderr}")
    value = json.loads(answer.stdout)
    for shown in ("commands", "sources", "report"):  # what mode=plan shows beside the plan
        del value[shown]
    return Plan.from_json(value)


def ask_ranks(plan: Plan, work: str, request: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """Has every rank of `plan` build its engine and call `work(state, request)` of module `work`: their answers."""
    place = RunDir(folder / "ranks")
    place.path.mkdir()
    place.plan.write_text(json.dumps(plan.to_json()), encoding="utf-8")
    file = place.path / "request.json"
    file.write_text(json.dumps(request | {"work": work, "plan": str(place.plan)}), encoding="utf-8")
    command = rank_command(plan, place, RANK, file)
    run_to_end(command, folder / "ranks.log", rank_environment(plan, base_environment()))
    answers = [json.loads((place.path / f"answer.rank{rank}.json").read_text()) for rank in range(plan.world_size)]
    shutil.rmtree(place.path)
    return answers


def rank_command(plan: Plan, place: RunDir, script: Path, argument: Path, address: str | None = None) -> list[str]:
    """What launch.py would start for the plan in `place`, with another script in place of its worker."""
    command = deepspeed_command(plan, place, free_port(), address)
    assert command[-2] == str(WORKER), command
    return [*command[:-2], str(script), str(argument)]


def rank_environment(plan: Plan, inherited: dict[str, str]) -> dict[str, str]:
    """What launch.py gives to DeepSpeed's launcher; `Sides.check_same` finds out when this is no longer so."""
    return {name: value for name, value in inherited.items() if name != "CUDA_VISIBLE_DEVICES"} | plan.env


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def warm(folder: Path) -> None:
    """Reads every file of `folder`, so that whoever comes next finds them in the page cache."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(READ_BYTES):
                    pass
