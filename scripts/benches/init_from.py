"""Memory that a rank needs to begin with the weights of a Hugging Face folder at stage 3, over `from_pretrained`.

`scripts/bench init_from [pairs=2] [millions=1000] [ranks=2] [overrides]`.
Must never compare with a `from_pretrained` that leaves its weights in the mapped files: of the same type it does.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benches.group import DEFAULTS, MODELS, ask_plan, free_port, rank_command, rank_environment
from benches.report import GIB, Row, ratios
from benches.request import Request, with_defaults
from benches.timing import base_environment, in_turn, run_to_end
from launcher.rundir import RunDir

OPTIONS = {"pairs": 2, "millions": 1000, "ranks": 2}
AT_MOST = 0.6
RANK = Path(__file__).resolve().parent / "init_from_rank.py"


def run(request: Request) -> list[Row]:
    """One row: the ratio, with the memory and the seconds of both sides."""
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder:
        sides = Beginnings(request, Path(folder))
        turns = in_turn(request.options["pairs"], {"ours": sides.ours, "theirs": sides.theirs})
    ours, theirs = turns["ours"], turns["theirs"]
    memory = {"ours, GiB": [o["peak"] / GIB for o in ours], "theirs, GiB": [t["peak"] / GIB for t in theirs]}
    parts = memory | {"ours, s": [o["seconds"] for o in ours], "theirs, s": [t["seconds"] for t in theirs]}
    return [
        Row("anonymous memory of a rank over from_pretrained", "ratio", ratios(*memory.values()), AT_MOST, parts=parts)
    ]


class Beginnings:
    """A folder of random weights in bf16, as models are published, and the two ways to hold them in fp32."""

    def __init__(self, request: Request, folder: Path) -> None:
        self.folder, self.model = folder, folder / "model"
        words = with_defaults([*DEFAULTS, *MODELS[request.options["millions"]], "zero=stage3"], request.overrides)
        words = [*words, f"cluster.num_procs={request.options['ranks']}"]
        drawn = ask_plan(words, base_environment())
        self._start("draw", drawn.config.model.config)
        self.plan = ask_plan([*words, f"model.init_from={self.model}"], base_environment())

    def ours(self) -> dict[str, float]:
        """The rank that needs most, from its start to the model in shards."""
        place = RunDir(self.folder / "ranks")
        place.path.mkdir(exist_ok=True)
        place.plan.write_text(json.dumps(self.plan.to_json()), encoding="utf-8")
        command = rank_command(self.plan, place, RANK, place.plan)
        run_to_end(command, self.folder / "ranks.log", rank_environment(self.plan, base_environment()))
        files = sorted(place.path.glob("answer.rank*.json"))
        assert len(files) == self.plan.world_size
        answers = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return {name: max(answer[name] for answer in answers) for name in ("peak", "seconds")}

    def theirs(self) -> dict[str, float]:
        """One process that calls `from_pretrained`, in fp32, as each rank of a data-parallel script would."""
        return self._start("from_pretrained", None)

    def _start(self, what: str, fields: object) -> dict[str, float]:
        answer = self.folder / "answer.json"
        request = {"what": what, "fields": fields, "folder": str(self.model), "answer": str(answer)}
        (self.folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        environment = base_environment() | {"MASTER_PORT": str(free_port())}
        argv = [sys.executable, str(RANK), "--alone", str(self.folder / "request.json")]
        run_to_end(argv, self.folder / "alone.log", environment)
        return dict(json.loads(answer.read_text(encoding="utf-8")))
