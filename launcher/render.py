"""Everything a human sees: problems, plans, progress, endings.

Called by the rest of the launcher. Text goes to stdout, problems and notes to stderr.
Must never decide anything: it shows values that others computed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from launcher.audit.scan import Finding as Suspicion
from launcher.cluster.checks import FAIL, OK
from launcher.cluster.preflight import Finding, failed
from launcher.ds_config import zero_stage
from launcher.errors import Failure, Problem, format_problems
from launcher.plan import Plan
from launcher.planner import surprise
from launcher.rundir import RunDir

GB = 1e9
LAST_LINES = 20


def problems(found: Sequence[Problem]) -> None:
    """The problem list of a refused request, on stderr."""
    count = f"{len(found)} problem{'s' if len(found) > 1 else ''}"
    print(format_problems(list(found), f"zerolaunch: {count}; nothing was started"), file=sys.stderr)


def note(text: str) -> None:
    """One line about what happens now, on stderr."""
    print(f"· {text}", file=sys.stderr, flush=True)


def text(value: str) -> None:
    """Plain text on stdout; a reader that stops early (`| head`) is not an error."""
    try:
        print(value, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open: the interpreter flushes it at its end


def notes(texts: Sequence[str]) -> None:
    """One line each, on stderr."""
    for text in texts:
        note(text)


def suspicions(files: int, found: Sequence[Suspicion], form: str) -> None:
    """`mode=audit`: one JSON object, or two lines for each suspicious one, as editors and other linters have them."""
    if form == "json":
        text(json.dumps({"files": files, "findings": [dataclasses.asdict(hit) for hit in found]}))
        return
    for hit in found:
        text(f"{hit.file}:{hit.line}: {hit.kind}: {hit.what}: {hit.why}\n    fix: {hit.fix}")
    text(f"{files} file(s) read, {len(found)} suspicious line(s)")


def check(value: Plan, findings: list[Finding], measured: dict[str, Any] | None) -> None:
    """`mode=check`: one row for each host and check, and what to do about those that are not ok."""
    bad = [finding for finding in findings if finding.status != OK]
    if value.config.check.format == "json":
        each = [dataclasses.asdict(finding) for finding in findings]
        print(json.dumps({"ok": not failed(findings), "findings": each, "measured": measured}, ensure_ascii=False))
        return
    rows = [(finding.host, finding.check.replace("_", " "), finding.status, finding.got) for finding in findings]
    titled = [("host", "check", "status", "found"), *rows]
    widths = [max(len(row[column]) for row in titled) for column in range(3)]
    for host, name, status, got in titled:
        print(f"{host:<{widths[0]}}  {name:<{widths[1]}}  {status:<{widths[2]}}  {got}")
    for finding in bad:
        print(f"\n{finding.host}: {finding.check.replace('_', ' ')}: {finding.got}")
        print(f"  why   {finding.why}")
        if finding.fix:
            print(f"  fix   {finding.fix}")
    hosts, lost = len(value.cluster.hosts), len({finding.host for finding in bad if finding.status == FAIL})
    print(f"\n{hosts} hosts: " + (f"{lost} must not take part" if lost else "all may take part"))


def submitted(job: str, script: Path, run: RunDir) -> None:
    """A batch job that waits in Slurm's queue."""
    print(f"submitted job {job}: {script}")
    print(f"its output: {run.path}.slurm-{job}.log; its run: {run.path}")
    print(f"cancel:     scancel {job}")


def explanation(lines: Sequence[tuple[str, str]]) -> None:
    """`mode=explain`: a label and its text on each line."""
    width = max(len(label) for label, _ in lines)
    text("\n".join(f"{label:<{width}}  {words}".rstrip() for label, words in lines))


def table(first: str, rows: Sequence[tuple[str, str, str]]) -> str:
    """`key  value  from`, as wide as it needs to be: a line of a terminal or of a file is never cut."""
    titled = [(first, "value", "from"), *rows]
    widths = [max(len(row[column]) for row in titled) for column in (0, 1)]
    return "\n".join(f"{key:<{widths[0]}}  {value:<{widths[1]}}  {source}" for key, value, source in titled)


def start(run: RunDir, value: Plan, attempt: int) -> None:
    """The line that says where the run is."""
    what = f"attempt {attempt}, from {Path(value.resume_from).name}" if value.resume_from else "new run"
    print(f"run {run.path} ({what}): {value.world_size} ranks, stage {zero_stage(value.deepspeed)}", flush=True)


class PlainProgress:
    """Progress as lines, for files and pipes: one at most every `every_s` seconds, and every evaluation."""

    def __init__(self, steps: int, every_s: float = 5.0) -> None:
        self.steps, self.every_s, self.shown = steps, every_s, 0.0

    def status(self, text: str) -> None:
        """What the workers do now."""
        print(f"· {text}", flush=True)

    def metrics(self, record: dict[str, Any]) -> None:
        """One object of metrics.jsonl."""
        if "eval_loss" in record:
            print(f"step {record['step']}/{self.steps}  eval loss {record['eval_loss']:.4f}", flush=True)
        elif time.monotonic() - self.shown >= self.every_s or record["step"] == self.steps:
            self.shown = time.monotonic()
            print(f"step {record['step']}/{self.steps}  {_describe(record)}", flush=True)


