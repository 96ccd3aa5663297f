"""A kill at any moment in which a run is taken up again leaves a run that can be taken up again.

Run by pytest: the writer of the run folder dies at each of its changes of a file in turn.
Must never start anything.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

from omegaconf import OmegaConf

from launcher import attempts
from launcher.compose import stored_overrides
from launcher.plan import read_plan
from launcher.rundir import RunDir, load_run
from tests.dying import deaths
from tests.plan.asking import planned


def logged(run: RunDir) -> list[int]:
    return [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()]


def test_killed_at_any_change_of_a_file_a_resume_leaves_a_run_that_can_be_resumed(tmp_path: Path) -> None:
    source, run = RunDir(tmp_path / "source"), RunDir(tmp_path / "run")
    attempts.begin(source, planned("run.steps=4"), ["run.steps=4"], {})
    source.metrics.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3)))
    for path in (source.summary, source.effective, source.result, source.pid(0)):
        path.write_text("{}")
    more = dataclasses.replace(planned("run.steps=6"), resume_from=str(run.checkpoint(2)))

    def fresh() -> None:
        shutil.rmtree(run.path, ignore_errors=True)
        shutil.copytree(source.path, run.path)

    def take_up() -> None:
        attempts.begin(run, more, ["run.steps=6"], {})

    count = 0
    for count in deaths(fresh, take_up):
        left = load_run(str(run.path))
        assert read_plan(left.plan).config.run.steps in (4, 6), count
        assert OmegaConf.load(left.config).run.steps in (4, 6), count
        assert stored_overrides(left) in (["run.steps=4"], ["run.steps=6"]), count
        assert logged(left)[:2] == [1, 2], count
        take_up()
        assert read_plan(run.plan).config.run.steps == 6 and logged(run) == [1, 2], count
        assert not run.summary.exists() and list(run.control.iterdir()) == [], count
        assert 4 in {read_plan(path).config.run.steps for path in run.history.glob("*/plan.json")}, count
    assert count > 20
