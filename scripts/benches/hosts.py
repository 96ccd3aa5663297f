"""What several hosts cost: preflight of two, and the time to the first step with it over a bare `deepspeed --hostfile`.

`scripts/bench hosts [pairs=5] [warm_up=1] [overrides]`; as root: the two hosts are made by scripts/testcluster.
Must never leave the hosts behind, nor take those of a test session.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benches.group import rank_command
from benches.report import Row, ratios
from benches.request import BenchError, Request
from benches.sides import Sides
from benches.timing import Ran, in_turn, run_to_end
from launcher.command import ROOT, hostfile_text
from launcher.plan import Plan
from launcher.rundir import RunDir

OPTIONS = {"pairs": 5, "warm_up": 1}
STEPS, SKIP = 2, 1
AT_MOST = 1.25
PREFLIGHT_AT_MOST_S = 8.0
TESTCLUSTER = [sys.executable, "-I", "-S", str(ROOT / "scripts" / "testcluster")]


def run(request: Request) -> list[Row]:
    """Two rows: seconds of a preflight, and the ratio of the times to the first step."""
    warm_up, pairs = request.options["warm_up"], request.options["pairs"]
    with tempfile.TemporaryDirectory(prefix="zerolaunch-bench-") as folder, two_hosts() as (name, address):
        hostfile = Path(folder) / "hosts"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in name))
        cluster = ["cluster=hostfile", f"cluster.hostfile={hostfile}", "cluster.accelerator=cpu"]
        sides = HostSides([*cluster, *request.overrides], STEPS, SKIP, Path(folder))
        sides.first, sides.address = name[0], address
        trained = in_turn(warm_up + pairs, {"ours": sides.ours, "bare": sides.peer})
        sides.check_losses(trained["ours"], trained["bare"])
        checks = [sides.preflight() for _ in range(warm_up + pairs)][warm_up:]
    times = {side: [each.first_step_s for each in found[warm_up:]] for side, found in trained.items()}
    parts = {f"{side}, s": values for side, values in times.items()}
    return [
        Row("preflight of two hosts, without the collective", "s", checks, at_most=PREFLIGHT_AT_MOST_S, parts={}),
        Row(
            "time to first step on two hosts over bare deepspeed --hostfile",
            "ratio",
            ratios(times["ours"], times["bare"]),
            at_most=AT_MOST,
            parts=parts,
        ),
    ]


class HostSides(Sides):
    """Both sides, started on the first of two hosts."""

    first: str
    address: str

    def check_cluster(self, plan: Plan) -> None:
        if len(plan.cluster.hosts) != 2:
            raise BenchError("this bench makes its two hosts itself")

    def peer_command(self, place: RunDir, request: Path) -> list[str]:
        """DeepSpeed's own way to hand variables to other hosts is a file in the working folder."""
        place.control.mkdir()
        place.hostfile.write_text(hostfile_text(self.plan))
        variables = self.plan.env | {"PATH": self.environment["PATH"]}
        (place.path / ".deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in variables.items()))
        return [
            "env",
            "--chdir",
            str(place.path),
            *rank_command(self.plan, place, self.other.script, request, self.address),
        ]

    def preflight(self) -> float:
        """Seconds of `mode=check` without the collective, its own start included."""
        argv = [sys.executable, str(ROOT / "launch.py"), "mode=check", "check.collective=false", *self.overrides]
        argv += [f"run.root={self.folder}"]
        return run_to_end(self._there(argv), self.folder / "check.log", self.environment).seconds

    def _run(self, side: str, argv: list[str]) -> Ran:
        return run_to_end(self._there(argv), self.folder / f"{side}.log", self.environment)

    def _there(self, argv: list[str]) -> list[str]:
        return [*TESTCLUSTER, "exec", self.first, "--", *argv]


@contextmanager
def two_hosts() -> Iterator[tuple[list[str], str]]:
    """Names of two fresh hosts and the address of the first."""
    made = subprocess.run([*TESTCLUSTER, "up", "2"], capture_output=True, text=True, check=False)
    if made.returncode:
        raise BenchError(made.stderr.strip())
    try:
        seen = subprocess.run([*TESTCLUSTER, "status", "--format", "json"], capture_output=True, text=True, check=True)
        rows = json.loads(seen.stdout)["hosts"]
        yield [row["name"] for row in rows], str(rows[0]["address"])
    finally:
        subprocess.run([*TESTCLUSTER, "down"], capture_output=True, check=False)
