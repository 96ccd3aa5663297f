"""Values of a DeepSpeed configuration: what a user writes becomes the type of the key, or is refused with a reason.

Run by pytest. Cases cite the public thread they come from. Must never accept a value by rounding it.
"""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.ds_check import check
from launcher.ds_schema import Key
from launcher.ds_values import INT64, normalise
from launcher.errors import Problem
from tests.ds_configs import leaves, placed, shown

BUCKET = "zero_optimization.reduce_bucket_size"
LR = "optimizer.params[adamw].lr"


def one(path: str, value: Any) -> Any:
    """What `value` at `path` becomes; it must become something."""
    config, problems = normalise(placed(path, value))
    assert problems == []
    return at(config, path)


def refused(path: str, value: Any) -> Problem:
    """The one problem of `value` at `path`, which stays as it is."""
    given_config = placed(path, value)
    config, problems = normalise(given_config)
    (problem,) = problems
    assert repr(config) == repr(given_config)  # NaN is not equal to itself
    assert problem.where.startswith(shown(path))
    return problem


def at(config: Any, path: str) -> Any:
    for name in shown(path).removeprefix("deepspeed.").split("."):
        config = config[name]
    return config


# --- public cases ----------------------------------------------------------------------------------------------------


def test_a_learning_rate_read_as_text_becomes_a_number() -> None:
    """Case 10 (huggingface/accelerate#1828): PyYAML reads 1e-5 as text, and it fails deep in fused Adam."""
    config, problems = normalise({"optimizer": {"type": "AdamW", "params": {"lr": "1e-5", "eps": "1e-8"}}})
    assert problems == []
    params = config["optimizer"]["params"]
    assert params == {"lr": 1e-05, "eps": 1e-08}
    assert all(type(value) is float for value in params.values())
    assert json.dumps(params) == '{"lr": 1e-05, "eps": 1e-08}'


def test_a_wrong_text_is_named_by_its_path() -> None:
    """Case 10 (huggingface/accelerate#1828)."""
    problem = refused(LR, "1e-5x")
    assert problem.where == "deepspeed.optimizer.params.lr"
    assert problem.got == '"1e-5x"'
    assert problem.why == "'x' behind a number means nothing"


@pytest.mark.parametrize(
    "written", [5e8, "5e8", "0.5e9", "500_000_000", "500000000", "500M", "0.5G", "0.5B", "5E8", "+5e8"]
)
def test_whole_numbers_in_any_notation_become_integers(written: Any) -> None:
    """Case 11 (snowflakedb/ArcticTraining#165): pydantic refuses the text on every rank after the launch."""
    value = one(BUCKET, written)
    assert value == 500_000_000
    assert type(value) is int


@pytest.mark.parametrize("written", [0.55, "5.5e-1", "0.5", "1.0005k", 2.5, "1e-3"])
def test_a_fraction_of_an_element_is_refused(written: Any) -> None:
    """Case 11 (snowflakedb/ArcticTraining#165)."""
    problem = refused(BUCKET, written)
    assert problem.why == "must be a whole number of elements"
    assert problem.fix.startswith("write a whole number of elements, such as 1000000, 1e6 or 1M")


def test_flags_stay_flags_and_integers_stay_integers() -> None:
    """Case 13 (snowflakedb/ArcticTraining#287): a naive conversion turns true into 1.0."""
    config = {"bf16": {"enabled": True}, "zero_optimization": {"overlap_comm": False, "stage": 3}}
    config["zero_optimization"]["reduce_bucket_size"] = "500M"  # type: ignore[assignment]
    result, problems = normalise(config)
    assert problems == []
    assert json.dumps(result) == (
        '{"bf16": {"enabled": true}, "zero_optimization": {"overlap_comm": false, "stage": 3, '
        '"reduce_bucket_size": 500000000}}'
    )


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("10k", 10_000),
        ("10K", 10_000),
        ("1.5M", 1_500_000),
        ("2G", 2_000_000_000),
        ("2g", 2_000_000_000),
        ("2B", 2_000_000_000),
        ("2b", 2_000_000_000),
        ("1T", 10**12),
        ("64Ki", 65_536),
        ("1Mi", 1_048_576),
        ("0.5Gi", 536_870_912),
        (" 5e8 ", 500_000_000),
        ("500 M", 500_000_000),
        ("1e2k", 100_000),
        ("1_0_0", 100),
        ("7.", 7),
        ("9223372036854775807", INT64),
    ],
)
def test_multiples_of_elements(written: str, value: int) -> None:
    assert one(BUCKET, written) == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1048576", 1_048_576),
        ("1MiB", 1_048_576),
        ("1Mi", 1_048_576),
        ("64KiB", 65_536),
        ("1MB", 1_000_000),
        ("4kB", 4_000),
        ("512B", 512),
    ],
)
def test_sizes_in_bytes(written: str, value: int) -> None:
    assert one("aio.block_size", written) == value


