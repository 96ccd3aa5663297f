"""Predicted peaks of memory over those measured, and whether auto chooses what really is the least costly that fits.

`scripts/bench planner [models=3] [limits=4] [overrides]`: every stage, offload and activation checkpointing that the
rules let through, for each of the first `models` models, two batches and two precisions, on two ranks. In the ranks
measures `benches.memory_rank`. No times.
Must never leave out a configuration that was measured.
"""

from __future__ import annotations

import dataclasses
import json
import random
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benches.estimators import others
from benches.group import ask_plan, rank_command, rank_environment
from benches.main import note
from benches.report import Row
from benches.request import BenchError, Request, with_defaults
from benches.timing import base_environment, run_to_end
from launcher.planner.candidates import Candidate, Choice, choices, judged, with_choice
from launcher.planner.capacity import Capacity
from launcher.planner.choose import choose
from launcher.planning import builder
from launcher.run import Ask, when_asked
from launcher.rundir import RunDir
from launcher.schema import RunConfig

OPTIONS = {"models": 3, "limits": 4}
FORKS = Path(__file__).resolve().parent / "memory_forks.py"
MEDIAN, WORST, TOO_LOW = 0.03, 0.10, 0.05
STEPS = 2
SEED = 20
LLAMA = ["model=llama_125m", "model.config.num_attention_heads=8", "model.config.num_key_value_heads=4"]
MODELS = {
    "Llama 11M": [
        *LLAMA,
        "model.config.hidden_size=256",
        "model.config.intermediate_size=768",
        "model.config.num_hidden_layers=6",
        "model.config.vocab_size=24000",
    ],
    "GPT-2 38M": ["model=gpt2_small", "model.config.n_layer=8", "model.config.n_embd=512", "model.config.n_head=8"]
    + ["model.config.vocab_size=24000"],
    "Llama 110M": [*LLAMA, "model.config.num_attention_heads=12", "model.config.num_hidden_layers=12"],
}
WORDS = ["schedule=constant", "cluster.num_procs=2", "train.sequence_length=64", "eval.samples=0"]
WORDS += ["train.gradient_accumulation_steps=1"]
MICRO_BATCHES, PRECISIONS = (1, 8), ("fp32", "bf16")
FREE = {"zero", "offload", "activation"}
BUCKET_KEY = "reduce_bucket_size"  # stage 0 has none, and takes no such key
BUCKET = f"deepspeed.zero_optimization.{BUCKET_KEY}=20000000"


@dataclass(frozen=True)
class Measured:
    """One configuration: what was predicted, and bytes really allocated by the rank that allocated most."""

    group: str
    candidate: Candidate
    peaks: dict[str, int]
    reserved: int | None = None

    @property
    def predicted(self) -> int:
        """Bytes of the planned peak."""
        assert self.candidate.plan is not None and self.candidate.plan.estimate.memory is not None
        return self.candidate.plan.estimate.memory.peak.total_bytes

    @property
    def peak(self) -> int:
        """Bytes of the measured one."""
        return max(self.peaks.values())

    @property
    def error(self) -> float:
        """Relative; below 0: too low."""
        return self.predicted / self.peak - 1


def run(request: Request) -> list[Row]:
    """Errors over all configurations, and the share of limits under which auto chose rightly."""
    found: list[Measured] = []
    right: list[float] = []
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder, when_asked("profile") as ask:
        for name, config, build in _groups(request, Path(folder), ask):
            candidates = [
                judged(choice.overrides(), with_choice(config, choice), None, build) for choice in choices(config, FREE)
            ]
            possible = [candidate for candidate in candidates if candidate.plan is not None]
            whole = _stage0(config, build)
            measured = _measure(name, possible + whole, Path(folder))
            for each in measured:
                print(_line(each), flush=True)
            found += measured
            right += _choices(config, measured[: len(possible)], build, request.options["limits"])
    errors = [each.error for each in found]
    return [
        Row("error of a predicted peak, absolute", "ratio", [abs(error) for error in errors], at_most=MEDIAN),
        Row("worst error of a predicted peak", "ratio", [max(map(abs, errors))], at_most=WORST),
        Row("the most that a predicted peak is too low", "ratio", [max(0.0, -min(errors))], at_most=TOO_LOW),
        *others([(each.candidate.plan, each.peak) for each in found if each.candidate.plan is not None]),
        Row("limits under which auto chose the least costly that fits", "ratio", [sum(right) / len(right)], at_least=1),
    ]


