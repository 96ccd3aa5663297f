"""Claims about `mode=explain`: every option, group and DeepSpeed key can be asked for, and is answered with facts.

Run by pytest.
Must never repeat a text of ds_meanings.json: what is checked is that it is there and is shown.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import describe as module
from launcher import rules
from launcher.describe import MEANINGS, Known, describe
from launcher.ds_schema import lookup, schema, unshaped
from launcher.errors import UserError
from launcher.explain import groups
from launcher.schema import option_types
from tests.plan.asking import ROOT, planned

Cli = Callable[..., Any]
NAMED = [key for key in schema().keys.values() if not key.name.endswith(("]", "*")) and "*" not in key.path]
BLOCKS = ("optimizer", "scheduler", "fp16", "bf16", "aio", "activation_checkpointing", "comms_logger", "flops_profiler")


def texts() -> dict[str, dict[str, str]]:
    return dict(json.loads(MEANINGS.read_text(encoding="utf-8")))


def known(*overrides: str) -> Known:
    plan = planned(*overrides)
    return Known(plan.config, plan.deepspeed, {}, {"zero": "stage2"}, list(overrides))


def lines_of(answer: Any) -> dict[str, str]:
    assert answer.code == 0, answer.err
    return {line.split("  ")[0]: line.partition("  ")[2].strip() for line in answer.out.splitlines()}


# --- what can be asked for -------------------------------------------------------------------------------------------


def test_every_option_group_and_deepspeed_key_is_explained() -> None:
    request = known()
    asked = [*option_types(), *groups(), *sorted({unshaped(key.path) for key in NAMED})]
    assert len(asked) > 450
    for key in asked:
        lines = describe(key, request)
        assert len(lines) > 2 and all(isinstance(text, str) for _, text in lines), key


@pytest.mark.parametrize("kind", ["AdamW", "Lamb", "SGD"])
def test_parameters_are_those_of_the_chosen_type(kind: str) -> None:
    request = known()
    request.deepspeed["optimizer"] = {"type": kind, "params": {}}
    default = dict(describe("optimizer.params.lr", request))["default"]
    expected = lookup("optimizer.params.lr", kind)
    assert expected is not None
    assert default.startswith(f"{expected.default},")


# --- what is answered ------------------------------------------------------------------------------------------------


def test_a_deepspeed_key_shows_all_there_is(cli: Cli) -> None:
    request = ("deepspeed.zero_optimization.reduce_bucket_size=1M", "optim=muon")
    lines = lines_of(cli("mode=explain", "key=zero_optimization.reduce_bucket_size", *request))
    assert lines["deepspeed.zero_optimization.reduce_bucket_size"] == "a whole number of elements, more than 0"
    assert lines["default"] == "500000000, DeepSpeed decides when the key is absent"
    assert lines["meaning"] == texts()["zero_optimization.reduce_bucket_size"]["is"]
    assert lines["costs"] == texts()["zero_optimization.reduce_bucket_size"]["costs"]
    assert lines["auto"] == "solved: hidden size ** 2"
    assert (lines["value"], lines["from"]) == ("1000000", "command line")


def test_an_option_shows_type_default_and_who_decides(cli: Cli) -> None:
    lines = lines_of(cli("mode=explain", "key=checkpoint.every", "experiment=smoke"))
    assert lines["checkpoint.every"] == "int"
    assert lines["default"] == "5, conf/experiment/smoke.yaml decides"
    assert lines["meaning"] == "Optimizer steps between checkpoints; 0: only at the end."
    assert "counts are positive" in lines["rules"]
    assert (lines["value"], lines["from"]) == ("5", "conf/experiment/smoke.yaml")


@pytest.mark.parametrize(
    ("overrides", "value", "source"),
    [
        ([], "zero=stage2", "conf/config.yaml"),
        (["zero=stage1"], "zero=stage1", "command line"),
        (["~zero"], "none", "command line"),
        (["experiment=llama_1b_stage3"], "zero=stage3", "conf/experiment/llama_1b_stage3.yaml"),
    ],
)
def test_a_group_shows_its_choices_and_who_chose(cli: Cli, overrides: list[str], value: str, source: str) -> None:
    lines = lines_of(cli("mode=explain", "key=zero", *overrides))
    named = [label for label in lines if label.startswith("zero=")]
    assert named == ["zero=auto", *(f"zero=stage{stage}" for stage in range(4))]
    assert "16/N bytes a parameter" in lines["zero=stage3"]
    assert lines["default"] == "zero=stage2, conf/config.yaml decides"
    assert "zeropp needs stage3" in lines["rules"]
    assert (lines["value"], lines["from"]) == (value, source)


def test_a_block_lists_its_keys(cli: Cli) -> None:
    lines = lines_of(cli("mode=explain", "key=zero_optimization.offload_param"))
    inner = {label.rpartition(".")[2] for label in lines if label.startswith("zero_optimization.offload_param.")}
    assert inner == set(schema().levels["zero_optimization.offload_param"])


def test_a_section_lists_its_options(cli: Cli) -> None:
    lines = lines_of(cli("mode=explain", "key=run"))
    assert {"run.name", "run.dir", "run.root", "run.steps", "run.seed"} <= set(lines)


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("zero_optimization.stage", "offload param needs stage3"),
        ("zero_optimization.offload_optimizer.device", "nvme needs stage3"),
        ("zero_optimization.sub_group_size", "keys belong to the stage"),
        ("zero_optimization.zero_hpz_partition_size", "hpz divides the world"),
        ("bf16.enabled", "one reduced precision"),
        ("optimizer.type", "lion on cpu needs offload"),
        ("scheduler.params.warmup_num_steps", "warmup fits the run"),
        ("train.sequence_length", "sequence fits the model"),
        ("cluster.launcher", "launcher can place the ranks"),
        ("offload", "nvme needs stage3"),
        ("precision", "stage0 reduced precision decays at start"),
    ],
)
def test_the_rules_that_touch_a_key_are_named(key: str, rule: str) -> None:
    found = dict(describe(key, known()))["rules"]
    assert rule in found
    assert "plan format is known" not in found


def test_a_rule_is_shown_with_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    [rule] = [rule for rule in rules.RULES if rule.__name__ == "launcher_can_place_the_ranks"]
    monkeypatch.setattr(module.rules, "RULES", (rule,))
    text = dict(describe("cluster.launcher", known()))["rules"]
    assert text.startswith("launcher can place the ranks (") and "multinode_runner.py" in text


def test_a_request_that_would_be_refused_can_be_explained(cli: Cli) -> None:
    lines = lines_of(
        cli("mode=explain", "key=zero_optimization.stage", "zero=stage0", "offload=cpu_all", "run.steps=0")
    )
    assert (lines["value"], lines["from"]) == ("0", "conf/zero/stage0.yaml")


def test_explaining_starts_and_writes_nothing(cli: Cli) -> None:
    assert cli("mode=explain", "key=run.dir", "run.dir=runs/a").code == 0
    assert list(Path.cwd().iterdir()) == []


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("reduce_bucket_siz", "zero_optimization.reduce_bucket_size"),
        ("reduce_bucket_size", "zero_optimization.reduce_bucket_size"),
        ("zero_optimisation.stage", "zero_optimization.stage"),
        ("train.micro_batchsize", "train.micro_batch_size"),
        ("zeropp.hpz", "zeropp"),
        ("deepspeed.zero_optimization.stag", "zero_optimization.stage"),
    ],
)
def test_an_unknown_key_names_the_nearest(cli: Cli, key: str, meant: str) -> None:
    answer = cli("mode=explain", f"key={key}")
    assert answer.code == 2
    assert "why   no option, group or DeepSpeed key has this name" in answer.err
    assert meant in answer.err.partition("fix")[2]


def test_a_key_like_nothing_says_where_to_look() -> None:
    with pytest.raises(UserError) as caught:
        describe("qqqqqq", known())
    assert caught.value.problems[0].fix == "see python launch.py --help, and key=zero_optimization"


def test_explain_without_a_key_and_a_key_without_explain_are_refused(cli: Cli) -> None:
    assert "fix   add key=zero_optimization.stage\n" in cli("mode=explain").err
    answer = cli("mode=plan", "key=zero")
    assert answer.code == 2
    assert "why   mode=plan does not read it\n     fix   add mode=explain, or leave key out\n" in answer.err


# --- the data file ---------------------------------------------------------------------------------------------------


def test_meanings_are_of_keys_that_exist() -> None:
    assert [path for path in texts() if lookup(path) is None] == []
    assert list(texts()) == sorted(texts())


def test_every_key_of_zero_optimization_has_a_meaning() -> None:
    paths = {unshaped(key.path) for key in NAMED if key.path.startswith("zero_optimization")}
    assert len(paths) > 60
    assert paths - set(texts()) == set()


def test_most_keys_people_set_have_a_meaning() -> None:
    for block in BLOCKS:
        paths = {unshaped(key.path) for key in NAMED if key.path.split(".")[0] == block}
        assert len(paths & set(texts())) >= 0.6 * len(paths), block


def test_a_meaning_is_a_sentence_and_not_deepspeeds_own() -> None:
    for path, node in texts().items():
        assert set(node) <= {"is", "costs"}, path
        assert all(text.endswith(".") and len(text) < 240 for text in node.values()), path


def test_planning_does_not_load_them(tmp_path: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "from launcher.cli import main\n"
        "code = main(['mode=plan'])\n"
        "sys.exit(code or any('ds_meanings' in path for path in opened))\n"
    )
    assert subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True).returncode == 0
