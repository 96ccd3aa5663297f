"""Ends what is left of an attempt on every host of its plan: processes, shared memory, secrets.

Called by `launcher.run` at a bad end, and by `launcher.cli` before a run goes on whose launcher did not see its end.
Must never touch a run whose launcher lives: going on with that one is refused.
"""

from __future__ import annotations

import time
from pathlib import Path

from launcher.errors import Problem, UserError
from launcher.onhost import end
from launcher.plan import Plan
from launcher.recorded import recorded_plan
from launcher.remote import Reach, run_script
from launcher.rundir import RunDir, read_json, shared_memory_of, start_time

END = Path(end.__file__)
END_TIMEOUT_S = 8.0
SIGN_S = 2.5  # a launcher overwrites its sign of life every second


def end_on_hosts(run: RunDir, plan: Plan, port: int | None) -> dict[str, str]:
    """Kills what is left of the run on every host; returns {host: error} of those that did not answer."""
    request = {
        "plan": str(run.plan),
        "leftovers": [shared_memory_of(port), f"{run.secrets(0).parent}/{run.secret_mark}*"],
    }
    names = [host.name for host in plan.cluster.hosts]
    reach = Reach(plan.config.cluster, plan.cluster.local)
    answers = run_script(reach, names, END, [request] * len(names), END_TIMEOUT_S, answers=1)
    return {answer.host: answer.error for answer in answers if answer.facts is None}


def end_last_attempt(run: RunDir) -> None:
    """Makes sure that nothing but the attempt to come writes into the run; raises UserError while it is at work.

    An attempt that its launcher saw end left a summary, and nothing else. A launcher that was killed leaves ranks that
    notice it within seconds, if they can, and the memory of ranks that were killed with it.
    """
    if run.summary.exists():
        return
    plan = recorded_plan(run)
    if _launcher_lives(run, plan.cluster.local):
        sign = read_json(run.launcher_beat) or {}
        why = f"its launcher is at work (process {sign.get('pid')} of the host it was started on)"
        raise UserError(Problem("run.dir", str(run.path), why, "wait until it is done, or stop it with SIGTERM"))
    end_on_hosts(run, plan, (read_json(run.rendezvous) or {}).get("MASTER_PORT"))


def _launcher_lives(run: RunDir, local: bool) -> bool:
    sign = read_json(run.launcher_beat)
    if sign is None:
        return False
    if start_time(sign["pid"]) == sign["started"]:
        return True
    if local:
        return False
    time.sleep(SIGN_S)  # it may have been started on another host
    return bool(read_json(run.launcher_beat) != sign)
