"""What an audit found: kind, parameter, the line of the user's code, and the fix.

Filled by the parts of the audit on every rank; merged and written when it ends.
Must never repeat itself: one line that does the same to the same parameter is one finding.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from launcher.errors import EXIT_TRAINING, Problem, UserError
from recipes.shared.audit.origin import Line

READ = "with gather.read([parameter]): ... on every rank (recipes/shared/gather.py)"
EDIT = "with gather.edit([parameter]): ... on every rank (recipes/shared/gather.py)"
# kind: (what happened, fix)
KINDS = {
    "read": ("is read outside a gather: at stage 3 it is an empty tensor here", READ),
    "size": ("is asked for its size outside a gather: at stage 3 the answer is that of an empty tensor",
             "ask gather.shape(parameter) or gather.numel(parameter), which need no gather"),
    "data": ("is reached by .data outside a gather: nothing can be read there, and what is written is lost",
             "inside gather.read([parameter]) or gather.edit([parameter]), on every rank (recipes/shared/gather.py)"),
    "write": ("is written to outside a gather: at stage 3 nothing is changed", EDIT),
    "lost_edit": ("was changed in a gather without a modifier rank: DeepSpeed drops the change", EDIT),
    "empty_gather": ("is no parameter: GatheredParameters gathers nothing of what it was given, without a word",
                     "give it a list of parameters, as gather.read(model.parameters()) does"),
    "copy": ("is deep-copied outside a gather: the copy is empty",
             "copy values inside gather.read, or stream them: gather.stream(model)"),
    "state_dict": ("goes into a state dict as an empty tensor",
                   "save through checkpoints and recipe=export, or collect values from gather.stream(model)"),
    "save": ("is pickled as an empty tensor",
             "save through checkpoints and recipe=export, or read it inside gather.read"),
    "load": ("is loaded into outside a gather: it is an empty tensor here", EDIT),
    "gradient": ("is asked for .grad, which DeepSpeed keeps in shards elsewhere: it is None or empty here",
                 "gather.full_gradient(parameter) between the last backward and the step; clip by gradient_clipping"),
    "external": ("is used by a forward that neither owns it nor has it registered: DeepSpeed does not gather it there",
                 "deepspeed.zero.register_external_parameter(module, parameter), or reach it as owner.weight"),
    "no_engine": ("belongs to a partitioned model that no engine was built of: nobody gathers it in a forward",
                  "build an engine of it, or build it outside zero.Init"),
    "requires_grad": ("has its requires_grad changed after the engine was built: the optimizer does not follow",
                      "freeze before the engine is built (parameters.frozen), or build a new run with other groups"),
    "late": ("joins the model after the engine was built: it is neither partitioned nor trained",
             "complete the model before the engine is built"),
    "unpartitioned": ("was built whole on every rank before it was partitioned",
                      "build it with the model: recipes.shared.construct, or zero.Init around construction"),
    "zero_size": ("has no elements and is trainable: DeepSpeed cannot lay it out",
                  "freeze it, or leave out a layer without inputs or outputs"),
    "sparse": ("has sparse gradients, which ZeRO skips: its rows would not be trained",
               "build the embedding with sparse=False"),
    "no_gradient": ("got no gradient in the steps that were watched: it is not trained",
                    "use it in the forward, freeze it (parameters.frozen), or remove it"),
    "inference_mode": ("is run under torch.inference_mode, which spoils parameters for later backward passes",
                       "torch.no_grad()"),
    "no_sync": ("is entered where gradients are partitioned: DeepSpeed refuses it",
                "leave it out: the engine accumulates by itself"),
    "optimizer": ("is stepped by an optimizer of its own: it is an empty tensor there and nothing is trained",
                  "let the engine step: groups and rates are parameters.groups"),
    "order": ("is not what every rank does now: ranks would wait for each other for ever",
              "let every rank run the same layers in the same order, an equal number of times"),
}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One trap: `parameter` is its name, or that of the module or call it is about."""

    kind: str
    parameter: str
    file: str
    line: int
    what: str
    fix: str
    rank: int

    def __str__(self) -> str:
        return f"audit: {self.file}:{self.line}: [{self.kind}] {self.parameter} {self.what}. Fix: {self.fix}"

    def error(self) -> UserError:
        """The finding as what a run ends with."""
        where, fix = f"{self.file}:{self.line}", f"{self.fix}; audit=warn reports and goes on"
        return UserError(Problem(where, self.parameter, self.what, fix), code=EXIT_TRAINING)


class Findings:
    """Those of this rank. `strict`: the first one is raised. `last_words` is told of all when a run ends with one."""

    def __init__(self, rank: int, strict: bool, last_words: Callable[[list[Finding]], None]) -> None:
        self.rank, self.strict, self.last_words = rank, strict, last_words
        self.found: dict[tuple[str, str, str, int], Finding] = {}

    def add(self, kind: str, parameter: str, at: Line | None, what: str | None = None, fatal: bool = False) -> None:
        """Reports a finding once, as a line of this rank's log; raises UserError when strict or `fatal`."""
        line = at or Line("unknown", 0)
        key = (kind, parameter, line.file, line.line)
        if key in self.found:
            return
        text, fix = KINDS[kind]
        finding = Finding(kind, parameter, line.file, line.line, what or text, fix, self.rank)
        self.found[key] = finding
        print(finding, file=sys.stderr, flush=True)
        if self.strict or fatal:
            self.last_words(list(self.found.values()))
            raise finding.error()


def merged(found: Iterable[Finding]) -> list[Finding]:
    """Those of all ranks, each once, in the order of lines; one for all parameters that one line does the same to."""
    groups: dict[tuple[str, str, int], list[Finding]] = {}
    for finding in found:
        groups.setdefault((finding.file, finding.kind, finding.line), []).append(finding)
    return [_joined(groups[key]) for key in sorted(groups)]


def _joined(findings: list[Finding]) -> Finding:
    names = list(dict.fromkeys(finding.parameter for finding in findings))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    first = min(findings, key=lambda finding: finding.rank)
    return dataclasses.replace(first, parameter=f"{names[0]}{more}")
