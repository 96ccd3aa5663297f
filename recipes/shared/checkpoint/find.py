"""The newest whole checkpoint of a run. Torch-free; run as a job by the launcher before a resume or an export.

Must never return a checkpoint with a missing, short or changed file, and never fall back to nothing in silence.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher.errors import Problem, UserError
from launcher.rundir import RunDir
from recipes.shared.checkpoint import manifest


def run_job(request: dict[str, Any]) -> dict[str, Any]:
    """{"checkpoint": folder, "manifest": its manifest, "checked_s": time to read every file of it}.

    Of request["run_dir"]; says on stderr what was passed over, in whose time, too.
    """
    started = time.perf_counter()
    folder = chosen(RunDir(request["run_dir"]), request["step"], request["best"])
    took = time.perf_counter() - started
    return {"checkpoint": str(folder), "manifest": manifest.read(folder), "checked_s": took}


def chosen(run: RunDir, step: int | None, best: bool) -> Path:
    """Folder of the whole checkpoint of `step`, of the `best` evaluation, or else the newest; raises UserError."""
    if step is not None:
        return whole(run.checkpoint(step))
    return best_of(run) if best else newest(run)


class Changed(Exception):
    """A file of a checkpoint is not what was saved."""


def likely(run: RunDir, step: int | None, best: bool) -> Path | None:
    """The folder that `chosen` gives unless a file's content has changed; None where files must be read to tell."""
    if best:
        return None
    folders = manifest.steps(run.checkpoints)[:1] if step is None else [run.checkpoint(step)]
    return next((folder for folder in folders if manifest.incomplete_of(folder) is None), None)


@contextmanager
def compared(folder: Path) -> Iterator[None]:
    """Compares the files of `folder` with what was saved, beside the body: raises Changed at its end, whatever it
    came to, where one differs."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(manifest.problem_of, folder)
        try:
            yield
        finally:
            if found.result() is not None:
                raise Changed(folder)


def newest(run: RunDir) -> Path:
    """Folder of the newest whole checkpoint; raises UserError when there is none."""
    rejected: list[str] = []
    for folder in manifest.steps(run.checkpoints):
        problem = manifest.problem_of(folder)
        if problem is None:
            for line in rejected:
                print(f"· passed over {line}", file=sys.stderr)
            return folder
        rejected.append(f"{folder.name}: {problem}")
    why = "it holds no whole checkpoint" + "".join(f"; {line}" for line in rejected)
    fix = "start a new run: nothing was saved that could be continued or exported"
    if rejected:
        fix = "put back what is missing: this host must see the files of all ranks; or start a new run"
    raise UserError(Problem("run.dir", str(run.path), why, fix))


def best_of(run: RunDir) -> Path:
    """Folder of the best evaluation's checkpoint, as the newest one tells; raises UserError when it was not kept."""
    folder = newest(run)
    step = ((manifest.read(folder) or {}).get("best") or {}).get("step")
    if step is None or not run.checkpoint(step).is_dir():
        why = f"{folder.name} knows of no evaluation" if step is None else f"step {step} was the best, and was not kept"
        raise UserError(Problem("export.best", "true", why, "train with checkpoint.best=true, or name export.step"))
    return whole(run.checkpoint(step))


def whole(folder: Path) -> Path:
    """`folder`, when it is a whole checkpoint; raises UserError when it is not."""
    known = ", ".join(path.name for path in reversed(manifest.steps(folder.parent))) or "none"
    if not folder.is_dir():
        raise UserError(Problem("export.step", folder.name, "there is no such checkpoint", f"checkpoints: {known}"))
    problem = manifest.problem_of(folder)
    if problem is not None:
        raise UserError(Problem("export.step", folder.name, problem, f"export another one: {known}"))
    return folder
