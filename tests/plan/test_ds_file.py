"""Claims about `deepspeed.file`: what it may hold, what wins over it, and that nothing of it is lost in silence.

Run by pytest. Cases cite the public thread they come from.
Must never start a run: requests are composed and planned.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import initialize_config_dir

from launcher import compose
from launcher.ds_file import read
from launcher.plan import build_plan
from launcher.rundir import RunDir
from tests.plan.asking import CONF, composed, leaves, planned, raw, refused, refuses

Cli = Callable[..., Any]

# The file Hugging Face's documentation starts with.
HUGGING_FACE = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "total_num_steps": "auto",
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


@pytest.fixture
def file(tmp_path: Path) -> Callable[[Any], str]:
    """file(content) -> the override that names a file with it: text as it is, everything else as JSON."""
    numbers = iter(range(100))

    def write(content: Any) -> str:
        path = tmp_path / f"ds{next(numbers)}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return f"deepspeed.file={path}"

    return write


# --- precedence ------------------------------------------------------------------------------------------------------


def test_the_file_lies_beneath_the_groups_and_they_beneath_the_command_line(file: Callable[[Any], str]) -> None:
    given = file({"zero_optimization": {"stage": 3}, "gradient_clipping": 0.25, "steps_per_print": 7})
    plan = planned(given, "deepspeed.gradient_clipping=0.5").deepspeed
    assert plan["zero_optimization"]["stage"] == 2  # conf/zero/stage2.yaml
    assert plan["gradient_clipping"] == 0.5
    assert plan["steps_per_print"] == 7
    assert "file" not in plan


@pytest.mark.parametrize(
    ("choice", "block", "expected"),
    [
        pytest.param(
            ["zero=stage3"],
            "zero_optimization",
            {"overlap_comm": False, "stage": 3, "reduce_bucket_size": 5},
            id="modelscope/ms-swift#9691 a group keeps the file's sibling keys",
        ),
        pytest.param(
            ["deepspeed.zero_optimization.reduce_bucket_size=6"],
            "zero_optimization",
            {"overlap_comm": False, "stage": 2, "reduce_bucket_size": 6},
            id="modelscope/ms-swift#9691 an override keeps the file's sibling keys",
        ),
        pytest.param(
            ["deepspeed.tensor_parallel.autotp_size=1"],
            "tensor_parallel",
            {"autotp_size": 1},
            id="modelscope/ms-swift#9691 a parent the file lacks is created",
        ),
    ],
)
def test_blocks_are_merged_key_by_key(
    file: Callable[[Any], str], choice: list[str], block: str, expected: dict[str, Any]
) -> None:
    given = file({"zero_optimization": {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 5}})
    assert planned(given, *choice).deepspeed[block] == expected


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], "zero_optimization.stage 3 replaced by 2 (conf/zero/stage2.yaml); use ~zero to keep the file's"),
        (
            ["deepspeed.zero_optimization.stage=1"],
            "zero_optimization.stage 3 replaced by 1 (command line); leave it out to keep the file's",
        ),
        (
            ["~zero"],
            "gradient_clipping 0.25 replaced by 1.0 (conf/config.yaml); "
            "use ~deepspeed.gradient_clipping to keep the file's",
        ),
    ],
)
@pytest.mark.parametrize("form", ["text", "json"])
def test_each_replaced_value_is_reported(
    cli: Cli, file: Callable[[Any], str], overrides: list[str], line: str, form: str
) -> None:
    given = file({"zero_optimization": {"stage": 3}, "gradient_clipping": 0.25})
    answer = cli("mode=plan", f"plan.format={form}", given, *overrides)
    assert answer.code == 0
    assert f"deepspeed.file: {line}\n" in (answer.out if form == "text" else answer.err)


@pytest.mark.parametrize(
    ("deletion", "path", "value"),
    [
        ("~zero", "zero_optimization.stage", 3),
        ("~deepspeed.gradient_clipping", "gradient_clipping", 0.25),
        ("~optim", "optimizer.type", "Lion"),
        ("~schedule", "scheduler.type", "WarmupLR"),
    ],
)
def test_a_deleted_group_or_key_leaves_the_files_value(
    cli: Cli, file: Callable[[Any], str], deletion: str, path: str, value: Any
) -> None:
    content = {
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "gradient_clipping": 0.25,
        "optimizer": {"type": "Lion", "params": {"lr": 1e-4}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    }
    only = {path.partition(".")[0]: content[path.partition(".")[0]]} | (
        {"zero_optimization": content["zero_optimization"]} if value == "Lion" else {}
    )
    answer = cli("mode=plan", "plan.format=json", file(only), deletion)
    assert answer.code == 0, answer.err
    plan = json.loads(answer.out)
    found: Any = plan["deepspeed"]
    for name in path.split("."):
        found = found[name]
    assert found == value
    assert plan["sources"][f"deepspeed.{path}"] == "deepspeed.file"
    assert f"{path} " not in answer.err


def test_no_optimizer_at_all_is_refused() -> None:
    [problem] = refused("~optim")
    assert problem.fix == "use optim=adamw, or give deepspeed.file an optimizer"


@pytest.mark.parametrize(
    ("choice", "content"),
    [
        ("precision=fp32", {"bf16": {"enabled": True}}),
        ("offload=none", {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}),
        ("zeropp=off", {"zero_optimization": {"zero_hpz_partition_size": 2}}),
        ("schedule=constant", {"scheduler": {"type": "WarmupLR", "params": {}}}),
    ],
)
def test_a_choice_without_keys_cannot_undo_the_file_and_is_refused(
    cli: Cli, file: Callable[[Any], str], choice: str, content: dict[str, Any]
) -> None:
    answer = cli("mode=plan", file(content), choice)
    assert answer.code == 2
    assert f"leave {choice} out to keep the file's, or take it out of the file" in answer.err
    off = json.loads(json.dumps(content).replace("true", "false").replace('"cpu"', '"none"').replace("2", "1"))
    if choice != "schedule=constant":
        assert cli("mode=plan", file(off), choice).code == 0


def test_the_default_choice_without_keys_leaves_the_files(file: Callable[[Any], str]) -> None:
    assert planned(file({"bf16": {"enabled": True}})).precision == "bf16"


def test_two_names_of_one_key_are_one(file: Callable[[Any], str]) -> None:
    given = file({"zero_optimization": {"prefetch_bucket_size": 5, "max_live_parameters": 6}})
    zero = planned(given, "zero=stage3", "deepspeed.zero_optimization.stage3_prefetch_bucket_size=7").deepspeed
    assert zero["zero_optimization"] == {
        "stage3_prefetch_bucket_size": 7,
        "stage3_max_live_parameters": 6,
        "stage": 3,
    }


# --- Hugging Face's "auto" -------------------------------------------------------------------------------------------


def test_a_hugging_face_file_is_solved_by_the_rest_of_the_request(file: Callable[[Any], str]) -> None:
    plan = planned(file(HUGGING_FACE), "zero=stage3", "precision=bf16", "schedule=warmup_decay", "run.steps=50")
    hidden = plan.config.model.config["hidden_size"]
    assert (plan.deepspeed["bf16"]["enabled"], plan.deepspeed["fp16"]["enabled"]) == (True, False)
    assert plan.deepspeed["optimizer"]["params"] == {
        "lr": 0.002,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.1,
    }
    assert plan.deepspeed["scheduler"]["params"] == {
        "warmup_min_lr": 0.0,
        "warmup_num_steps": 5,
        "warmup_type": "linear",
        "total_num_steps": 50,
        "warmup_max_lr": 0.002,
    }
    zero = plan.deepspeed["zero_optimization"]
    assert zero["reduce_bucket_size"] == hidden * hidden
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * hidden * hidden)
    assert zero["stage3_param_persistence_threshold"] == 10 * hidden
    assert plan.deepspeed["gradient_clipping"] == 1.0
    assert "auto" not in [value for _, value in leaves(plan.deepspeed)]


def test_a_hugging_face_file_alone_decides_where_the_groups_are_deleted(file: Callable[[Any], str]) -> None:
    plan = planned(file(HUGGING_FACE), "~zero", "~schedule", "run.steps=50")
    assert plan.zero_stage == 3
    assert plan.deepspeed["scheduler"] == {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 50, "warmup_min_lr": 0.0, "warmup_max_lr": 0.002, "warmup_num_steps": 5},
    }


def test_sizes_of_stage_3_are_left_out_below_it(file: Callable[[Any], str]) -> None:
    zero = planned(file(HUGGING_FACE)).deepspeed["zero_optimization"]
    assert "stage3_prefetch_bucket_size" not in zero and "stage3_param_persistence_threshold" not in zero
    assert zero["reduce_bucket_size"] == 128 * 128


def test_answered_autos_are_not_reported_as_replaced(cli: Cli, file: Callable[[Any], str]) -> None:
    answer = cli("mode=plan", file(HUGGING_FACE), "zero=stage3", "schedule=warmup_decay")
    assert answer.code == 0
    assert "replaced by" not in answer.out + answer.err


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_models_width_is_found_under_its_familys_name(file: Callable[[Any], str], family: str) -> None:
    given = file({"zero_optimization": {"reduce_bucket_size": "auto"}})
    width = {"gpt2": "n_embd", "llama": "hidden_size"}[family]
    plan = planned(given, f"model={'gpt2_small' if family == 'gpt2' else 'tiny'}")
    assert plan.deepspeed["zero_optimization"]["reduce_bucket_size"] == plan.config.model.config[width] ** 2


def test_a_model_without_a_width_is_refused(file: Callable[[Any], str]) -> None:
    config = composed(file({"zero_optimization": {"reduce_bucket_size": "auto"}}))
    del config.model.config["hidden_size"]
    with refuses("deepspeed.zero_optimization.reduce_bucket_size", "has none of hidden_size, n_embd", "write a number"):
        build_plan(config, {})


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ({"steps_per_print": "auto"}, "deepspeed.steps_per_print"),
        ({"zero_optimization": {"sub_group_size": "auto"}}, "deepspeed.zero_optimization.sub_group_size"),
    ],
)
def test_any_other_auto_is_refused(file: Callable[[Any], str], content: dict[str, Any], where: str) -> None:
    [problem] = refused(file(content))
    assert (problem.where, problem.got) == (where, '"auto"')


# --- batch sizes -----------------------------------------------------------------------------------------------------


def test_batch_sizes_of_the_file_become_the_requests(file: Callable[[Any], str]) -> None:
    plan = planned(file({"train_batch_size": 48, "train_micro_batch_size_per_gpu": "4"}), "cluster.num_procs=2")
    assert (plan.batch.micro_batch_size, plan.batch.gradient_accumulation_steps) == (4, 6)
    assert (plan.config.train.micro_batch_size, plan.config.train.global_batch_size) == (4, 48)


def test_batch_sizes_that_disagree_are_refused(file: Callable[[Any], str]) -> None:
    given = file({"train_micro_batch_size_per_gpu": 4})
    assert planned(given, "train.micro_batch_size=4").batch.micro_batch_size == 4
    with refuses("train.micro_batch_size", "has train_micro_batch_size_per_gpu = 4", "leave train.micro_batch_size"):
        planned(given, "train.micro_batch_size=2")


def test_a_batch_size_that_is_no_number_is_refused(file: Callable[[Any], str]) -> None:
    with refuses("train.micro_batch_size", "which is no number of samples"):
        planned(file({"train_micro_batch_size_per_gpu": "four"}))


# --- the file itself -------------------------------------------------------------------------------------------------


def test_comments_and_trailing_commas_are_legal(file: Callable[[Any], str]) -> None:
    text = '{\n  // ours\n  "steps_per_print": 7, # often\n  /* off */ "wall_clock_breakdown": true,\n}\n'
    plan = planned(file(text)).deepspeed
    assert (plan["steps_per_print"], plan["wall_clock_breakdown"]) == (7, True)


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        ('{\n "a": 1,\n "steps_per_print": [1, 2\n', ["line 4", "not JSON"]),
        ('{"steps_per_print": 1,\n "steps_per_print": 2}', ["a block holds steps_per_print twice (lines 1, 2)"]),
        ('{"fp16": {"enabled": true,\n\n "enabled": false}} # x', ["a block holds enabled twice (lines 1, 3)"]),
        ("[1]", ["it holds [1], where a block of DeepSpeed's keys stands"]),
        ("3", ["it holds 3"]),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(file: Callable[[Any], str], text: str, contents: list[str]) -> None:
    with refuses("deepspeed.file", *contents):
        planned(file(text))


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    with refuses("deepspeed.file", f"{tmp_path}/none.json", "No such file or directory"):
        planned(f"deepspeed.file={tmp_path}/none.json")
    (tmp_path / "bytes").write_bytes(b"\xff{}")
    with refuses("not UTF-8 text"):
        planned(f"deepspeed.file={tmp_path}/bytes")
    with refuses("deepspeed.file", "not a path"):
        planned("deepspeed.file=3")


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\ufeff{"steps_per_print": 7}', encoding="utf-8")
    assert read(str(tmp_path / "a.json")) == {"steps_per_print": 7}


def test_problems_in_the_file_name_it(cli: Cli, file: Callable[[Any], str]) -> None:
    given = file({"zero_optimization": {"stage": 3, "stage3_param_persitance_threshold": 1}, "gradient_cliping": 1})
    answer = cli("mode=plan", given, "deepspeed.steps_per_prin=1")
    path = given.partition("=")[2]
    assert answer.code == 2
    assert f"deepspeed.zero_optimization.stage3_param_persitance_threshold in {path}\n" in answer.err
    assert f"deepspeed.gradient_cliping in {path}\n" in answer.err
    assert "deepspeed.steps_per_prin\n" in answer.err


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_refused_request_says_too_what_was_replaced(cli: Cli, file: Callable[[Any], str], form: str) -> None:
    given = file({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}})
    answer = cli("mode=plan", f"plan.format={form}", given)
    assert answer.code == 2
    assert "deepspeed.file: scheduler.type WarmupLR replaced by WarmupCosineLR" in answer.err
    assert f"deepspeed.scheduler.params.warmup_max_lr in {given.partition('=')[2]}\n" in answer.err
    assert "it belongs to WarmupDecayLR or WarmupLR" in answer.err


def test_a_relative_path_means_the_folder_of_the_command(cli: Cli) -> None:
    Path("my ds.json").write_text('{"steps_per_print": 7}')
    answer = cli("mode=plan", "plan.format=json", "deepspeed.file='my ds.json'")
    assert json.loads(answer.out)["deepspeed"]["steps_per_print"] == 7
    missing = cli("mode=plan", "deepspeed.file=other.json")
    assert f"got   {Path.cwd()}/other.json\n" in missing.err


# --- stored runs -----------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_what_the_file_held(file: Callable[[Any], str], tmp_path: Path) -> None:
    given = file({"steps_per_print": 7, "gradient_clipping": 0.25})
    overrides = [f"++{given}", "~deepspeed.gradient_clipping"]
    run = RunDir(tmp_path / "run")
    run.create()
    run.config.write_text(compose.composed_yaml(composed(*overrides)))
    run.overrides.write_text("\n".join(overrides) + "\n")
    Path(given.partition("=")[2]).unlink()
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        again = compose.to_run_config(compose.recompose(run, ["zero=stage3"], "pretrain")[0])
        assert (again.deepspeed["steps_per_print"], again.deepspeed["gradient_clipping"]) == (7, 0.25)
        assert again.deepspeed["zero_optimization"]["stage"] == 3
        with refuses("deepspeed.file", "the run keeps the DeepSpeed keys it was started with"):
            compose.recompose(run, ["++deepspeed.file=x.json"], "pretrain")


def test_the_request_as_hydra_holds_it_is_not_changed(file: Callable[[Any], str]) -> None:
    """huggingface/transformers#10760."""
    given = file({"steps_per_print": 7})
    assert composed(given).deepspeed == composed(given).deepspeed
    assert raw(given).deepspeed.file == given.partition("=")[2]