def _groups(request: Request, folder: Path, ask: Ask) -> Any:
    """(name, request, how to plan others like it) of each model, batch and precision."""
    for (name, model), size, precision in product(
        list(MODELS.items())[: request.options["models"]], MICRO_BATCHES, PRECISIONS
    ):
        words = [*model, f"train.micro_batch_size={size}", f"precision={precision}", "zero=stage1", BUCKET]
        plan = ask_plan(with_defaults([*WORDS, *words, f"run.dir={folder}/run"], request.overrides), base_environment())
        yield f"{name}, micro-batch {size}, {precision}", plan.config, builder(plan.config, ask, measure=True)


def _stage0(config: RunConfig, build: Any) -> list[Candidate]:
    """Stage 0 with and without recomputed activations, where the rules let it through: it has no bucket of a size."""
    zero = {key: value for key, value in config.deepspeed["zero_optimization"].items() if key != BUCKET_KEY}
    plain = dataclasses.replace(config, deepspeed=config.deepspeed | {"zero_optimization": zero})
    found = [Choice("stage0", "none", activation) for activation in ("none", "full")]
    candidates = [judged(choice.overrides(), with_choice(plain, choice), None, build) for choice in found]
    return [candidate for candidate in candidates if candidate.plan is not None]


def _measure(group: str, candidates: list[Candidate], folder: Path) -> list[Measured]:
    plans = [candidate.plan for candidate in candidates if candidate.plan is not None]
    place = RunDir(folder / "ranks")
    place.path.mkdir(exist_ok=True)
    place.plan.write_text(json.dumps(plans[0].to_json()), encoding="utf-8")
    file = place.path / "request.json"
    cases = [{"plan": plan.to_json(), "steps": STEPS} for plan in plans]
    file.write_text(json.dumps({"cases": cases}), encoding="utf-8")
    note(f"{group}: {len(plans)} configurations")
    command = rank_command(plans[0], place, FORKS, file)
    run_to_end(command, folder / "ranks.log", rank_environment(plans[0], base_environment()))
    found = []
    for number, candidate in enumerate(candidates):
        files = [place.path / f"case{number}.rank{rank}.json" for rank in range(plans[0].world_size)]
        answers = [json.loads(each.read_text(encoding="utf-8")) for each in files]
        for each in (*files, place.path / f"store{number}"):
            each.unlink(missing_ok=True)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise BenchError(f"{group}, {' '.join(candidate.overrides)}: {errors[0]}")
        most = max(answers, key=lambda answer: max(answer["peaks"].values()))
        found.append(Measured(group, candidate, most["peaks"], most.get("reserved")))
    return found


def _choices(config: RunConfig, measured: list[Measured], build: Any, limits: int) -> list[float]:
    """1 for each limit, drawn between the least and the greatest peak, under which auto chose rightly, else 0."""
    draw = random.Random(f"{SEED} {measured[0].group}")
    least, most = min(each.peak for each in measured), max(each.peak for each in measured)
    right = []
    for _ in range(limits):
        limit = draw.randint(least, round(most * 1.05))
        chosen = choose(_auto(config), 2, Capacity(limit, 0, None, True, "a limit that was drawn"), build)
        words = [each.candidate.overrides for each in measured]
        at = words.index(chosen.overrides)
        cheaper = [" ".join(each.candidate.overrides) for each in measured[:at] if each.peak <= limit]
        if cheaper or measured[at].peak > limit:
            note(f"{measured[at].group}: limit {limit:,}: {' '.join(chosen.overrides)} is not it; {cheaper}")
        right.append(float(not cheaper and measured[at].peak <= limit))
    return right


def _auto(config: RunConfig) -> RunConfig:
    """The request with zero, offload and activation left to the planner."""
    auto = with_choice(config, Choice("auto", "auto", None))
    return dataclasses.replace(auto, activation=dataclasses.replace(auto.activation, checkpointing="auto"))


def _line(each: Measured) -> str:
    plan = each.candidate.plan
    assert plan is not None and plan.estimate.memory is not None
    planned = {moment.name: moment.total_bytes for moment in plan.estimate.memory.moments}
    moments = "  ".join(f"{name} {planned.get(name, 0):,}/{peak:,}" for name, peak in each.peaks.items())
    kept = "" if each.reserved is None else f"  reserved {each.reserved:,}"
    return f"{each.error:+.4f}  {each.group}, {' '.join(each.candidate.overrides)}: {moments}{kept}"
