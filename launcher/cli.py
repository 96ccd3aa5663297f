"""Hydra's entry: arguments -> request -> plan -> mode and recipe; exit codes; no traceback for a user's error.

Called by launch.py and the `zerolaunch` command.
Must never import torch, and never start anything before the plan stands.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from launcher import compose, env, render, run
from launcher.command import ROOT
from launcher.errors import EXIT_OK, EXIT_REQUEST, EXIT_SIGINT, EXIT_SIGTERM, UserError, raise_if
from launcher.explain import explain
from launcher.plan import build_plan
from launcher.resume import changed_layout, changed_options
from launcher.rundir import RunDir, load_run

CONF = ROOT / "conf"


def main(argv: list[str] | None = None) -> int:
    """Runs one command line (default: this process's) and returns its exit code."""
    arguments = compose.rewrite_overrides(sys.argv[1:] if argv is None else argv)
    if not {"--multirun", "-m"} & set(arguments):
        return _execute(arguments, None)
    with tempfile.TemporaryDirectory() as scratch:  # Hydra's sweeper writes a file there, even when trials only plan
        return _execute([*arguments, f"hydra.sweep.dir='{scratch}'"], _sweep_folder(arguments))


def _execute(arguments: list[str], sweep: Path | None) -> int:
    """Hands the command line to Hydra and returns the exit code; `sweep` is the folder of a sweep's trials."""
    trials: list[run.Outcome] = []
    env.show_full_hydra_errors()
    sys.argv = [str(ROOT / "launch.py"), *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(_task(trials, sweep))()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if type(error) is ValueError and not str(error).startswith("Config group override must be"):
            raise  # Hydra's only refusal of a request that is a plain ValueError: zero=3, zero=null
        render.problems((explain(error, arguments),))
        return EXIT_REQUEST
    except KeyboardInterrupt:
        if sweep:
            render.sweep(trials)
        return trials[-1].exit_code if trials and trials[-1].exit_code else EXIT_SIGINT
    except SystemExit as leave:  # argparse: --help, unknown flags
        return leave.code if isinstance(leave.code, int) else EXIT_REQUEST if leave.code else EXIT_OK
    if sweep and any(trial.run_dir for trial in trials):
        render.sweep(trials)
    return next((trial.exit_code for trial in trials if trial.exit_code), EXIT_OK)


def _task(trials: list[run.Outcome], sweep: Path | None) -> Callable[[DictConfig], None]:
    """The function Hydra calls once per trial."""

    def task(cfg: DictConfig) -> None:
        overrides = compose.typed_overrides(HydraConfig.get().overrides.task)
        try:
            outcome = _one(cfg, overrides, sweep / str(HydraConfig.get().job.num) if sweep else None)
        except UserError as error:
            render.problems(error.problems)
            outcome = run.Outcome(error.code, None, overrides, error="; ".join(p.why for p in error.problems))
        trials.append(outcome)
        if sweep and outcome.exit_code in (EXIT_SIGINT, EXIT_SIGTERM):
            raise KeyboardInterrupt  # whoever stops a trial by a signal means the sweep

    return task


def _one(cfg: DictConfig, overrides: list[str], trial: Path | None) -> run.Outcome:
    """One request: builds its plan, prints it or starts its recipe. `trial` is the run folder of a sweep's trial."""
    recipe = str(cfg.recipe.name)
    checkpoint: dict[str, Any] = {}
    if recipe in ("resume", "export"):
        old = load_run(compose.to_run_config(cfg).run.dir)
        stored = compose.to_run_config(compose.recompose(old, [], "pretrain")[0])
        composed, request = compose.recompose(old, overrides, "export" if recipe == "export" else stored.recipe.name)
        config = compose.to_run_config(composed)
        config.mode, config.plan.format = str(cfg.mode), str(cfg.plan.format)
        if recipe == "export":
            return run.export(config, old, dry=config.mode == "plan")
        raise_if(changed_options(stored, config))
        checkpoint = run.newest_checkpoint(old)
    else:
        config, request = compose.to_run_config(cfg), overrides
        if trial is not None:
            config.run.dir = str(Path(config.run.dir) / trial.name if config.run.dir else trial)
    plan = build_plan(
        config,
        run.worker_environment(config),
        run.measured_parameters(config),
        resume_from=checkpoint.get("checkpoint"),
    )
    if checkpoint:
        raise_if(changed_layout(plan, checkpoint["manifest"]))
    if config.mode == "plan":
        render.plan(plan, RunDir(config.run.dir or "RUN_DIR"), config.plan.format)
        return run.Outcome(EXIT_OK, None, overrides)
    return run.train(plan, request)


def _sweep_folder(arguments: list[str]) -> Path:
    """Where the trials' folders go when run.dir is not given: a new folder under run.root."""
    root = next((text.split("=", 1)[1] for text in reversed(arguments) if text.startswith("run.root=")), "runs")
    return Path(root, f"sweep-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
