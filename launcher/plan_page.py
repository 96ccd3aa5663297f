"""A plan and its report -> one HTML page with charts as SVG in it, which opens without a network.

Called by `launcher.show_plan` for plan.html. The figures and most of the words are those of the text.
Must never load anything from elsewhere, nor put a text of the user's into the page as markup.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from launcher.ds_file import leaves
from launcher.ds_values import show
from launcher.errors import Problem, UserError
from launcher.plan import Plan
from launcher.plan_words import command, facts, gb, head, judgement, refusals
from launcher.rundir import RunDir

WIDTH, BAR, GAP, LABEL = 860, 20, 6, 300  # pixels
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .2rem .8rem .2rem 0; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } tr.now { font-weight: 600; }
.scroll { overflow-x: auto; } code { overflow-wrap: anywhere; } svg { max-width: 100%; height: auto; }
svg text { fill: currentColor; font-size: 13px; } dt { font-weight: 600; } dd { margin: 0 0 .4rem 0; }
"""
Bar = tuple[str, Sequence[tuple[str, int]], str]  # label, (term, bytes) from left to right, text behind it


def write(path: Path, value: Plan, figures: dict[str, Any], run: RunDir, sources: Mapping[str, str]) -> None:
    """Writes the page; raises UserError where it cannot be written."""
    try:
        path.write_text(page(value, figures, run, sources), encoding="utf-8")
    except OSError as error:
        why = f"it cannot be written: {error.strerror}"
        raise UserError(Problem("plan.html", str(path), why, "name a file in a folder that is there")) from None


def page(value: Plan, figures: dict[str, Any], run: RunDir, sources: Mapping[str, str]) -> str:
    """The whole document."""
    title = f"Plan: {value.config.model.name}, stage {value.zero_stage}, {value.world_size} ranks"
    parts = [f"<h1>{escape(title)}</h1>", _list(head(value))]
    memory = value.estimate.memory
    if memory is not None:
        moments: list[Bar] = [
            (moment.name, list(moment.terms.items()), f"{gb(moment.total_bytes)} GB") for moment in memory.moments
        ]
        limit = figures["capacity"]["device_bytes"] if figures["capacity"] else None
        parts += ["<h2>Memory of a rank over a step</h2>", bars(moments, limit)]
    parts.append(_list(facts(value, figures)))
    for name, title in (("compare", "Stages and offloads"), ("scale", "Numbers of ranks")):
        rows = [row for row in figures[name] if row["peak_bytes"] is not None]
        if rows:
            charted: list[Bar] = [(_label(row), [("peak", row["peak_bytes"])], _behind(row)) for row in rows]
            limit = figures["capacity"]["device_bytes"] if figures["capacity"] else None
            parts += [f"<h2>{title}: peak of a rank</h2>", bars(charted, limit)]
        parts += [
            f"<p>refused: {escape('; '.join(w))}: {escape(why)}</p>" for why, w in refusals(figures[name]).items()
        ]
    settings = [(path, show(item), sources[f"deepspeed.{path}"]) for path, item in leaves(value.deepspeed)]
    parts += ["<h2>DeepSpeed</h2>", _table(("key", "value", "from"), settings)]
    parts += [f"<h2>Command</h2><p><code>{escape(shlex.join(command(value, run)))}</code></p>"]
    parts += [f"<p>fingerprint {value.fingerprint[:16]}</p>"]
    start = f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
    return f"{start}<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"


def bars(rows: Sequence[Bar], limit: int | None) -> str:
    """Stacked horizontal bars on one scale of bytes, with a line at `limit`, and a legend where there are terms."""
    totals = [sum(size for _, size in terms) for _, terms, _ in rows]
    room = WIDTH - LABEL - 180
    scale = room / max([*totals, limit or 0, 1])
    names = list(dict.fromkeys(name for _, terms, _ in rows for name, _ in terms))
    height = (BAR + GAP) * len(rows) + GAP
    drawn = [f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">']
    for number, (label, terms, behind) in enumerate(rows):
        top, left = GAP + number * (BAR + GAP), float(LABEL)
        drawn.append(f'<text x="{LABEL - 8}" y="{top + 15}" text-anchor="end">{escape(label)}</text>')
        for name, size in terms:
            colour = COLOURS[names.index(name) % len(COLOURS)]
            box = f'x="{left:.1f}" y="{top}" width="{size * scale:.1f}" height="{BAR}" fill="{colour}"'
            drawn.append(f"<rect {box}><title>{escape(name)}: {gb(size)} GB</title></rect>")
            left += size * scale
        drawn.append(f'<text x="{left + 6:.1f}" y="{top + 15}">{escape(behind)}</text>')
    if limit is not None:
        at = f"{LABEL + limit * scale:.1f}"
        line = f'<line x1="{at}" x2="{at}" y1="0" y2="{height}" stroke="currentColor" stroke-dasharray="4 3">'
        drawn.append(f"{line}<title>a rank may use {gb(limit)} GB</title></line>")
    legend = "".join(
        f'<span style="color:{COLOURS[number % len(COLOURS)]}">&#9632;</span> {escape(name)} &nbsp; '
        for number, name in enumerate(names)
    )
    return "".join(drawn) + "</svg>" + (f"<p>{legend}</p>" if len(names) > 1 else "")


def _label(row: dict[str, Any]) -> str:
    return " ".join(row["overrides"]) if row["overrides"] else f"{row['ranks']:,} ranks"


def _behind(row: dict[str, Any]) -> str:
    return f"{gb(row['peak_bytes'])} GB {judgement(row)}".strip() + (" (asked for)" if row["current"] else "")


def _list(rows: Sequence[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in rows) + "</dl>"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    first = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{first}</tr>{body}</table></div>'
