"""A plan and its report -> what mode=plan prints: tables for a person, or one JSON object.

Called by `launcher.cli`. The figures are those of `launcher.report`; the page of plan.html is `launcher.plan_page`'s.
Must never compute one of its own, nor print anything beside the object where JSON is asked for.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher import plan_page
from launcher.ds_file import leaves
from launcher.ds_values import show as written_value
from launcher.plan import Plan
from launcher.plan_words import choice, command, facts, gb, head, judgement, refusals
from launcher.render import note, table, text
from launcher.rundir import RunDir

BAR = 24  # cells of the longest bar
COLUMNS = 120  # of a table that goes into a file or a pipe


def show(
    value: Plan, figures: dict[str, Any], run: RunDir, sources: Mapping[str, str], replaced: Sequence[str]
) -> None:
    """mode=plan: text or JSON on stdout, and a page where one is asked for."""
    if value.config.plan.html is not None:
        plan_page.write(Path(value.config.plan.html), value, figures, run, sources)
        note(f"wrote {value.config.plan.html}")
    if value.config.plan.format == "json":
        as_json(value, figures, run, sources)
    else:
        as_text(value, figures, run, sources, replaced)


def as_json(value: Plan, figures: dict[str, Any], run: RunDir, sources: Mapping[str, str]) -> None:
    """One object: the plan's own fields, its report, commands and sources."""
    more = {"commands": {"launch": command(value, run)}, "sources": dict(sources), "report": figures}
    print(json.dumps(value.to_json() | more, ensure_ascii=False))


def as_text(
    value: Plan, figures: dict[str, Any], run: RunDir, sources: Mapping[str, str], replaced: Sequence[str]
) -> None:
    """Tables. `replaced`: what of the user's DeepSpeed file does not count."""
    from rich.console import Console
    from rich.text import Text

    width = None if sys.stdout.isatty() else COLUMNS
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)
    with console.capture() as written:  # and printed at once: a reader that stops early (`| head`) is not an error
        for name, line in head(value):
            console.print(Text.assemble((f"{name:<8} ", "bold"), line))
        for name, line in choice(figures):
            console.print(Text.assemble((f"{name:<8} ", "bold"), line))
        if value.estimate.memory is not None:
            console.print(_memory(value, figures))
        for name, line in facts(value, figures):
            console.print(Text.assemble((f"{name:<12} ", "bold"), line))
        if figures["compare"]:
            console.print(_compared(figures["compare"]))
            for why, words in refusals(figures["compare"]).items():
                console.print(f"refused: {'; '.join(words)}: {why}")
        if figures["scale"]:
            console.print(_scaled(figures["scale"]))
        keys = [(path, written_value(item), sources[f"deepspeed.{path}"]) for path, item in leaves(value.deepspeed)]
        for line in (table("DeepSpeed", keys), *replaced):
            console.print(line)
        console.print(Text("command", "bold"))
        console.print("  " + shlex.join(command(value, run)))
        console.print(f"fingerprint {value.fingerprint[:16]}; nothing was started or written")
    text(written.get().removesuffix("\n"))


def _memory(value: Plan, figures: dict[str, Any]) -> Any:
    """Terms at the peak with bars, then the four moments, the textbook's figure, host and disk."""
    from rich.table import Table

    memory = value.estimate.memory
    assert memory is not None and value.estimate.textbook_bytes is not None
    peak = memory.peak
    shown = Table(title=f"memory of a rank, GB: at its peak, {peak.name}", title_justify="left")
    shown.add_column("term")
    shown.add_column("GB", justify="right")
    shown.add_column("")
    longest = max(peak.terms.values(), default=1)
    for name, size in sorted(peak.terms.items(), key=lambda item: -item[1]):
        shown.add_row(name, gb(size), "█" * max(1, round(BAR * size / longest)) if size else "")
    shown.add_section()
    for moment in memory.moments:
        shown.add_row(f"at {moment.name}", gb(moment.total_bytes), "the peak" if moment is peak else "")
    shown.add_section()
    resident = sum(value.estimate.device_bytes.values()) + sum(value.estimate.host_bytes.values())
    shown.add_row("textbook: 16 bytes a parameter", gb(value.estimate.textbook_bytes), "model state as papers count it")
    shown.add_row("kept between steps", gb(resident), "the same as DeepSpeed allocates it")
    slots = max(len(host.slots) for host in value.cluster.hosts)
    for where, terms in (("host", memory.host), ("disk", memory.disk)):
        if terms:
            shown.add_section()
            for name, size in terms.items():
                shown.add_row(f"{where}: {name}", gb(size), f"{gb(size * slots)} on a host of {slots} ranks")
    return shown


def _compared(rows: list[dict[str, Any]]) -> Any:
    """A row for each stage and offload, with and without recomputed activations side by side."""
    from rich.table import Table

    shown = Table(title="stages and offloads, the least costly first; GB of a rank", title_justify="left")
    for name in ("", "stage and offload", "peak", "at", "host", "sent", "", "peak, recomputing", ""):
        shown.add_column(name, justify="right" if name in ("peak", "host", "sent", "peak, recomputing") else "left")
    for plain, again in zip(rows[::2], rows[1::2], strict=True):
        if plain["refused"] or plain["peak_bytes"] is None:
            continue
        shown.add_row(
            ">" if plain["current"] or again["current"] else "",
            " ".join(plain["overrides"][:2]),
            gb(plain["peak_bytes"]),
            plain["moment"],
            gb(plain["host_bytes"]) if plain["host_bytes"] else "",
            gb(plain["sent_bytes"]),
            judgement(plain),
            gb(again["peak_bytes"]) if again["peak_bytes"] is not None else "refused",
            judgement(again),
        )
    return shown


def _scaled(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    shown = Table(title="the same on other numbers of ranks; GB of a rank", title_justify="left")
    for name in ("", "ranks", "global batch", "peak", "at", "host", "sent", ""):
        shown.add_column(name, justify="left" if name in ("", "at") else "right")
    for row in rows:
        mark = ">" if row["current"] else ""
        if row["peak_bytes"] is None:
            shown.add_row(mark, str(row["ranks"]), "", "", "", "", "", row["refused"] or "size not known")
            continue
        sizes = (
            gb(row["peak_bytes"]),
            row["moment"],
            gb(row["host_bytes"]) if row["host_bytes"] else "",
            gb(row["sent_bytes"]),
        )
        shown.add_row(mark, f"{row['ranks']:,}", f"{row['global_batch_size']:,}", *sizes, judgement(row))
    return shown
