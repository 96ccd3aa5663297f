"""A plan and its report -> the lines in which both the tables and the page of mode=plan speak.

Used by `launcher.show_plan` and `launcher.plan_page`. Sizes are in GB of 1e9 bytes.
Must never compute a figure: those are the plan's and `launcher.report`'s.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.command import deepspeed_command
from launcher.plan import Plan
from launcher.planner.capacity import GB, told
from launcher.planner.gate import FORCE
from launcher.rundir import RunDir

LINKS = {
    "node": "sent by a rank within its host",
    "network": "sent by a host to others",
    "to_host": "from a device to its host",
    "from_host": "from the host to a device",
    "disk_read": "read from NVMe by a rank",
    "disk_write": "written to NVMe by a rank",
}


def head(value: Plan) -> list[tuple[str, str]]:
    """What is planned: model, cluster, batch and length."""
    estimate, batch, cluster = value.estimate, value.batch, value.cluster
    size = f"{estimate.parameters:,} parameters" if estimate.parameters else "size not known"
    if estimate.active_parameters not in (None, estimate.parameters):
        size += f", of which a token uses {estimate.active_parameters:,}"
    hosts = ", ".join(f"{host.name} x{len(host.slots)}" for host in cluster.hosts[:8])
    hosts += f" and {len(cluster.hosts) - 8} more hosts" if len(cluster.hosts) > 8 else ""
    return [
        ("model", f"{value.config.model.name}: {size}, {value.precision}, stage {value.zero_stage}"),
        ("cluster", f"{value.world_size} ranks on {hosts} ({cluster.accelerator})"),
        (
            "batch",
            f"{batch.global_batch_size} samples a step = micro {batch.micro_batch_size} x accumulation "
            f"{batch.gradient_accumulation_steps} x {value.world_size} ranks; "
            f"{batch.global_batch_size * value.config.train.sequence_length:,} tokens",
        ),
        ("steps", f"{value.config.run.steps}, seed {value.config.run.seed}"),
    ]


def choice(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """What stands for an auto, and why none before it in the order does."""
    if not figures["chosen"]:
        return []
    lines = [("chosen", " ".join(figures["chosen"]))]
    for rejected in figures["rejected"]:
        why = rejected["refused"] or told(rejected["lacks"] or {})
        lines.append(("", f"not {' '.join(rejected['overrides'])}: {why}"))
    return lines


def facts(value: Plan, figures: dict[str, Any]) -> list[tuple[str, str]]:
    """One line each: the verdict, what is kept on disk, what is sent, what is left out, what to know."""
    lines = [("fits", verdict(figures))] if value.estimate.memory is not None else []
    if figures["problem"]:
        ways = [text for text in figures["problem"]["fix"].splitlines() if text != FORCE]
        lines += list(zip(["would fit", *[""] * len(ways)], ways, strict=False))
    kept = figures["checkpoint"]
    if kept is not None:
        folder = Path(value.config.run.dir or value.config.run.root)
        where = f"the file system of {folder}" + (
            "" if value.cluster.local else ", of each host that does not share it"
        )
        lines.append(
            (
                "checkpoint",
                f"{gb(kept['bytes'])} GB each, {kept['at_once']} at once (checkpoint.keep={kept['keep']}): "
                f"{gb(kept['kept_bytes'])} GB on {where}",
            )
        )
        lines += [("nvme", f"{gb(size)} GB of a host in {path}") for path, size in kept["nvme"].items()]
    lines += moved(value)
    lines += [("note", text) for text in figures["advice"]]
    titles = ["not included", *[""] * len(figures["not_included"])]
    return lines + list(zip(titles, figures["not_included"], strict=False))


def moved(value: Plan) -> list[tuple[str, str]]:
    """What an optimizer step sends over each link, what the textbook says of it, and how long the step takes."""
    estimate, lines = value.estimate, []
    if estimate.traffic_bytes:
        parts = [f"{gb(size)} GB {LINKS[name]}" for name, size in estimate.links.items()]
        text = f"{gb(estimate.traffic_bytes['total'])} GB by a rank in the textbook"
        lines.append(("each step", f"{', '.join(parts) or 'nothing'} ({text})"))
    time = estimate.time
    if time is not None:
        speed = f"{time.tokens_per_s:,.0f} tokens/s, MFU {time.mfu:.2f}"
        name = value.config.hardware.name
        lines.append(("time", f"about {time.step_s:.3g} s a step on {name}, most of it {time.bound}: {speed}"))
    return lines


def verdict(figures: dict[str, Any]) -> str:
    """Whether it fits, in words."""
    if figures["fits"] is None:
        return "not judged"
    parts = [f"{gb(wants)} of {gb(has)} GB of {where}" for where, (wants, has) in figures["needed"].items()]
    capacity = figures["capacity"]
    reserve = f", {gb(capacity['reserve_bytes'])} GB kept back" if capacity["reserve_bytes"] else ""
    reserve += ", buckets left out: a host's memory is taken as it is written" if capacity["written_only"] else ""
    return f"{'yes' if figures['fits'] else 'no'}: {', '.join(parts)} ({capacity['source']}{reserve})"


def refusals(rows: list[dict[str, Any]]) -> dict[str, list[str]]:
    """{reason: the stages and offloads it is against}."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["refused"]:
            words = " ".join(word for word in row["overrides"] if not word.startswith("activation="))
            if words not in found.setdefault(row["refused"], []):
                found[row["refused"]].append(words)
    return found


def judgement(row: dict[str, Any]) -> str:
    """Of a row that is a plan: fits, by how much not, or nothing where nobody knows."""
    lacks = row["lacks"]
    return "" if lacks is None else "fits" if not lacks else f"{gb(sum(lacks.values()), '+')} GB"


def speed(row: dict[str, Any]) -> str:
    """Of a row: tokens/s and what bounds them, where that is known."""
    return "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f} ({row['bound']})"


def gb(size: int, sign: str = "") -> str:
    """In GB of 1e9 bytes, to three figures."""
    amount = size / GB
    return f"{amount:{sign},.{max(0, 3 - len(str(int(amount))))}f}" if amount >= 1 else f"{amount:{sign}.3f}"


def command(value: Plan, run: RunDir) -> list[str]:
    """The argument list a launch would start."""
    port = value.config.cluster.master_port or 0  # 0: a free one is taken at the start
    address = None if value.cluster.local else value.config.cluster.master_addr or value.cluster.hosts[0].name
    return deepspeed_command(value, run, port, address)
