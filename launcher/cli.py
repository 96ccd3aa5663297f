"""Hydra's entry: arguments -> request -> plan -> mode and recipe; exit codes; no traceback for a user's error.

Called by launch.py and the `zerolaunch` command.
Must never import torch, and never start anything before the plan stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from launcher import compose, env, export, help, planning, provenance, render, run
from launcher.audit.scan import scan
from launcher.cluster.value import resolve
from launcher.command import ROOT
from launcher.conversion import conversion, saved_layout, wanted_layout
from launcher.describe import Known, describe
from launcher.ds_file import Folded, contradictions, located
from launcher.errors import EXIT_OK, EXIT_REQUEST, EXIT_SIGINT, EXIT_SIGTERM, Problem, UserError, raise_if
from launcher.explain import explain
from launcher.leftovers import end_last_attempt
from launcher.model_source import refuse_missing
from launcher.plan import Plan, build_plan
from launcher.planner.choose import Chosen
from launcher.profiled import with_measured
from launcher.recorded import recorded_plan
from launcher.report import report
from launcher.resume import changed_layout, changed_options, rebatched
from launcher.rundir import RunDir, load_run
from launcher.schema import RunConfig
from launcher.show_plan import show

CONF = ROOT / "conf"
HYDRA = "1.3"  # whose behaviour is asked for


def main(argv: list[str] | None = None) -> int:
    """Runs one command line (default: this process's) and returns its exit code."""
    arguments = compose.rewrite_overrides(sys.argv[1:] if argv is None else argv)
    if {"--help", "-h"} & set(arguments):
        render.text(help.text())
        return EXIT_OK
    if not {"--multirun", "-m"} & set(arguments):
        if "recipe=export" not in arguments or "mode=plan" in arguments:
            return _execute(arguments, None)
        with run.worker("export") as ask:  # it loads what it needs while Hydra composes, and ends if nobody asks
            return _execute(arguments, None, ask)
    with tempfile.TemporaryDirectory() as scratch:  # Hydra's sweeper writes a file there, even when trials only plan
        return _execute([*arguments, f"hydra.sweep.dir='{scratch}'"], _sweep_folder(arguments))


def _execute(arguments: list[str], sweep: Path | None, ask: run.Ask | None = None) -> int:
    """Hands the command line to Hydra and returns the exit code; `sweep` is the folder of a sweep's trials."""
    trials: list[run.Outcome] = []
    env.show_full_hydra_errors()
    sys.argv = [str(ROOT / "launch.py"), *arguments]
    try:
        _composed(arguments, _task(trials, sweep, ask))
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


def _composed(arguments: list[str], task: Callable[[DictConfig], None]) -> None:
    """Calls `task` with what the command line composes to, once for each trial.

    Hydra's own entry composes a request twice, the first time to learn whether it is a sweep. One that says nothing to
    Hydra itself is none, and is composed once: a quarter of what mode=plan takes.
    """
    if any(argument.lstrip("+~").startswith(("-", "hydra")) for argument in arguments):
        return hydra.main(version_base=HYDRA, config_path=str(CONF), config_name="config")(task)()
    with hydra.initialize_config_dir(str(CONF), version_base=HYDRA):
        cfg = hydra.compose("config", arguments, return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        task(cfg)


def _task(trials: list[run.Outcome], sweep: Path | None, ask: run.Ask | None) -> Callable[[DictConfig], None]:
    """The function Hydra calls once per trial."""

    def task(cfg: DictConfig) -> None:
        overrides = compose.typed_overrides(HydraConfig.get().overrides.task)
        try:
            outcome = _one(cfg, overrides, sweep / str(HydraConfig.get().job.num) if sweep else None, ask)
        except UserError as error:
            render.problems(error.problems)
            outcome = run.Outcome(error.code, None, overrides, error="; ".join(p.why for p in error.problems))
        trials.append(outcome)
        if sweep and outcome.exit_code in (EXIT_SIGINT, EXIT_SIGTERM):
            raise KeyboardInterrupt  # whoever stops a trial by a signal means the sweep

    return task


@dataclass(frozen=True)
class Request:
    """One typed request: what is asked, what is recorded of it, and where each option comes from."""

    config: RunConfig
    overrides: list[str]
    origin: dict[str, str]
    folded: Folded | None = None


def _one(cfg: DictConfig, overrides: list[str], trial: Path | None, ask: run.Ask | None) -> run.Outcome:
    """One request: builds its plan, prints it or starts its recipe. `trial` is the run folder of a sweep's trial.

    `ask`: an export's job that loads already.
    """
    if cfg.get("mode") == "explain":
        render.explanation(describe(cfg.get("key"), _known(_new(cfg, overrides, trial))))
        return run.Outcome(EXIT_OK, None, overrides)
    if cfg.get("mode") == "audit":
        files, found = scan(cfg.audit.path, cfg.audit.format)
        render.suspicions(files, found, str(cfg.audit.format))
        return run.Outcome(EXIT_REQUEST if found else EXIT_OK, None, overrides)
    if cfg.get("key") is not None:
        fix = "add mode=explain, or leave key out"
        raise UserError(Problem("key", str(cfg.key), f"mode={cfg.mode} does not read it", fix))
    recipe = str(cfg.recipe.name)
    if recipe == "export":
        return _exported(cfg, overrides, ask)
    if recipe == "resume":
        old = load_run(compose.to_run_config(cfg).run.dir)
        request = _stored(cfg, overrides, old)
    else:
        request = _new(cfg, overrides, trial)
    config, origin = with_measured(request.config, request.origin)
    request = dataclasses.replace(request, config=config, origin=origin)
    replaced = provenance.replaced(request.folded, request.origin)
    shown = request.config.mode == "plan" and request.config.plan.format == "text"  # among the plan's own tables
    if not shown:
        render.notes(replaced)
    with contextlib.ExitStack() as stack:
        try:
            outlook = stack.enter_context(planning.prospect(request.config))
        except UserError as error:
            if shown:
                render.notes(replaced)  # they say why a key stands where it is refused
            raise UserError(*located(request.folded, error.problems), code=error.code) from None
        plan = outlook.plan
        if outlook.chosen is not None:
            request = _settled(request, outlook.chosen)
        if plan.config.mode == "train":
            render.notes([said for said in (planning.refuse_unfit(outlook),) if said is not None])
        if recipe == "resume":
            plan = _continued(plan, old)
        sources = provenance.sources(plan.config, plan.deepspeed, request.origin, request.folded)
        if plan.config.mode == "plan":
            show(plan, report(outlook), RunDir(plan.config.run.dir or "RUN_DIR"), sources, replaced)
            return run.Outcome(EXIT_OK, None, overrides)
    if plan.config.mode == "check":
        return run.check(plan, overrides)
    if plan.config.launch.submit == "sbatch":
        return run.submit(plan, request.overrides)
    return run.train(plan, request.overrides, sources)


def _new(cfg: DictConfig, overrides: list[str], trial: Path | None) -> Request:
    """The request of a run that does not exist yet."""
    config, folded = compose.typed(cfg)
    refuse_missing(config.model)
    origin = provenance.given(HydraConfig.get().runtime.choices, compose.typed_paths(overrides))
    if folded is not None:
        raise_if(contradictions(folded, overrides))
    if trial is not None:
        config.run.dir = str(Path(config.run.dir) / trial.name if config.run.dir else trial)
        origin["run.dir"] = "solved: the sweep's folder / number of the trial"
    return Request(config, overrides, origin, folded)


def _known(request: Request) -> Known:
    """What `mode=explain` shows of a request; where no plan can be made of it, its own keys."""
    config = dataclasses.replace(request.config, mode="plan")
    try:
        plan = build_plan(config, {})
        config, deepspeed = plan.config, plan.deepspeed
    except UserError:
        deepspeed = config.deepspeed
    sources = provenance.sources(config, deepspeed, request.origin, request.folded)
    return Known(config, deepspeed, sources, HydraConfig.get().runtime.choices, request.overrides)


def _continued(plan: Plan, old: RunDir) -> Plan:
    """The plan from the newest whole checkpoint of `old` on; raises UserError where that cannot be loaded into it."""
    if plan.config.mode == "train":
        end_last_attempt(old)
    checkpoint = run.whole_checkpoint(old)
    plan = dataclasses.replace(plan, resume_from=checkpoint["checkpoint"])
    raise_if(changed_layout(plan, checkpoint["manifest"]))
    needed = conversion(plan, checkpoint)
    if needed is not None:
        render.note(needed.told(saved_layout(checkpoint["manifest"]), wanted_layout(plan)))
    return plan


def _exported(cfg: DictConfig, overrides: list[str], ask: run.Ask | None) -> run.Outcome:
    """The export of a run with this command line's changes, or of a folder; `ask`: its job, where it loads already."""
    typed = compose.to_run_config(cfg)
    old = None if typed.export.source is not None else load_run(typed.run.dir)
    if old is None and typed.run.dir is not None:
        fix = "leave one of the two out"
        raise UserError(Problem("export.source", str(cfg.export.source), "run.dir names a checkpoint too", fix))
    trained = None if old is None else recorded_plan(old)
    config = typed if trained is None else _export_of(typed, overrides, trained.config)
    if typed.mode == "plan":
        return export.plan(config, old)
    with contextlib.nullcontext(ask) if ask is not None else run.worker("export") as job:
        return export.export(config, old, trained, job)


def _export_of(typed: RunConfig, overrides: list[str], stored: RunConfig) -> RunConfig:
    """What a run was asked, with the options of export that this command line names, and its mode."""
    named = {path.removeprefix("export.") for path, _ in compose.typed_paths(overrides) if path.startswith("export.")}
    section = dataclasses.replace(stored.export, **{name: getattr(typed.export, name) for name in named})
    return dataclasses.replace(stored, export=section, mode=typed.mode, plan=typed.plan)


def _stored(cfg: DictConfig, overrides: list[str], old: RunDir) -> Request:
    """The request of an existing run that goes on with this command line's changes."""
    before = recorded_plan(old)
    ran = before.config.recipe.name
    stored = compose.to_run_config(compose.recompose(old, [], ran)[0])
    composed, request, choices = compose.recompose(old, overrides, ran)
    config = _changed(cfg, composed)
    raise_if(changed_options(stored, config))
    typed = {path for path, _ in compose.typed_paths(overrides)}
    world_size = resolve(config.cluster, config.launch).world_size
    config = rebatched(config, before.batch, world_size, before.world_size, typed)
    origin = provenance.given(choices, compose.typed_paths(request))
    return Request(config, request, provenance.continued(old.sources(), stored, config, origin))


def _changed(cfg: DictConfig, composed: DictConfig) -> RunConfig:
    """A stored request, typed, with this command line's mode and what it asks of the plan."""
    config = compose.to_run_config(composed)
    asked = compose.to_run_config(cfg).plan
    memory_bytes = config.plan.memory_bytes if asked.memory_bytes is None else asked.memory_bytes
    plan = dataclasses.replace(asked, memory_bytes=memory_bytes)
    return dataclasses.replace(config, mode=str(cfg.mode), plan=plan)


def _settled(request: Request, chosen: Chosen) -> Request:
    """The request with what was chosen in the place of its autos."""
    overrides = planning.settled(request.overrides, chosen)
    return Request(chosen.config, overrides, planning.settled_origin(request.origin, chosen), request.folded)


def _sweep_folder(arguments: list[str]) -> Path:
    """Where the trials' folders go when run.dir is not given: a new folder under run.root."""
    root = next((text.split("=", 1)[1] for text in reversed(arguments) if text.startswith("run.root=")), "runs")
    return Path(root, f"sweep-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
