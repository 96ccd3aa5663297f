"""What the engine runs is read back and compared with the plan before the first step."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.train.running import SMALL, Runs, launch
from tests.train.test_parity import overrides

# Loaded by every Python of the run; changes DeepSpeed in the ranks only, as another version might.
OTHER_CLIPPING = """
import os, sys
if "RANK" in os.environ and "worker.py" in " ".join(sys.orig_argv):
    import deepspeed
    deepspeed.DeepSpeedEngine.gradient_clipping = lambda self: 7.5
"""


def test_effective_facts_come_from_the_engine(runs: Runs) -> None:
    found = json.loads((runs.get(*overrides("true", "stage3", "cpu_all")) / "effective.json").read_text())
    assert found["engine_optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert found["optimizer"] == "DeepSpeedCPUAdam"
    assert (found["offload_optimizer"], found["offload_param"]) == ("cpu", "cpu")
    assert found["zero_stage"] == 3 and found["world_size"] == 2 and found["train_batch_size"] == 8
    assert found["parameter_dtypes"] == ["float32"] and found["gradient_clipping"] == 1.0
    assert found["zero_optimization"]["reduce_bucket_size"] == 500_000_000  # DeepSpeed's own default, not ours


def test_a_difference_from_the_plan_stops_before_the_first_step(runs: Runs, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(OTHER_CLIPPING)
    run = runs.new()
    done = launch(*SMALL, "run.steps=2", f"run.dir={run}", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 5, done.stdout + done.stderr
    assert "gradient_clipping" in done.stderr and "7.5" in done.stderr and "the plan says 1.0" in done.stderr
    assert (run / "metrics.jsonl").read_text() == "" if (run / "metrics.jsonl").exists() else True
    assert json.loads((run / "effective.json").read_text())["gradient_clipping"] == 7.5