class BarProgress(PlainProgress):
    """A rich progress bar, for terminals."""

    def __init__(self, steps: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(steps)
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            transient=False,
        )
        self.task = self.bar.add_task("starting", total=steps)

    def status(self, text: str) -> None:
        self.bar.update(self.task, description=text)

    def metrics(self, record: dict[str, Any]) -> None:
        if "eval_loss" in record:
            self.bar.console.print(f"step {record['step']}/{self.steps}  eval loss {record['eval_loss']:.4f}")
        else:
            self.bar.update(self.task, completed=record["step"], description=_describe(record))


def _describe(record: dict[str, Any]) -> str:
    return f"loss {record['loss']:.4f}  lr {record['lr']:.2e}  {record['tokens_per_s']:,.0f} tokens/s"


@contextlib.contextmanager
def progress(value: Plan) -> Iterator[PlainProgress]:
    """Progress display that fits stdout: a bar on a terminal, lines elsewhere."""
    if not sys.stdout.isatty():
        yield PlainProgress(value.config.run.steps)
        return
    bar = BarProgress(value.config.run.steps)
    with bar.bar:
        yield bar


def finish(run: RunDir, value: Plan, summary: dict[str, Any], failure: Failure | None) -> None:
    """How the run ended and the exact next commands; for a failure the rank, its last lines and its log."""
    if failure is not None:
        where = f"rank {failure.rank} on {failure.host}" if failure.rank is not None else "the launcher"
        print(f"\nrun failed: {where}: {failure.message}", file=sys.stderr)
        with contextlib.suppress(OSError):
            lines = failure.log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            print("".join(f"  | {line}\n" for line in lines), end="", file=sys.stderr)
        print(f"log: {failure.log}", file=sys.stderr)
    if summary.get("memory"):
        print("\n".join(surprise.lines(summary["memory"])))
    if summary.get("audit_findings"):
        print(f"audit:     {summary['audit_findings']} finding(s) about partitioned parameters: {run.audit}")
    if summary.get("final_eval_loss") is not None:
        entropy = summary["unigram_entropy"]
        beside = "" if entropy is None else f" nats/token (unigram entropy of the corpus {entropy:.4f})"
        print(f"final validation loss {summary['final_eval_loss']:.4f}{beside}")
    if summary.get("tracker_sync"):
        print(f"sync W&B:  {summary['tracker_sync']}")
    if summary.get("checkpoint"):
        base = f"python {Path(sys.argv[0]).name}"
        folder = shlex.quote(str(run.path))
        print(f"checkpoint {summary['checkpoint']}")
        steps = value.config.run.steps if summary["steps"] < value.config.run.steps else 2 * value.config.run.steps
        print(f"resume:    {base} recipe=resume run.dir={folder} run.steps={steps}")
        print(f"export:    {base} recipe=export run.dir={folder}")
        print(f"plan:      {base} mode=plan recipe=resume run.dir={folder} run.steps={steps}")


def export_plan(request: dict[str, Any], as_json: bool) -> None:
    """`mode=plan recipe=export`: what would be written."""
    print(
        json.dumps(request)
        if as_json
        else f"would export {request['checkpoint']} to {request['dir']} as {request['dtype']}"
    )


def export_done(answer: dict[str, Any]) -> None:
    """What was written, where it lies, and what was checked."""
    size = f"{answer['bytes'] / GB:.3f} GB as {answer['dtype']}"
    print(f"exported {answer['tensors']} tensors, {size} to {answer['dir']}")
    verified = answer["verified"]
    if not answer["described"]:
        print("no config.json: the checkpoint has none beside it (model.path=FOLDER gives one)")
    if verified["tensors"]:
        print("verified: every tensor was read back and equals the checkpoint's")
    if verified.get("loss") is not None:
        print(f"verified: reloaded, the model has the checkpoint's loss on its fixed batch ({verified['loss']:.6f})")
    elif verified.get("skipped"):
        print(f"not reloaded: {verified['skipped']}")


def sweep(trials: Sequence[Any]) -> None:
    """Comparison table of a sweep's trials."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="sweep", title_justify="left")
    for name in ("trial", "overrides", "exit", "train loss", "eval loss", "tokens/s", "peak GB", "run"):
        table.add_column(name)
    for number, trial in enumerate(trials):
        values = trial.summary
        table.add_row(
            str(number),
            " ".join(trial.overrides),
            str(trial.exit_code),
            _number(values.get("final_train_loss"), ".4f"),
            _number(values.get("final_eval_loss"), ".4f"),
            _number(values.get("tokens_per_s"), ",.0f"),
            _number((values.get("peak_bytes") or 0) / GB or None, ".2f"),
            str(trial.run_dir) if trial.run_dir else (trial.error or "not started"),
        )
    Console(width=200 if not sys.stdout.isatty() else None, highlight=False).print(table)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
