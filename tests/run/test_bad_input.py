"""Every wrong request: exit code 2, one message with where, got, why and fix; nothing is started or written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def launch(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Runs launch.py in `folder`."""
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *overrides], cwd=folder, capture_output=True, text=True, check=False
    )


def refused(folder: Path, *overrides: str) -> str:
    """stderr of a request that must be refused, after checking that it left nothing behind."""
    before = sorted(folder.rglob("*"))
    done = launch(folder, *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(folder.rglob("*")) == before
    for label in ("got", "why", "fix"):
        assert f"     {label}   " in done.stderr
    return done.stderr


WRONG = {
    "value of another type": (["run.steps=many"], ["run.steps", "many"]),
    "unknown key": (["train.micro_batchsize=4"], ["train.micro_batchsize", "train.micro_batch_size"]),
    "unknown group": (["zerro=stage3"], ["zerro"]),
    "unknown choice": (["zero=stage9"], ["stage9", "stage0", "stage3"]),
    "missing hostfile": (["cluster=hostfile", "cluster.hostfile=nowhere"], ["cluster.hostfile", "nowhere"]),
    "hostfile not named": (["cluster=hostfile"], ["cluster.hostfile"]),
    "unknown model path": (["model=hf", "model.path=/does/not/exist"], ["model.path", "/does/not/exist"]),
    "unknown model family": (
        ["model.config.model_type=lama", "run.dir=out"],
        ["model.config", "lama"],
    ),
    "a family without a language model": (["model.config.model_type=vit"], ["model.config", "vit"]),
    "a decoder without a first token": (
        ["model.config.model_type=t5"],
        ["model.config.decoder_start_token_id", "model.config.decoder_start_token_id=0"],
    ),
    "a field no model can be built from": (
        ["model.config.model_type=mamba", "+model.config.expand=abc"],
        ["model.config", "mamba", "expand"],
    ),
    "missing DeepSpeed file": (["deepspeed.file=nowhere.json"], ["deepspeed.file", "nowhere.json"]),
    "batch that does not divide": (
        ["train.global_batch_size=10", "train.micro_batch_size=4", "cluster.num_procs=2"],
        ["train.global_batch_size", "8 or", "16"],
    ),
    "missing corpus file": (["data=text", "data.files=[nothing.txt]"], ["data.files", "nothing.txt"]),
    "glob without a match": (["data=text", "data.files=['*.nothing']"], ["data.files"]),
    "two rules at once": (["zero=stage0", "offload=cpu_all"], ["offload_optimizer", "offload_param", "2 problems"]),
    "resume of nothing": (["recipe=resume", "run.dir=nothing"], ["run.dir", "nothing"]),
    "resume without a folder": (["recipe=resume"], ["run.dir"]),
    "export of nothing": (["recipe=export", "run.dir=nothing"], ["run.dir", "nothing"]),
    "a file where the run goes": (["run.dir=taken.txt/run"], ["run.dir", "taken.txt"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_request_is_refused_with_its_fix(tmp_path: Path, case: str) -> None:
    (tmp_path / "taken.txt").write_text("a file")
    overrides, expected = WRONG[case]
    message = (
        refused(tmp_path, "cluster.accelerator=cpu", *overrides)
        if "cluster=hostfile" not in overrides
        else refused(tmp_path, *overrides)
    )
    for text in expected:
        assert text in message, message


def test_empty_corpus_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    message = refused(
        tmp_path, "data=text", "data.files=[empty.txt]", f"data.cache_dir={tmp_path.parent}/cache", "run.dir=r"
    )
    assert "empty" in message


def test_corpus_shorter_than_one_sample_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("only a few bytes\n")
    message = refused(
        tmp_path, "data=text", "data.files=[short.txt]", f"data.cache_dir={tmp_path.parent}/cache", "run.dir=r"
    )
    assert "shorter than one sample" in message and "train.sequence_length" in message


def test_corpus_with_more_ids_than_the_model_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "model.config.vocab_size=100", "run.dir=r")
    assert "vocab_size" in message and "256" in message


def test_folder_that_holds_a_run_is_refused_and_kept(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text("{}")
    message = refused(tmp_path, "run.dir=run")
    assert "already holds a run" in message and "recipe=resume" in message


def test_plan_mode_starts_and_writes_nothing(tmp_path: Path) -> None:
    done = launch(tmp_path, "mode=plan", "plan.format=json", "zero=stage3", "offload=cpu", "run.dir=out")
    assert done.returncode == 0 and not list(tmp_path.iterdir())
    value = json.loads(done.stdout)
    assert value["deepspeed"]["zero_optimization"]["stage"] == 3
    assert value["commands"]["launch"][-1].endswith("plan.json")


def test_a_sweep_in_plan_mode_writes_nothing(tmp_path: Path) -> None:
    done = launch(tmp_path, "--multirun", "mode=plan", "plan.format=json", "zero=stage1,stage2,stage3")
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["deepspeed"]["zero_optimization"]["stage"] for line in done.stdout.splitlines()] == [
        1,
        2,
        3,
    ]
    assert not list(tmp_path.iterdir())
