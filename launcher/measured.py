"""A request -> the profile of its model, measured in a process of its own and remembered.

Called when a plan is built, through `profiles`. Remembered by everything that decides it, versions included.
Must never start a process for what is remembered.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher import env
from launcher.plan import ModelFacts, installed_versions
from launcher.planner.profile import Profile
from launcher.run import Ask
from launcher.rundir import read_json
from launcher.schema import RunConfig

Profiles = Callable[[RunConfig, int, str], ModelFacts]
VERSION = 4  # of what a profile holds
DECIDING = ("torch", "transformers", "peft")


def profiles(ask: Ask | None) -> Profiles:
    """A function of a request, its micro-batch and its precision that gives what is known of the model.

    `ask`: the job `profile`, for what is not remembered (seconds for each); without it such a model is not known.
    """

    kept: dict[Path, ModelFacts] = {}

    def known(config: RunConfig, micro_batch_size: int, precision: str) -> ModelFacts:
        request = {"config": _deciding(config), "micro_batch_size": micro_batch_size, "precision": precision}
        file = None if config.model.target is not None else _file(request)
        if file in kept:
            return kept[file]
        answer = read_json(file) if file is not None else None
        if answer is None and ask is not None:
            answer = ask(profile_request(config, micro_batch_size, precision, file))
        if answer is None:
            return ModelFacts()
        profile = None if answer["timeline"] is None else Profile.from_json(answer["timeline"])
        facts = ModelFacts(answer["parameters"], profile, answer["why"])
        if file is not None:
            kept[file] = facts
        return facts

    return known


def profile_request(config: RunConfig, micro_batch_size: int, precision: str, file: Path | None) -> dict[str, Any]:
    """What the profile job is asked; `file`: where it keeps its answer."""
    return {
        **{"config": dataclasses.asdict(config), "micro_batch_size": micro_batch_size, "precision": precision},
        **{"keeps_inputs": keeps_inputs(config), "file": None if file is None else str(file)},
    }


def _deciding(config: RunConfig) -> dict[str, Any]:
    """What of a request decides its model's profile, beside its batch and precision."""
    peft = dataclasses.asdict(config.peft) if config.peft.kind != "none" else None
    return {
        "model": config.model.config,
        "attention": config.model.attn_implementation,
        "leaves": config.model.leaf_modules,
        "length": config.train.sequence_length,
        "checkpointing": config.activation.checkpointing,
        "peft": peft,
        "frozen": config.parameters.frozen,
        "layers": keeps_inputs(config),
        "data": [config.data.get("kind") == "chat", bool(config.data.get("packing"))],
    }


@functools.cache
def _versions() -> dict[str, str | None]:
    """Kept: they take 2 ms to read, and a comparison asks for dozens of plans."""
    return {name: version for name, version in installed_versions().items() if name in DECIDING}


def keeps_inputs(config: RunConfig) -> bool:
    """Whether DeepSpeed's own linear layers keep more than torch's: at stage 3, of frozen ones, unless told not to."""
    zero = config.deepspeed.get("zero_optimization", {})
    partly = config.peft.kind != "none" or bool(config.parameters.frozen)
    return partly and zero.get("stage") == 3 and bool(zero.get("memory_efficient_linear", True))


def _file(request: dict[str, Any]) -> Path:
    text = json.dumps([request, _versions(), VERSION], sort_keys=True)
    return env.cache_dir() / "profiles" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
