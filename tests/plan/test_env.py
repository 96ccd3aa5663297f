"""What of this process's environment reaches workers, and by which way: the plan, their memory, or not at all.

Run by pytest; a name of a thread stands in the docstring of its test.
Must never show a secret, planted or not.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from launcher import env
from launcher.errors import UserError
from launcher.remote import Reach
from launcher.run import worker_environment
from tests.plan.asking import composed


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither variables nor files of whoever runs the tests."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


def test_variables_of_the_field_are_forwarded_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """snowflakedb/ArcticTraining#316: W&B and HF variables of the head node never reached the others."""
    given = {"WANDB_MODE": "offline", "HF_HOME": "/hf", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "3"}
    given |= {"NCCL_DEBUG": "INFO", "PYTHONPATH": "/mine", "MLFLOW_TRACKING_URI": "http://x", "MALLOC_ARENA_MAX": "2"}
    secret = {"WANDB_API_KEY": "k", "HF_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "s", "MLFLOW_TRACKING_TOKEN": "m"}
    for name, value in (given | secret | {"PS1": "$ ", "LD_LIBRARY_PATH": "/lib"}).items():
        monkeypatch.setenv(name, value)
    assert env.forwarded() == given
    assert env.secrets() == secret


def test_deepspeeds_env_files_are_merged_with_the_nearer_one_first(tmp_path: Path) -> None:
    """deepspeedai/DeepSpeed#4992: blank lines, comments and `export` broke the launch. #1907: values are literal."""
    (tmp_path / "home" / ".deepspeed_env").write_text("A=1\nB=1\n")
    (tmp_path / "work" / ".deepspeed_env").write_text("B=2\n\n# note\nexport C=3\nD=a=b\nE=/x:$E\nMY_TOKEN=t\n")
    everything = {"A": "1", "B": "2", "C": "3", "D": "a=b", "E": "/x:$E", "MY_TOKEN": "t"}
    assert env.deepspeed_env_files() == everything
    assert env.secrets() == {"MY_TOKEN": "t"}
    config = composed("zero=stage2")
    assert "A" not in worker_environment(config)  # on one machine DeepSpeed does not read it either
    several = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, kind="hostfile"))
    found = worker_environment(several)
    assert {name: found[name] for name in "ABCDE"} == {name: everything[name] for name in "ABCDE"}
    assert "MY_TOKEN" not in found


def test_a_line_of_an_env_file_that_says_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "work" / ".deepspeed_env").write_text("A=1\nnonsense\nmy token\n")
    with pytest.raises(UserError) as caught:
        env.deepspeed_env_files()
    where = [problem.where for problem in caught.value.problems]
    assert where == [f"{tmp_path}/work/.deepspeed_env:{number}" for number in (2, 3)]
    assert [problem.got for problem in caught.value.problems] == ["nonsense", "(not shown)"]


def test_the_front_end_finds_nothing_to_send_through_a_remote_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """deepspeedai/DeepSpeed#5878: ; & ' \" $ in an exported value broke the remote command."""
    for name in ("PYTHONPATH", "NCCL_IB_HCA", "UCX_TLS", "MLFLOW_TRACKING_TOKEN", "MV2_X"):
        monkeypatch.setenv(name, "a;b'c$(d)")
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-o StrictHostKeyChecking=no")
    there = env.front_end_environment({"NCCL_DEBUG": "INFO"}, remote_shell=True)
    assert not [name for name in there if name.startswith(("PYTHON", "NCCL", "UCX", "MLFLOW", "MV2"))]
    assert there["PDSH_SSH_ARGS_APPEND"] == "-o StrictHostKeyChecking=no"
    here = env.front_end_environment({"NCCL_DEBUG": "INFO"}, remote_shell=False)
    assert here["PYTHONPATH"] == "a;b'c$(d)" and here["NCCL_DEBUG"] == "INFO"


def test_our_own_connections_take_the_users_ssh_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """deepspeedai/DeepSpeed#4370."""
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-o StrictHostKeyChecking=no -i '/my keys/id'")
    section = dataclasses.replace(composed("zero=stage2").cluster, ssh_port=2222)
    argv = Reach(section, local=False).argv("beta", ["/env/python", "-c", "import sys;exec(1)"])
    assert argv == [
        *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=8"),
        *("-o", "StrictHostKeyChecking=no", "-i", "/my keys/id", "-p", "2222"),
        *("beta", "/env/python -c 'import sys;exec(1)'"),
    ]
    assert Reach(section, local=True).argv("beta", ["true"]) == ["true"]
