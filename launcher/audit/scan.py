"""A file or folder -> findings: file, line, kind, what is suspicious, why and the fix. Nothing is run or imported.

Called by `launcher.cli` for mode=audit.
Must never stop at a file that it cannot read: that is a problem of its own.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from launcher.audit import flow, traps
from launcher.audit.source import Source
from launcher.errors import Problem, UserError, raise_if

WHERE = "audit.path"
READ = "read it in `with gather.read([parameter]):` on every rank"
EDIT = "edit it in `with gather.edit([parameter]):` on every rank"
EXPORT = "checkpoints and recipe=export, or gather.stream(model)"
# kind: (why it is suspicious at stage 3, fix)
REASONS = {
    "read": ("outside a gather it is an empty tensor", READ),
    "size": (
        "outside a gather the answer is that of an empty tensor",
        "ask gather.shape, gather.numel or parameter_counts",
    ),
    "data": ("outside a gather nothing can be read there, and what is written is lost", f"{READ}; {EDIT}"),
    "write": ("outside a gather nothing is changed", EDIT),
    "lost_edit": ("without a modifier rank DeepSpeed drops the change", EDIT),
    "empty_gather": ("GatheredParameters gathers lists of parameters, and nothing else", "give it model.parameters()"),
    "copy": ("a copy of partitioned parameters is empty", f"copy from {EXPORT}"),
    "state_dict": ("it holds empty tensors", f"save through {EXPORT}"),
    "save": ("an empty tensor would be saved", f"save through {EXPORT}"),
    "load": ("it would load into empty tensors", f"model.init_from, or {EDIT}"),
    "gradient": (
        "DeepSpeed keeps gradients in shards: .grad is None",
        "gather.full_gradient; deepspeed.gradient_clipping",
    ),
    "external": (
        "DeepSpeed gathers a parameter for the module that owns it",
        "deepspeed.zero.register_external_parameter",
    ),
    "requires_grad": ("the optimizer does not follow once the engine is built", "freeze before: parameters.frozen"),
    "late": ("it would be neither partitioned nor trained", "complete the model before the engine is built"),
    "unpartitioned": ("it would be whole on every rank first", "build it with the model"),
    "zero_size": ("DeepSpeed cannot lay out a parameter of no elements", "leave the layer out, or freeze it"),
    "sparse": ("ZeRO skips sparse gradients", "sparse=False"),
    "no_gradient": ("nothing gives it a gradient", "use it, freeze it, or remove it"),
    "inference_mode": ("it spoils parameters for later backward passes", "torch.no_grad()"),
    "no_sync": ("DeepSpeed refuses it where gradients are partitioned", "leave it out: the engine accumulates"),
    "optimizer": ("it would step empty tensors", "let the engine step: parameters.groups"),
    "order": ("ranks that do not come to it leave the others waiting", "let every rank run it"),
}


@dataclass(frozen=True)
class Finding:
    """One suspicious line."""

    file: str
    line: int
    kind: str
    what: str
    why: str
    fix: str


def scan(path: str | None, form: str = "text") -> tuple[int, list[Finding]]:
    """(number of files read, findings in the order of files and lines). Raises UserError for what cannot be read, and
    for a `form` in which nothing can be printed."""
    if form not in ("text", "json"):
        raise UserError(Problem("audit.format", form, "not a format", "use audit.format=text or audit.format=json"))
    files = _files(path)
    found: dict[tuple[str, int, str], Finding] = {}
    problems = []
    for file in files:
        try:
            source = Source(file, ast.parse(file.read_text(encoding="utf-8")))
        except (SyntaxError, ValueError) as error:
            problems.append(Problem(WHERE, str(file), f"it is no Python of this version: {error}", "leave it out"))
            continue
        for rule in (*traps.RULES, *flow.RULES):
            for node, kind, what in rule(source):
                line = int(getattr(node, "lineno", 0))
                found.setdefault((str(file), line, kind), Finding(str(file), line, kind, what, *REASONS[kind]))
    raise_if(problems)
    return len(files), [found[key] for key in sorted(found)]


def _files(path: str | None) -> list[Path]:
    if path is None:
        raise UserError(Problem(WHERE, "nothing", "mode=audit reads a file or folder", "add audit.path=my_model.py"))
    given = Path(path)
    files = [given] if given.is_file() else sorted(given.rglob("*.py"))
    if not files:
        why = "there is no Python file" if given.exists() else "there is no such file or folder"
        raise UserError(Problem(WHERE, path, why, "name a .py file, or a folder that holds some"))
    return files
