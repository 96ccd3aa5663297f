"""Broken configurations caught before anything starts: by ours, and by DeepSpeed's own parser, side by side.

`scripts/bench config [mutants=500] [seed=1]`; counts, no times. Bases: every zero x offload x precision that is legal.
Must never count a refusal of a valid configuration as a catch: valid ones are judged too.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

from benches.mutations import Mutant, mutants
from benches.report import Row
from benches.request import BenchError, Request
from benches.timing import base_environment
from launcher import compose
from launcher.ds_config import BATCH_KEYS
from launcher.errors import UserError
from launcher.plan import build_plan
from launcher.schema import RunConfig

OPTIONS = {"mutants": 500, "seed": 1}
KINDS = ("typo", "moved", "wrong type", "illegal combination")
PARSER = Path(__file__).with_name("parse_with_deepspeed.py")
# Blocks that no group sets, so that mistakes are made in them too.
MORE: dict[str, Any] = {
    "steps_per_print": 10,
    "wall_clock_breakdown": False,
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": False},
    "comms_logger": {"enabled": False, "verbose": False},
    "flops_profiler": {"enabled": False, "profile_step": 1, "module_depth": -1},
    "aio": {"block_size": 1048576, "queue_depth": 8},
}


def run(request: Request) -> list[Row]:
    """One row per kind of mistake (fraction that ours catches), and one for valid configurations refused."""
    if request.overrides:
        raise BenchError("it takes no overrides")
    config, bases = _bases()
    refused = [reason for base in bases if (reason := _refusal(config, base))]
    for reason in refused:
        print(f"valid configuration refused: {reason}", file=sys.stderr)
    broken = mutants([_solved(config, base) for base in bases], request.options["mutants"], request.options["seed"])
    ours = [_refusal(config, mutant.deepspeed) for mutant in broken]
    theirs = _deepspeed_refusals([mutant.deepspeed for mutant in broken])
    _show_missed(broken, ours)
    rows = []
    for kind in KINDS:
        chosen = [index for index, mutant in enumerate(broken) if mutant.kind == kind]
        parts = {
            "caught by ours": [float(sum(ours[i] is not None for i in chosen))],
            "caught by DeepSpeed's parser": [float(sum(theirs[i] is not None for i in chosen))],
            "mutants": [float(len(chosen))],
        }
        caught = parts["caught by ours"][0] / max(len(chosen), 1)
        rows.append(Row(f"{kind}: caught by ours", "fraction", [caught], at_least=1.0, parts=parts))
    parts = {"valid configurations": [float(len(bases))]}
    rows.append(Row("valid configurations refused", "count", [float(len(refused))], at_most=0.0, parts=parts))
    return rows


def _bases() -> tuple[RunConfig, list[dict[str, Any]]]:
    """A request, and the DeepSpeed dict of every zero x offload x precision that works, plain and with MORE.

    What works is said here by hand (the engine proves it in tests/train), so that a wrong refusal shows.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    conf = str(Path(__file__).resolve().parents[2] / "conf")
    found: list[dict[str, Any]] = []
    config: RunConfig | None = None
    with initialize_config_dir(config_dir=conf, version_base="1.3"):
        for stage, offload, kind in product(range(4), ("none", "cpu", "cpu_all"), ("fp32", "bf16")):
            if stage < {"none": 0, "cpu": 1, "cpu_all": 3}[offload] or (stage == 0 and kind != "fp32"):
                continue
            words = [f"zero=stage{stage}", f"offload={offload}", f"precision={kind}", "cluster.accelerator=cpu"]
            config = compose.to_run_config(hydra_compose("config", words))
            found += [copy.deepcopy(config.deepspeed), copy.deepcopy(config.deepspeed) | copy.deepcopy(MORE)]
    assert config is not None
    return config, found


def _solved(config: RunConfig, deepspeed: dict[str, Any]) -> dict[str, Any]:
    """The same with what Python solves filled in, less the batch keys, which have options of their own."""
    config.deepspeed = copy.deepcopy(deepspeed)
    return {key: value for key, value in build_plan(config, {}).deepspeed.items() if key not in BATCH_KEYS}


def _refusal(config: RunConfig, deepspeed: dict[str, Any]) -> str | None:
    """Why ours refuses this dict, or None."""
    config.deepspeed = copy.deepcopy(deepspeed)
    try:
        build_plan(config, {})
    except UserError as error:
        return str(error)
    return None


def _deepspeed_refusals(configurations: list[dict[str, Any]]) -> list[str | None]:
    done = subprocess.run(
        [sys.executable, str(PARSER)],
        input=json.dumps(configurations),
        capture_output=True,
        text=True,
        env=base_environment() | {"DS_ACCELERATOR": "cpu"},
        check=False,
    )
    if done.returncode:
        raise BenchError(f"DeepSpeed's parser process failed\n{done.stderr[-2000:]}")
    return list(json.loads(done.stdout.splitlines()[-1]))


def _show_missed(broken: list[Mutant], ours: list[str | None]) -> None:
    for mutant, reason in zip(broken, ours, strict=True):
        if reason is None:
            print(f"not caught by ours: {mutant.kind}: {mutant.what}", file=sys.stderr)