@pytest.mark.parametrize("written", ["1M", "64k", "2G", "64KB", "64K"])
def test_a_size_in_bytes_that_can_be_read_two_ways_is_refused(written: str) -> None:
    assert "can be read two ways" in refused("aio.block_size", written).why


def test_bytes_are_refused_where_elements_are_counted() -> None:
    assert (
        refused("zero_optimization.offload_param.buffer_size", "64MB").why == "bytes, where DeepSpeed counts elements"
    )


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("500m", "a small m could be milli or a million"),
        ("500X", "'X' behind a number means nothing"),
        ("5e8x", "'x' behind a number means nothing"),
        ("5,000", "not a number, where a whole number of elements stands"),
        ("", "not a number, where a whole number of elements stands"),
        ("M", "not a number, where a whole number of elements stands"),
        ("_1", "not a number, where a whole number of elements stands"),
        ("1__0", "not a number, where a whole number of elements stands"),
        ("0x10", "not a number, where a whole number of elements stands"),
        ("nan", "not a number, where a whole number of elements stands"),
        ("inf", "not a number, where a whole number of elements stands"),
        ("١٢", "not a number, where a whole number of elements stands"),
        (True, "a boolean, where a whole number of elements stands"),
        (False, "a boolean, where a whole number of elements stands"),
        (float("nan"), "not finite, where a whole number of elements stands"),
        (float("inf"), "not finite, where a whole number of elements stands"),
        (None, "null, where a whole number of elements stands"),
        ([5], "a list, where a whole number of elements stands"),
        ({"a": 5}, "a block, where a whole number of elements stands"),
        (INT64 + 1, f"larger than DeepSpeed can count: the limit is {INT64}"),
        ("1e9999", f"larger than DeepSpeed can count: the limit is {INT64}"),
        ("-5", "it is more than 0 (elements)"),
    ],
)
def test_what_is_no_whole_number_is_refused(written: Any, why: str) -> None:
    assert refused(BUCKET, written).why == why


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (1, 1.0),
        ("1", 1.0),
        ("1e-5", 1e-5),
        (".5", 0.5),
        ("-0.0", 0.0),
        ("1_000.5", 1000.5),
        (2**53, float(2**53)),
        ("3k", 3e3),
    ],
)
def test_floats(written: Any, value: float) -> None:
    result = one("gradient_clipping", written)
    assert result == value
    assert type(result) is float


@pytest.mark.parametrize("written", [10**400, "1e400", "1e-400", "1e99999", float("inf"), True, "true"])
def test_what_no_float_can_hold_is_refused(written: Any) -> None:
    refused("gradient_clipping", written)


@given(st.integers(1, INT64), st.sampled_from(["{}", "{:_}", "+{}", " {}", "{}.0", "{}e0"]))
def test_every_whole_number_survives_every_notation(number: int, notation: str) -> None:
    assert one(BUCKET, notation.format(number)) == number


@given(st.floats(min_value=0, allow_infinity=False))
def test_every_float_survives_as_number_and_as_text(number: float) -> None:
    for written in (number, repr(number)):
        assert one("gradient_clipping", written) == number


@given(st.integers(0, 2**50), st.sampled_from([0.5, 0.25, 0.75]))
def test_no_fraction_is_rounded(number: int, fraction: float) -> None:
    for written in (number + fraction, str(number + fraction)):
        assert refused(BUCKET, written).why == "must be a whole number of elements"


# --- booleans, text, lists -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", ["zero_optimization.overlap_comm", "aio.single_submit", "wall_clock_breakdown"])
@pytest.mark.parametrize(
    ("written", "value"),
    [
        (True, True), ("true", True), ("True", True), ("TRUE", True), ("yes", True), ("on", True), (1, True),
        ("1", True), (False, False), ("false", False), ("False", False), ("no", False), ("off", False), (0, False),
        ("0", False),
    ],
)  # fmt: skip
def test_booleans_are_taken_as_pydantic_takes_them(block: str, written: Any, value: bool) -> None:
    """In blocks DeepSpeed does not check, the text "false" would count as true."""
    assert one(block, written) is value


@pytest.mark.parametrize("written", [2, -1, 1.0, 0.0, "maybe", "", "tru", [True], {}])
def test_what_is_neither_true_nor_false_is_refused(written: Any) -> None:
    refused("aio.single_submit", written)


def test_text_stays_text() -> None:
    assert one("wandb.project", "5e8") == "5e8"
    assert one("wandb.project", "true") == "true"
    assert refused("wandb.project", 5).why == "a number, where text stands"


def test_lists_are_converted_element_by_element() -> None:
    betas = one("optimizer.params[adamw].betas", ["0.9", 0])
    assert betas == [0.9, 0.0]
    assert all(type(beta) is float for beta in betas)
    assert one("optimizer.params[adamw].betas", (0.9, 0.95)) == [0.9, 0.95]
    assert one("scheduler.params[MultiStepLR].milestones", ["1k", 2e3]) == [1000, 2000]
    assert one("scheduler.params[OneCycle].cycle_max_lr", ["1e-3", 1]) == [0.001, 1.0]


