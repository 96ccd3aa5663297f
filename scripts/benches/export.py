"""What an export costs over copying the same bytes, and over DeepSpeed's zero_to_fp32.py on the same checkpoint.

`scripts/bench export [pairs=3] [millions=300] [ranks=2] [stage=3] [overrides]`; the other size is millions=1000.
Must never compare exports whose tensors differ in a bit.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benches.group import LAUNCH, saved_run, warm
from benches.memory import ChildMemory
from benches.report import GIB, Row, ratios
from benches.request import BenchError, Request
from benches.timing import base_environment, in_turn, run_to_end
from launcher.rundir import RunDir
from recipes.shared.checkpoint import manifest

OPTIONS = {"pairs": 3, "millions": 300, "ranks": 2, "stage": 3, "shard_megabytes": 500}
COPY_AT_MOST = 2.0
WHOLE_AT_MOST = {300: 0.35, 1000: 0.25}
MEMORY_ABOVE_A_SHARD_BYTES = 300e6
# The weights that a 1B model needs for a step with Adam are more than 24 GB: its checkpoint has no moments.
WITHOUT_MOMENTS = ["optim=sgd", "deepspeed.optimizer.params.momentum=0.0"]
# Nor does the whole model beside its shares, which stage 3 by itself would hold for one of this size.
FEW_WHOLE = [
    "deepspeed.zero_optimization.stage3_max_reuse_distance=1000",
    "deepspeed.zero_optimization.stage3_max_live_parameters=1000000",
    "deepspeed.zero_optimization.stage3_prefetch_bucket_size=1000000",
]
SAME = """
import sys, torch
from pathlib import Path
from safetensors import safe_open
ours = {name: file for path in Path(sys.argv[1]).glob("*.safetensors") for file in [safe_open(path, "pt")]
        for name in file.keys()}
theirs = {}
for path in Path(sys.argv[2]).glob("*.bin"):
    theirs |= torch.load(path, mmap=True, weights_only=True)
