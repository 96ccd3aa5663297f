"""Claims about plans that runs recorded: one of an earlier release is read, one that was edited is not.

Run by pytest; tests/train/test_resume.py continues and exports such a run.
Must never change a plan by other means than dropping what an earlier release did not have.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import initialize_config_dir

from launcher import compose
from launcher.plan import DERIVED, fingerprint
from launcher.recorded import recorded_plan
from launcher.rundir import RunDir, write_json
from tests.plan.asking import CONF, composed, planned, refuses
from tests.plan.test_plan import EDITED

REQUEST = ("zero=stage1", "run.seed=7", "run.steps=9", "++model.config.hidden_size=64")
NEWER = (("ema",), ("plan", "html"), ("train", "objectives"), ("checkpoint", "background"))


def of_an_earlier_release(run: RunDir) -> None:
    """Drops from plan.json and config.yaml of `run` what is taken to be new, as if it had never been there."""
    stored = yaml.safe_load(run.config.read_text())
    plan = json.loads(run.plan.read_text())
    for config in (stored, plan["config"]):
        for *sections, name in NEWER:
            inner = config
            for section in sections:
                inner = inner[section]
            del inner[name]
    del plan["estimate"]["not_measured"]
    run.config.write_text(yaml.safe_dump(stored))
    write(run, plan)


def write(run: RunDir, plan: dict[str, Any]) -> None:
    """The plan with the fingerprint of its content."""
    content = {name: item for name, item in plan.items() if name not in DERIVED}
    write_json(run.plan, plan | {"fingerprint": fingerprint(content)})


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    """A run's folder, inside Hydra's entry."""
    found = RunDir(tmp_path / "run")
    found.create()
    found.config.write_text(compose.composed_yaml(composed(*REQUEST)))
    found.overrides.write_text("\n".join(REQUEST) + "\n")
    write_json(found.plan, planned(*REQUEST).to_json())
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        yield found


def test_a_plan_of_this_release_is_read_as_it_is(run: RunDir) -> None:
    assert recorded_plan(run).fingerprint == planned(*REQUEST).fingerprint


def test_options_that_are_newer_than_the_run_have_their_defaults(run: RunDir) -> None:
    of_an_earlier_release(run)
    assert "ema" not in json.loads(run.plan.read_text())["config"]
    found, made = recorded_plan(run), planned(*REQUEST)
    assert dataclasses.replace(found.config, run=made.config.run) == made.config  # its folder is this one
    assert found.config.run.seed == 7
    assert (found.batch, found.cluster, found.deepspeed) == (made.batch, made.cluster, made.deepspeed)


def test_an_edited_plan_of_an_earlier_release_is_refused(run: RunDir) -> None:
    of_an_earlier_release(run)
    plan = json.loads(run.plan.read_text())
    plan["config"]["run"]["seed"] = 8
    write_json(run.plan, plan)
    with refuses("plan.json", EDITED):
        recorded_plan(run)


def test_what_no_default_can_stand_for_is_named(run: RunDir) -> None:
    plan = json.loads(run.plan.read_text())
    del plan["batch"]["micro_batch_size"]
    write(run, plan)
    with refuses("plan.json", "made by another release", "micro_batch_size", "model.init_from=CHECKPOINT_FOLDER"):
        recorded_plan(run)


def test_a_plan_of_another_version_is_refused(run: RunDir) -> None:
    write(run, json.loads(run.plan.read_text()) | {"version": 2})
    with refuses("version 2", EDITED):
        recorded_plan(run)


def test_a_key_that_conf_gained_for_deepspeed_does_not_reach_an_old_run(run: RunDir) -> None:
    stored = yaml.safe_load(run.config.read_text())
    del stored["deepspeed"]["gradient_clipping"], stored["deepspeed"]["optimizer"]["params"]["eps"]
    run.config.write_text(yaml.safe_dump(stored))
    again = compose.to_run_config(compose.recompose(run, [], "pretrain")[0]).deepspeed
    assert "gradient_clipping" not in again and "eps" not in again["optimizer"]["params"]
    changed = compose.recompose(run, ["deepspeed.gradient_clipping=2"], "pretrain")[0]
    assert compose.to_run_config(changed).deepspeed["gradient_clipping"] == 2