def test_a_wrong_element_is_named_by_its_place() -> None:
    problem = refused("optimizer.params[adamw].betas", [0.9, "0.999x"])
    assert problem.where == "deepspeed.optimizer.params.betas[1]"
    assert problem.got == '"0.999x"'


def test_one_name_stands_for_a_list_where_deepspeed_takes_it() -> None:
    assert one("zero_optimization.leaf_module.classes", "a.B") == ["a.B"]
    refused("torch_autocast.lower_precision_safe_modules", "a.B")


# --- the whole dict --------------------------------------------------------------------------------------------------


def test_another_name_of_a_key_becomes_the_documented_one() -> None:
    zero = {"stage": 3, "prefetch_bucket_size": "50M", "param_persistence_threshold": 1e5, "overlap_comm": True}
    config, problems = normalise({"zero_optimization": zero, "tensor_parallel": {"tensor_parallel": {"tp_size": "2"}}})
    assert problems == []
    assert list(config["zero_optimization"].items()) == [
        ("stage", 3),
        ("stage3_prefetch_bucket_size", 50_000_000),
        ("stage3_param_persistence_threshold", 100_000),
        ("overlap_comm", True),
    ]
    assert config["tensor_parallel"] == {"tp": {"tp_size": 2}}


def test_two_names_of_a_key_stay_for_the_check() -> None:
    zero = {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 2}
    config, _ = normalise({"zero_optimization": zero})
    assert config == {"zero_optimization": zero}
    assert len(check(config)) == 1


def test_auto_and_unknown_keys_are_left_alone() -> None:
    config = {
        "zero_optimization": {"zero_hpz_partition_size": "auto", "unknown": {"x": "5e8"}},
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": {"betas": ["auto", "0.9"]}},
        "5e8": "5e8",
        3: "4",
        "datastates_ckpt": {"anything": "5e8"},
    }
    assert normalise(config) == (config, [])


def test_every_wrong_value_is_reported_at_once() -> None:
    config = {
        "gradient_clipping": "x",
        "bf16": None,
        "optimizer": {"type": "AdamW", "params": {"lr": "y", "eps": True}},
        "zero_optimization": {"stage": "3", "sub_group_size": 0.5, "offload_param": {"max_in_cpu": "1m"}},
    }
    result, problems = normalise(config)
    assert [problem.where for problem in problems] == [
        "deepspeed.gradient_clipping",
        "deepspeed.bf16",
        "deepspeed.optimizer.params.lr",
        "deepspeed.optimizer.params.eps",
        "deepspeed.zero_optimization.sub_group_size",
        "deepspeed.zero_optimization.offload_param.max_in_cpu",
    ]
    assert result["zero_optimization"]["stage"] == 3
    assert set(problems) == set(check(result))


@pytest.mark.parametrize("config", [None, 5, "x", [1]])
def test_anything_but_a_mapping_is_one_problem(config: Any) -> None:
    result, (problem,) = normalise(config)
    assert result == {}
    assert problem.where == "deepspeed"


def test_every_default_stays_what_it_is() -> None:
    for key in leaves():
        if key.has_default:
            config = placed(key.path, key.default)
            result, problems = normalise(config)
            assert problems == [], key.path
            assert result == config, key.path
            assert type(at_type(result, key)) is type(at_type(config, key)), key.path


def at_type(config: Any, key: Key) -> Any:
    for name in shown(key.path).removeprefix("deepspeed.").replace("[0]", ".0").split("."):
        config = config[int(name)] if isinstance(config, list) else config[name]
    return config


written = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["5e8", "500M", "1e-5", "true", "auto", "x", "1MiB", "none", "cpu", "AdamW"]),
    st.lists(st.floats() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.sampled_from(["type", "params", "lr", "stage", "device", "enabled"]), st.integers(), max_size=3),
)
configurations = st.dictionaries(
    st.sampled_from(["zero_optimization", "optimizer", "bf16", "aio", "gradient_clipping", "nothing"]),
    st.dictionaries(
        st.sampled_from(
            ["stage", "reduce_bucket_size", "offload_param", "enabled", "type", "params", "block_size", "x"]
        ),
        written,
        max_size=4,
    )
    | written,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(configurations)
def test_nothing_is_mutated_and_a_second_time_changes_nothing(config: dict[str, Any]) -> None:
    before = repr(config)
    untouched = copy.deepcopy(config)
    result, problems = normalise(config)
    assert repr(config) == repr(untouched) == before
    again, same = normalise(result)
    assert repr(again) == repr(result)
    assert same == problems
    assert set(problems) <= set(check(result))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([key for key in leaves() if key.type in ("int", "float", "bool")]), written)
def test_what_is_accepted_has_the_type_of_its_key(key: Key, value: Any) -> None:
    result, problems = normalise(placed(key.path, value))
    if problems or value is None or value == "auto" or isinstance(value, (list, dict)):
        return
    kinds = {"int": int, "float": float, "bool": bool}
    accepted = at_type(result, key)
    assert type(accepted) is kinds[key.type]
    assert math.isfinite(accepted)
