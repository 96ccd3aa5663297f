"""A folder that somebody names as a checkpoint -> the one with DeepSpeed's files, and the one with the model's config.

Used by export and import for checkpoints that no run of ours wrote: of DeepSpeed alone, or of Hugging Face's Trainer.
Must never choose among several checkpoints in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.errors import Problem, UserError

CONFIG = "config.json"


@dataclass(frozen=True)
class Located:
    """`shards`: folder with the *_states.pt files. `model`: folder with config.json, None where there is none near."""

    shards: Path
    model: Path | None


def locate(path: Path, where: str) -> Located:
    """Finds both from a tag's folder, the folder above with `latest`, or a Trainer's checkpoint-N folder.

    `where`: the option that named it. Raises UserError when there is none, or more than one and no `latest`.
    """
    if not path.is_dir():
        raise UserError(Problem(where, str(path), "there is no such folder", "name a folder with a checkpoint in it"))
    shards = path if _has_shards(path) else _inside(path, where)
    model = next((folder for folder in (shards, *shards.parents[:2]) if (folder / CONFIG).is_file()), None)
    return Located(shards, model)


def _inside(path: Path, where: str) -> Path:
    latest = path / "latest"
    if latest.is_file():
        named = path / latest.read_text(encoding="utf-8").strip()
        if named != path and _has_shards(named):
            return named
        why = f"its `latest` names {named.name or 'nothing'}, and no checkpoint is there"
        raise UserError(Problem(where, str(path), why, "name the folder of the checkpoint itself"))
    found = sorted(folder for folder in path.iterdir() if folder.is_dir() and _has_shards(folder))
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(folder.name for folder in found)
        raise UserError(
            Problem(where, str(path), "it holds several checkpoints and no `latest`", f"name one of {names}")
        )
    why = "no *_model_states.pt in it, nor in a folder below it"
    raise UserError(Problem(where, str(path), why, "name the folder that DeepSpeed's save_checkpoint was given"))


def _has_shards(folder: Path) -> bool:
    return folder.is_dir() and any(folder.glob("*_model_states.pt"))
