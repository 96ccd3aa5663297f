"""launcher/ds_schema.json is that of the installed DeepSpeed, and DeepSpeed takes what the check lets through.

Run by pytest; DeepSpeed is imported in subprocesses of a few seconds. A difference is accepted with
`python scripts/make_ds_schema.py`. Must never edit the committed file.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.ds_configs import leaves, placed

REPO = Path(__file__).resolve().parents[2]
# Built one after another in one process: DeepSpeed's verdict on each configuration, as it reads it from a file.
TAKEN_BY_DEEPSPEED = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from deepspeed.runtime.config import DeepSpeedConfig
refused = {}
for path, config in json.load(sys.stdin).items():
    try:
        DeepSpeedConfig({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1} | config)
    except Exception as error:
        refused[path] = f"{type(error).__name__}: {error}"
print("verdict", json.dumps(refused))
"""


def make_ds_schema(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts" / "make_ds_schema.py"), "--check"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)


def test_the_committed_schema_is_that_of_the_installed_deepspeed() -> None:
    done = make_ds_schema(REPO)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_a_difference_is_listed_key_by_key_with_the_way_to_accept_it(tmp_path: Path) -> None:
    shutil.copytree(REPO / "scripts" / "ds_schema", tmp_path / "scripts" / "ds_schema")
    shutil.copy(REPO / "scripts" / "make_ds_schema.py", tmp_path / "scripts")
    (tmp_path / "launcher").mkdir()
    schema = json.loads((REPO / "launcher" / "ds_schema.json").read_text(encoding="utf-8"))
    version = schema["deepspeed"]
    del schema["keys"]["gradient_clipping"]
    schema["keys"]["made_up"] = {"type": "bool"}
    schema["keys"]["aio.queue_depth"]["default"] = 32
    schema["deepspeed"] = "0.1.0"
    (tmp_path / "launcher" / "ds_schema.json").write_text(json.dumps(schema), encoding="utf-8")
    done = make_ds_schema(tmp_path)
    assert done.returncode == 1, done.stderr[-2000:]
    assert [line.partition(" {")[0] for line in done.stdout.splitlines()] == [
        "added to keys: gradient_clipping",
        "changed in keys: aio.queue_depth:",
        f"deepspeed: 0.1.0 -> {version}",
        "removed from keys: made_up",
        "to accept: python scripts/make_ds_schema.py && git diff launcher/ds_schema.json",
    ]


def test_deepspeed_takes_every_key_with_its_default() -> None:
    configs = {key.path: placed(key.path, key.default) for key in leaves() if key.has_default}
    command = [sys.executable, "-c", TAKEN_BY_DEEPSPEED]
    done = subprocess.run(command, input=json.dumps(configs), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.rpartition("verdict ")[2]) == {}