tied = set(theirs) - set(ours)
assert set(ours) <= set(theirs) and tied <= {"lm_head.weight"}, sorted(set(ours) ^ set(theirs))
different = [name for name in ours if not torch.equal(ours[name].get_tensor(name), theirs[name])]
assert not different, different
"""


def run(request: Request) -> list[Row]:
    """Copying over `cp`, the whole process over zero_to_fp32.py, and memory over the largest file."""
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder:
        sides = Exports(request, Path(folder))
        turns = in_turn(request.options["pairs"], {"ours": sides.ours, "cp": sides.copied, "theirs": sides.theirs})
        reload_s = sides.reloaded_s()
    ours, theirs, copies = turns["ours"], turns["theirs"], turns["cp"]
    at_most = WHOLE_AT_MOST.get(request.options["millions"])
    whole = {
        "ours, s": [side["whole_s"] for side in ours],
        "theirs, s": [side["whole_s"] for side in theirs],
        "ours without verifying, s": [sides.unverified_s],
        "ours with the model reloaded, s": [reload_s],
    }
    copying = {"copying, s": [side["copy_s"] for side in ours], "cp and sync, s": [side["whole_s"] for side in copies]}
    above = [(side["memory_bytes"] - side["shard_bytes"]) / 1e6 for side in ours]
    memory = {
        "ours, GiB": [side["memory_bytes"] / GIB for side in ours],
        "largest file, GiB": [side["shard_bytes"] / GIB for side in ours],
        "theirs, GiB": [side["memory_bytes"] / GIB for side in theirs],
    }
    return [
        Row("copying phase over cp of the same bytes", "ratio", ratios(*copying.values()), COPY_AT_MOST, parts=copying),
        Row(
            "whole process over zero_to_fp32.py",
            "ratio",
            ratios(whole["ours, s"], whole["theirs, s"]),
            at_most,
            parts=whole,
        ),
        Row(
            "peak anonymous memory above the largest file", "MB", above, MEMORY_ABOVE_A_SHARD_BYTES / 1e6, parts=memory
        ),
    ]


class Exports:
    """One checkpoint and the ways to copy its weights out; each turn starts with warm files and leaves none."""

    def __init__(self, request: Request, folder: Path) -> None:
        options = request.options
        self.folder, self.shard_bytes = folder, 1_000_000 * options["shard_megabytes"]
        lean: list[str] = []
        if options["millions"] >= 1000:
            lean = [*WITHOUT_MOMENTS, *(FEW_WHOLE if options["stage"] == 3 else [])]
        own = [*lean, f"cluster.num_procs={options['ranks']}", *request.overrides]
        self.run: RunDir = saved_run(folder, options["millions"], options["stage"], own)
        (self.checkpoint,) = self.run.checkpoints.glob("step_*")
        saved = manifest.read(self.checkpoint)
        assert saved is not None and saved["fixed_batch_loss"] is not None
        self.saved = saved
        manifest.write(self.checkpoint, saved | {"fixed_batch_loss": None})
        self.kept = folder / "kept"  # ours of the first turn: what the others are compared with
        self.unverified_s = 0.0
        self._ours("export.verify=false", self.kept)  # a first one fills the caches of code
        self.unverified_s = self._ours("export.verify=false", folder / "second")["whole_s"]
        shutil.rmtree(folder / "second")

    def ours(self) -> dict[str, float]:
        """recipe=export with every tensor verified, of a checkpoint that records no loss to reload the model for."""
        found = self._ours("export.verify=true", self.folder / "ours")
        shutil.rmtree(self.folder / "ours")
        return found

    def theirs(self) -> dict[str, float]:
        """zero_to_fp32.py as DeepSpeed leaves it beside the checkpoint, with its own defaults."""
        target = self.folder / "theirs"
        script = str(self.run.checkpoints / "zero_to_fp32.py")
        found = self._timed([sys.executable, script, str(self.run.checkpoints), str(target)])
        same = [sys.executable, "-c", SAME, str(self.kept), str(target)]
        answer = subprocess.run(same, capture_output=True, text=True, check=False)
        if answer.returncode:
            raise BenchError(f"the exports differ\n{answer.stderr}")
        shutil.rmtree(target)
        return found

    def copied(self) -> dict[str, float]:
        """`cp` of the exported files, and what it takes until they are on the disk, as ours are."""
        target = self.folder / "copied"
        warm(self.kept)
        found = self._timed(["sh", "-c", 'cp -r "$0" "$1" && sync -f "$1"', str(self.kept), str(target)])
        shutil.rmtree(target)
        return found

    def reloaded_s(self) -> float:
        """Seconds with the model reloaded: the same as ours and a process that computes the fixed batch's loss."""
        manifest.write(self.checkpoint, self.saved)
        return self._ours("export.verify=true", self.folder / "reloaded")["whole_s"]

    def _ours(self, verify: str, target: Path) -> dict[str, float]:
        words = ["recipe=export", f"run.dir={self.run.path}", f"export.dir={target}", verify]
        found = self._timed([*LAUNCH, *words, f"export.max_shard_bytes={self.shard_bytes}"])
        answer = json.loads((target / "export.json").read_text(encoding="utf-8"))
        largest = max(entry["bytes"] for entry in answer["files"].values())
        return found | {"copy_s": answer["copy_s"], "shard_bytes": float(largest)}

    def _timed(self, argv: list[str]) -> dict[str, float]:
        """Wall time of a command from warm files, and the most anonymous memory of one of its processes."""
        warm(self.checkpoint)
        subprocess.run(["sync"], check=True)
        with ChildMemory() as memory:
            ran = run_to_end(argv, self.folder / "command.log", base_environment())
        return {"whole_s": ran.seconds, "memory_bytes": float(memory.peak_bytes)}
