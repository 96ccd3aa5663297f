"""Every command the README prints works as printed, and its tree names every file there is."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.running import ROOT, SMALL, Runs

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]
LAUNCHES = [command for command in COMMANDS if command.startswith(("python launch.py", "bash scripts/run"))]


def test_the_readme_has_the_commands_this_file_knows() -> None:
    others = [command for command in COMMANDS if command not in LAUNCHES]
    assert others == ["bash scripts/test", "python scripts/make_tiny_chat tiny"]
    assert len(LAUNCHES) == 20


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the README's make_tiny_chat makes."""
    folder = tmp_path_factory.mktemp("readme") / "tiny"
    subprocess.run([sys.executable, str(ROOT / "scripts" / "make_tiny_chat"), str(folder)], check=True)
    return folder


@pytest.mark.parametrize("command", {" ".join(shlex.split(command)[2:]): command for command in LAUNCHES}.values())
def test_readme_command_works(runs: Runs, tmp_path: Path, command: str, request: pytest.FixtureRequest) -> None:
    """As printed, in a folder of its own; long ones are cut short, those for a cluster are planned."""
    words = shlex.split(command)
    arguments = words[2:]
    if "tiny/" in command:
        made = request.getfixturevalue("tiny")
        arguments = [word.replace("tiny/", f"{made}/") for word in arguments]
    if {"cluster=hostfile", "cluster=slurm"} & set(arguments):
        arguments = [word for word in arguments if word != "mode=check"] + ["mode=plan"]
    elif not {"mode=plan", "mode=audit"} & set(arguments):
        finished = tmp_path / "X"
        shutil.copytree(runs.get("run.steps=2", "schedule=constant"), finished)
        short = ["run.steps=3", "schedule=constant"]
        if any(argument.startswith("recipe=export") for argument in arguments):
            short = [f"export.dir={tmp_path / 'export'}"]
        elif not any(argument in ("recipe=resume", "recipe=export") for argument in arguments):
            short = [*SMALL, *short, f"run.root={tmp_path}"]
        if any(argument.startswith("eval.generate") for argument in arguments):
            short += ["eval.max_new_tokens=3"]
        if "model=hf" in arguments:  # it has the configuration of the run that stands for the folder
            short = [word for word in short if not word.startswith("model.")]
        theirs = {
            "run.dir=runs/X": f"run.dir={finished}",
            "model.init_from=/models/Qwen2.5-0.5B": f"model.init_from={finished}",
            "export.source=/old/checkpoint-500": f"export.source={finished / 'checkpoints'}",
            "export.step=500": "export.step=2",
        }
        arguments = [theirs.get(word, word) for word in arguments]
        arguments = [word for word in arguments if word not in ("run.steps=400", "export.dir=out")] + short
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_file_table_is_up_to_date() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    import readme_files

    assert readme_files.updated(README) == README, "run: python scripts/readme_files.py"
