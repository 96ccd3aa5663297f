"""The text of `--help`: every group with its choices, every option with its type and sentence.

Called by `launcher.cli` before Hydra, whose own help composes the configuration many times over.
Must never describe an option in words of its own: the sentence stands under the field in `launcher.schema`.
"""

from __future__ import annotations

import ast
import functools
import inspect

from launcher import schema
from launcher.explain import groups

USAGE = """\
ZeroLaunch: compose, judge, plan and start DeepSpeed runs.

  python launch.py [group=choice ...] [option=value ...]

  mode=plan                      prints memory, traffic, batch, DeepSpeed dict and command; starts nothing
  --multirun zero=stage1,stage2  sweeps comma-separated values, each trial in fresh processes
  recipe=resume run.dir=runs/X   continues run X; recipe=export run.dir=runs/X writes safetensors
  mode=explain key=zero          says what a group, an option or a DeepSpeed key means and costs, and who decided it
  mode=audit audit.path=model.py reads sources for what partitioned parameters do not bear; exit 2 when it finds any
  +deepspeed.KEY=VALUE           any raw DeepSpeed key; deepspeed.file=PATH takes a JSON of them beneath the groups
  --cfg job                      prints the composed configuration with every default"""


def text() -> str:
    """The whole help."""
    lines = [USAGE, "", "Groups (group=choice); each choice is a file in conf/ that says what it costs:"]
    lines += [f"  {name:<12} {', '.join(choices)}" for name, choices in groups().items()]
    lines += ["", "Options (option=value):"]
    sentences = option_sentences()
    for path, kind in schema.option_types().items():
        lines.append(f"  {path:<36} {kind}")
        lines.append(f"      {sentences[path]}")
    return "\n".join(lines)


@functools.cache
def option_sentences() -> dict[str, str]:
    """{dotted option: the sentence under its field in schema.py}."""
    classes = {
        node.name: _fields(node) for node in ast.parse(inspect.getsource(schema)).body if isinstance(node, ast.ClassDef)
    }
    sentences: dict[str, str] = {}

    def walk(name: str, prefix: str) -> None:
        for field, (kind, sentence) in classes[name].items():
            if kind in classes:
                walk(kind, f"{prefix}{field}.")
            else:
                sentences[prefix + field] = sentence

    walk("RunConfig", "")
    return sentences


def _fields(node: ast.ClassDef) -> dict[str, tuple[str, str]]:
    """{field: (type as written, sentence)} of a dataclass, the sentence being the string that follows the field."""
    found: dict[str, tuple[str, str]] = {}
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            sentence = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                sentence = " ".join(str(after.value.value).split())
            found[statement.target.id] = (ast.unparse(statement.annotation), sentence)
    return found
