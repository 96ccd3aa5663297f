"""Folders that a request names as its model -> the model's configuration: of a Hugging Face folder, or of a run.

Called by `launcher.compose` when a request is typed.
Must never let weights be loaded into a model of another shape than theirs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.errors import Problem, UserError, raise_if
from launcher.rundir import RunDir, read_json
from launcher.schema import ModelSection

# Fields that say how a file was written or a model is used, not what its weights are.
NOT_SHAPE = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path", "id2label")


def complete_model(model: ModelSection) -> None:
    """Fills `model.config` from `model.path`, or from `model.init_from` where neither gives one; raises UserError.

    A module of the user's own has no configuration but its arguments.
    """
    if model.target is not None:
        return
    origin = model.path or (None if model.config.get("model_type") else model.init_from)
    if origin is not None:
        where = "model.path" if model.path else "model.init_from"
        model.config = read_config(Path(origin), where) | model.config
    if not model.config.get("model_type"):
        raise UserError(
            Problem(
                "model.config",
                str(model.config),
                "a configuration names its family in model_type",
                "add model.config.model_type=llama (or another family), model.path=FOLDER or model.init_from=FOLDER",
            )
        )
    # A run that goes on does not need the folder it began with.
    if model.init_from is not None and origin != model.init_from and Path(model.init_from).exists():
        raise_if(_contradictions(model, read_config(Path(model.init_from), "model.init_from")))


def refuse_missing(model: ModelSection) -> None:
    """Raises UserError when there is nothing at `model.init_from`, which a new run begins with."""
    if model.init_from is not None and not Path(model.init_from).is_dir():
        fix = "name a local folder with weights; nothing is downloaded at run time"
        raise UserError(Problem("model.init_from", model.init_from, "there is no such folder", fix))


def read_config(path: Path, where: str) -> dict[str, Any]:
    """The configuration in a Hugging Face folder or file, of a run, or of one of its checkpoints."""
    run = RunDir(path)
    stored = read_json(run.plan) if run.exists else read_json(path / "manifest.json")
    if stored is not None:
        return dict(stored["config"]["model"]["config"] if run.exists else stored["model_config"])
    file = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise UserError(
            Problem(
                where,
                str(path),
                f"no Hugging Face configuration can be read from {file}: {reason}",
                "name a local folder with config.json; nothing is downloaded at run time",
            )
        ) from None
    if not isinstance(fields, dict) or not fields.get("model_type"):
        raise UserError(Problem(where, str(file), "it has no model_type", "name the config.json of a model"))
    return fields


def _contradictions(model: ModelSection, theirs: dict[str, Any]) -> list[Problem]:
    """A problem for each field of the request that is another in the folder of the weights."""
    return [
        Problem(
            f"model.config.{name}",
            str(value),
            f"the weights of model.init_from are of a model with {theirs[name]}",
            "use model=hf, which takes the configuration of the weights, or leave this field out",
        )
        for name, value in model.config.items()
        if name in theirs and name not in NOT_SHAPE and theirs[name] != value
    ]
