"""Claims about the command line when a request is wrong, and about what planning leaves alone.

Run by pytest, most of it in this process; a few commands run as a user's would, in one of their own.
Must never start a run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl

from launcher.explain import groups
from tests.plan.asking import ROOT

Cli = Callable[..., Any]
QUOTE = "quote the value for Hydra inside the shell's quotes"


def problem(where: str, got: str, why: str, fix: str) -> str:
    """The text of a refusal with one problem."""
    return (
        "zerolaunch: 1 problem; nothing was started\n"
        f"  1. {where}\n     got   {got}\n     why   {why}\n     fix   {fix}\n"
    )


# --- each kind of mistake --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["stage9", "3", "null"])
def test_an_unknown_choice_of_a_group_names_the_legal_ones(cli: Cli, choice: str) -> None:
    answer = cli("mode=plan", f"zero={choice}")
    legal = "use zero=auto, zero=stage0, zero=stage1, zero=stage2, zero=stage3"
    assert answer.code == 2
    assert answer.err == problem("zero", choice, f"conf/zero has no file {choice}.yaml", legal)


def test_an_unknown_group_names_the_nearest_and_all_groups(cli: Cli) -> None:
    answer = cli("mode=plan", "zro=stage3")
    fix = f"did you mean zero or zeropp? groups: {', '.join(groups())}; see python launch.py --help for every option"
    assert answer.code == 2
    assert answer.err == problem("zro", "zro=stage3", "there is no such option or group", fix)


def test_an_unknown_option_names_the_nearest_and_its_section(cli: Cli) -> None:
    answer = cli("mode=plan", "checkpoint.evry=3")
    here = "checkpoint.every, checkpoint.keep, checkpoint.background, checkpoint.keep_every, checkpoint.best"
    fix = f"did you mean checkpoint.every or checkpoint.keep_every or checkpoint.keep? options here: {here}"
    assert answer.code == 2
    assert answer.err == problem("checkpoint.evry", "checkpoint.evry=3", "there is no such option or group", fix)


@pytest.mark.parametrize(("key", "hint"), [("foo", "groups: activation"), ("run.foo", "options here: run.name")])
def test_a_plus_does_not_make_an_option_we_do_not_own(cli: Cli, key: str, hint: str) -> None:
    answer = cli("mode=plan", f"+{key}=1")
    assert answer.code == 2
    assert f"1. {key}\n     got   +{key}\n     why   there is no such option\n" in answer.err
    assert hint in answer.err


def test_an_option_of_another_kind_of_data_names_the_kinds(cli: Cli) -> None:
    answer = cli("mode=plan", "data.files=[a.txt]")
    assert answer.code == 2
    assert "1. data.files\n" in answer.err
    assert "conf/data/ and data=chat, custom, hub, jsonl, stdlib, text, tokens" in answer.err


def test_a_deleted_option_that_does_not_exist_is_named(cli: Cli) -> None:
    answer = cli("mode=plan", "~run.stepz")
    assert answer.code == 2
    assert "1. run.stepz\n" in answer.err
    assert "did you mean run.steps" in answer.err


@pytest.mark.parametrize(
    ("override", "got", "kind"),
    [
        ("run.steps=abc", "'abc'", "int"),
        ("train.sequence_length=1.5", "1.5", "int"),
        ("cluster.preflight=maybe", "'maybe'", "bool"),
        ("tracker.timeout_s=soon", "'soon'", "float"),
        ("tracker.tags=abc", "'abc'", "list[str]"),
        ("train.global_batch_size=four", "'four'", "int | None"),
    ],
)
def test_a_value_of_the_wrong_type_names_option_value_and_type(cli: Cli, override: str, got: str, kind: str) -> None:
    answer = cli("mode=plan", override)
    key = override.partition("=")[0]
    assert answer.code == 2
    assert f"1. {key}\n     got   {got}\n" in answer.err
    assert answer.err.endswith(f"fix   give {key} a value of type {kind}\n")


def test_a_value_that_must_be_given_is_asked_for(cli: Cli) -> None:
    answer = cli("mode=plan", "cluster=hostfile")
    assert answer.code == 2
    assert answer.err == problem("cluster.hostfile", "nothing", "it has no default", "add cluster.hostfile=VALUE")


def test_a_model_must_be_named_by_one_of_three_ways(cli: Cli) -> None:
    answer = cli("mode=plan", "model=hf")
    assert answer.code == 2
    for way in ("model.config.model_type=llama", "model.path=FOLDER", "model.init_from=FOLDER"):
        assert way in answer.err


@pytest.mark.parametrize("override", ["run.name=a=b=c", "run.name=#1", "run.name=実験", "run.name=[a", "run.name=a,b"])
def test_an_unquoted_special_character_shows_the_quoting(cli: Cli, override: str) -> None:
    answer = cli("mode=plan", override)
    assert answer.code == 2
    assert f"1. run.name\n     got   {override}\n" in answer.err
    assert QUOTE in answer.err


def test_a_word_that_is_no_override_is_refused(cli: Cli) -> None:
    answer = cli("mode=plan", "run.steps")
    assert answer.code == 2
    assert answer.err.endswith("fix   write key=value\n")


def test_an_interpolation_of_nothing_names_what_it_names(cli: Cli) -> None:
    answer = cli("mode=plan", "run.name=${run.rot}")
    assert answer.code == 2
    assert "got   ${run.rot}\n     why   no option has this name\n" in answer.err
    assert "did you mean run.root" in answer.err


def test_a_plus_on_a_group_that_has_a_choice_is_explained(cli: Cli) -> None:
    answer = cli("mode=plan", "+experiment=smoke")
    assert answer.code == 2
    assert answer.err == problem(
        "experiment", "+experiment=...", "it already has a choice", "use experiment=CHOICE, without +"
    )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "it has no model_type"),
        (b"{}", "it has no model_type"),
    ],
)
def test_a_model_folder_without_a_configuration_is_refused(
    cli: Cli, tmp_path: Path, content: bytes | None, why: str
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    answer = cli("mode=plan", "model=hf", f"model.path={tmp_path}")
    assert answer.code == 2
    assert "1. model.path\n" in answer.err
    assert why in answer.err


def test_a_model_without_a_family_is_refused(cli: Cli) -> None:
    answer = cli("mode=plan", "~model.config.model_type")
    assert answer.code == 2
    assert "why   a configuration names its family in model_type\n" in answer.err


def test_an_unknown_flag_is_refused(cli: Cli) -> None:
    answer = cli("--frobnicate")
    assert answer.code == 2
    assert "unrecognized arguments: --frobnicate" in answer.err


# --- all at once, and nothing else -----------------------------------------------------------------------------------


def test_all_problems_are_reported_at_once(cli: Cli) -> None:
    answer = cli(
        *("mode=plan", "plan.format=xml", "run.steps=0", "eval.every=-1", "train.micro_batch_size=3"),
        *("train.global_batch_size=256", "offload=cpu_all", "schedule=constant"),
    )
    assert answer.code == 2
    assert answer.err.startswith("zerolaunch: 5 problems; nothing was started\n")
    for where in ("train.global_batch_size", "plan.format", "run.steps", "eval.every", "offload"):
        assert f". {where}\n" in answer.err


def test_a_batch_problem_does_not_bring_a_false_one_about_hpz(cli: Cli, two_hosts: tuple[str, ...]) -> None:
    answer = cli("mode=plan", *two_hosts, "zero=stage3", "zeropp=hpz", "train.global_batch_size=9")
    assert answer.err.startswith("zerolaunch: 1 problem;")
    assert "1. train.global_batch_size\n" in answer.err


def test_a_refused_plan_prints_nothing_on_stdout(cli: Cli) -> None:
    answer = cli("mode=plan", "plan.format=json", "run.steps=0")
    assert (answer.code, answer.out) == (2, "")


def test_a_json_plan_is_one_object_and_nothing_else_on_stdout(cli: Cli) -> None:
    answer = cli("mode=plan", "plan.format=json")
    assert answer.code == 0
    assert json.loads(answer.out)["world_size"] == 2
    assert answer.err == ""


def test_a_plan_for_people_shows_what_it_decided(cli: Cli) -> None:
    answer = cli("mode=plan", "zero=stage3")
    assert answer.code == 0
    for content in (
        "16 samples a step = micro 8 x accumulation 1 x 2 ranks",
        "stage 3",
        "gradient_clipping",
        "nothing",
    ):
        assert content in answer.out


def test_planning_writes_nothing(cli: Cli) -> None:
    assert cli("mode=plan", "run.dir=runs/a").code == 0
    assert cli("mode=plan", "zero=stage9").code == 2
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(("more", "times"), [((), 1), (("hydra.job.name=other",), 2), (("++hydra.job.name=other",), 2)])
def test_a_request_is_composed_once_and_the_same_as_by_hydras_own_entry(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...], times: int
) -> None:
    composed, real = [], ConfigLoaderImpl.load_configuration

    def counted(*arguments: Any, **named: Any) -> Any:
        composed.append(real(*arguments, **named))
        return composed[-1]

    words = ("mode=plan", "plan.format=json", "zero=stage3", "offload=cpu", "++deepspeed.wall_clock_breakdown=true")
    expected = cli(*words).out
    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", counted)
    answer = cli(*words, *more)
    assert (answer.code, answer.err, len(composed)) == (0, "", times)
    assert json.loads(answer.out) == json.loads(expected)


@pytest.mark.parametrize(
    ("folder", "expected"),
    [([], "runs/sweep-"), (["run.dir=a"], "a/"), (["run.root=b"], "b/sweep-"), (["hydra.sweep.dir=c"], "runs/sweep-")],
)
def test_planning_a_sweep_gives_each_trial_a_folder_and_writes_nothing(
    cli: Cli, folder: list[str], expected: str
) -> None:
    answer = cli("--multirun", "mode=plan", "plan.format=json", "zero=stage1,stage3", *folder)
    plans = [json.loads(line) for line in answer.out.splitlines()]
    assert [plan["deepspeed"]["zero_optimization"]["stage"] for plan in plans] == [1, 3]
    paths = [Path(plan["config"]["run"]["dir"]) for plan in plans]
    assert [path.name for path in paths] == ["0", "1"]
    assert all(str(path).startswith(str(Path.cwd() / expected)) for path in paths)
    assert list(Path.cwd().iterdir()) == []


def test_a_sweep_goes_on_after_a_refused_trial_and_leaves_with_its_code(cli: Cli) -> None:
    answer = cli("-m", "mode=plan", "plan.format=json", "zero=stage0,stage1", "offload=cpu")
    assert answer.code == 2
    assert len(answer.out.splitlines()) == 1
    assert "offload_optimizer.device=cpu at stage 0" in answer.err


def test_requests_in_one_process_do_not_touch_each_other(cli: Cli) -> None:
    first = cli("mode=plan", "plan.format=json").out
    assert cli("mode=plan", "plan.format=json", "zero=stage3", "deepspeed.gradient_clipping=3").code == 0
    assert cli("mode=plan", "zero=stage9").code == 2
    assert cli("mode=plan", "plan.format=json").out == first


# --- as a user runs it -----------------------------------------------------------------------------------------------

HEAVY = ("torch", "deepspeed", "transformers", "numpy")
LOADED = """
import sys
sys.path.insert(0, {root!r})
from launcher.cli import main
code = main({arguments!r})
print([name for name in {heavy!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize("arguments", [["mode=plan"], ["mode=plan", "plan.format=json"], ["--help"]])
def test_planning_loads_no_torch_and_no_numpy(arguments: list[str], tmp_path: Path) -> None:
    script = LOADED.format(root=str(ROOT), arguments=arguments, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_launch_py_plans_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch.py"), "mode=plan", "plan.format=json", "zero=stage3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads(done.stdout)
    assert plan["deepspeed"]["zero_optimization"] == {"stage": 3}
    assert plan["config"]["run"]["root"] == f"{tmp_path}/runs"


def test_launch_py_leaves_with_2_and_no_traceback_for_a_wrong_request(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch.py"), "zero=stage0", "offload=cpu", f"run.dir={tmp_path}/run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "offload_optimizer.device=cpu at stage 0" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_names_every_group_and_its_choices(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "launch.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for group, choices in groups().items():
        assert f"  {group:<12} {', '.join(choices)}\n" in done.stdout
