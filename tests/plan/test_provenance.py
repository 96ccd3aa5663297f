"""Claims about where each value of a plan is said to come from.

Run by pytest.
Must never accept a value without a source, or a source that is none of the legal ones.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from launcher import cli as front_door
from launcher import compose, provenance
from launcher.ds_file import leaves
from launcher.plan import Plan
from launcher.run import Outcome
from launcher.schema import option_types
from tests.plan.asking import CONF, ROOT, composed

Cli = Callable[..., Any]
LEGAL = re.compile(r"conf/config\.yaml|conf/\w+/\w+\.yaml|command line|deepspeed\.file|model\.path|solved: .+")


def plan_of(cli: Cli, *overrides: str) -> dict[str, Any]:
    answer = cli("mode=plan", "plan.format=json", *overrides)
    assert answer.code == 0, answer.err
    return dict(json.loads(answer.out))


def sources_of(cli: Cli, *overrides: str) -> dict[str, str]:
    return dict(plan_of(cli, *overrides)["sources"])


# --- every value has one ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["experiment=llama_1b_stage3"],
        ["zero=stage3", "offload=cpu_all", "precision=bf16", "schedule=warmup_decay", "data=text", "optim=lion"],
        ["~zero", "~experiment", "+cluster.env.A=b", "deepspeed.optimizer.params={lr: 1, betas: [0, 0.5]}"],
    ],
)
def test_every_value_of_a_plan_has_a_legal_source(cli: Cli, overrides: list[str]) -> None:
    plan = plan_of(cli, *overrides)
    sources = plan["sources"]
    keys = {f"deepspeed.{path}" for path, _ in leaves(plan["deepspeed"])}
    assert keys == {path for path in sources if path.startswith("deepspeed.")}
    free = {"model.config", "data", "cluster.env", "deepspeed"}
    assert set(option_types()) - free <= set(sources)
    assert {path for path, source in sources.items() if not LEGAL.fullmatch(source)} == set()
    for source in set(sources.values()):
        assert not source.startswith("conf/") or (ROOT / source).is_file()


def test_every_file_of_conf_is_read_as_hydra_reads_it() -> None:
    """What `given` takes from a file is what Hydra makes of it alone."""
    files = sorted(CONF.glob("*/*.yaml"))
    assert len(files) > 40
    for path in files:
        group, choice = path.parent.name, path.stem
        found = provenance.given({group: choice}, [])
        own = {option for option, source in found.items() if source == f"conf/{group}/{choice}.yaml"}
        with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            alone = OmegaConf.to_container(hydra_compose(f"{group}/{choice}")) if group != "experiment" else None
        if isinstance(alone, dict):
            assert own == {option for option, value in leaves(alone) if value != {} or option in own}, path


# --- the layers ------------------------------------------------------------------------------------------------------


def test_the_last_layer_that_sets_a_value_is_its_source(cli: Cli) -> None:
    sources = sources_of(cli, "experiment=llama_1b_stage3", "run.steps=900", "deepspeed.optimizer.params.eps=1e-7")
    assert sources["run.steps"] == "command line"
    assert sources["run.seed"] == "conf/config.yaml"
    assert sources["train.sequence_length"] == "conf/experiment/llama_1b_stage3.yaml"
    assert sources["model.config.hidden_size"] == "conf/model/llama_1b.yaml"
    assert sources["deepspeed.zero_optimization.stage"] == "conf/zero/stage3.yaml"
    assert sources["deepspeed.optimizer.params.lr"] == "conf/experiment/llama_1b_stage3.yaml"
    assert sources["deepspeed.optimizer.params.eps"] == "command line"
    assert sources["deepspeed.optimizer.params.weight_decay"] == "conf/optim/adamw.yaml"
    assert sources["deepspeed.gradient_clipping"] == "conf/config.yaml"


def test_what_python_fills_in_is_named_with_its_formula(cli: Cli, two_hosts: tuple[str, ...]) -> None:
    request = (*two_hosts, "zero=stage3", "zeropp=hpz", "precision=bf16", "schedule=warmup_decay")
    sources = sources_of(cli, *request, "train.micro_batch_size=2")
    assert sources["deepspeed.zero_optimization.zero_hpz_partition_size"].startswith("solved: slots of a host")
    assert sources["deepspeed.scheduler.params.total_num_steps"] == "solved: run.steps"
    assert sources["deepspeed.scheduler.params.warmup_max_lr"] == "solved: optimizer.params.lr"
    assert sources["deepspeed.scheduler.params.warmup_num_steps"].startswith("solved: run.steps / 10")
    assert sources["deepspeed.train_micro_batch_size_per_gpu"] == "command line"
    assert sources["deepspeed.train_batch_size"] == "solved: micro batch x accumulation x ranks"
    assert sources["deepspeed.gradient_accumulation_steps"] == "solved: 1, as no global batch is given"
    assert sources["data.cache_dir"] == "solved: the user's cache folder"


def test_a_number_in_the_place_of_auto_is_not_solved(cli: Cli) -> None:
    sources = sources_of(cli, "deepspeed.scheduler.params.warmup_num_steps=3")
    assert sources["deepspeed.scheduler.params.warmup_num_steps"] == "command line"


@pytest.mark.parametrize(
    ("overrides", "micro", "accumulation", "total"),
    [
        ([], "train.fallback_micro_batch_size", "1, as no", "micro batch x"),
        (["train.global_batch_size=8"], "largest divisor", "global batch / (micro", None),
        (["train.global_batch_size=8", "train.gradient_accumulation_steps=2"], "global batch / (acc", None, None),
    ],
)
def test_the_batch_says_which_formula_was_used(
    cli: Cli, overrides: list[str], micro: str | None, accumulation: str | None, total: str | None
) -> None:
    sources = sources_of(cli, *overrides)
    for key, formula in (
        ("train_micro_batch_size_per_gpu", micro),
        ("gradient_accumulation_steps", accumulation),
        ("train_batch_size", total),
    ):
        expected = "command line" if formula is None else f"solved: {formula}"
        assert sources[f"deepspeed.{key}"].startswith(expected)


def test_a_deleted_key_leaves_the_layer_below(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 3}')
    sources = sources_of(cli, f"deepspeed.file={tmp_path}/ds.json", "~deepspeed.gradient_clipping")
    assert sources["deepspeed.gradient_clipping"] == "deepspeed.file"
    assert sources["train.micro_batch_size"] == "deepspeed.file"
    assert sources["deepspeed.train_micro_batch_size_per_gpu"] == "deepspeed.file"


def test_another_name_of_a_key_keeps_its_source(cli: Cli) -> None:
    sources = sources_of(cli, "zero=stage3", "deepspeed.zero_optimization.prefetch_bucket_size=5")
    assert sources["deepspeed.zero_optimization.stage3_prefetch_bucket_size"] == "command line"


def test_fields_of_a_models_own_file_come_from_model_path(cli: Cli, tmp_path: Path) -> None:
    fields = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    sources = sources_of(cli, "model=hf", f"model.path={tmp_path}", "+model.config.n_layer=3")
    assert sources["model.config.n_embd"] == "model.path"
    assert sources["model.config.n_layer"] == "command line"


def test_a_trials_folder_comes_from_the_sweep(cli: Cli) -> None:
    answer = cli("-m", "mode=plan", "plan.format=json", "zero=stage1,stage2")
    plans = [json.loads(line) for line in answer.out.splitlines()]
    assert [plan["sources"]["run.dir"] for plan in plans] == ["solved: the sweep's folder / number of the trial"] * 2
    assert plans[0]["sources"]["deepspeed.zero_optimization.stage"] == "conf/zero/stage1.yaml"


# --- where it is shown -----------------------------------------------------------------------------------------------


def test_the_plan_for_people_shows_key_value_and_source(cli: Cli) -> None:
    lines = cli("mode=plan", "zero=stage3", "deepspeed.gradient_clipping=0.5").out.splitlines()
    rows = [re.split(r"\s{2,}", line) for line in lines]
    assert ["DeepSpeed", "value", "from"] in rows
    assert ["zero_optimization.stage", "3", "conf/zero/stage3.yaml"] in rows
    assert ["gradient_clipping", "0.5", "command line"] in rows
    assert ["optimizer.params.betas", "[0.9, 0.95]", "conf/optim/adamw.yaml"] in rows


def test_a_started_run_gets_the_sources_and_the_plan_does_not(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[Plan, dict[str, str]]] = []

    def train(plan: Plan, overrides: list[str], sources: dict[str, str]) -> Outcome:
        kept.append((plan, sources))
        return Outcome(0, None, overrides)

    monkeypatch.setattr(front_door.run, "train", train)
    assert cli("run.steps=3").code == 0
    [(plan, sources)] = kept
    assert sources["run.steps"] == "command line"
    assert "sources" not in plan.to_json()


def test_the_same_values_from_elsewhere_are_the_same_plan(cli: Cli) -> None:
    one, other = plan_of(cli, "zero=stage3"), plan_of(cli, "deepspeed.zero_optimization.stage=3")
    assert one["fingerprint"] == other["fingerprint"]
    assert one["sources"] != other["sources"]


def test_a_resumed_run_keeps_its_sources_but_for_what_changes() -> None:
    before, after = composed("zero=stage3", "run.steps=5"), composed("zero=stage3", "run.steps=9")
    old = {"run.steps": "command line", "run.seed": "conf/config.yaml", "deepspeed.zero_optimization.stage": "x"}
    found = provenance.continued(old, before, after, {"run.steps": "conf/experiment/smoke.yaml", "run.seed": "y"})
    assert found["run.steps"] == "conf/experiment/smoke.yaml"
    assert found["run.seed"] == "conf/config.yaml"
    assert found["deepspeed.zero_optimization.stage"] == "x"
    assert found["eval.every"] == provenance.STORED  # a run of an older version recorded none


def test_typed_paths_are_options_not_groups() -> None:
    typed = ["zero=stage3", "run.steps=3", "++deepspeed.a={b: 1, c: {d: [1, 2]}}", "~deepspeed.e", "hydra.verbose=true"]
    assert compose.typed_paths(typed) == [
        ("run.steps", False),
        ("deepspeed.a.b", False),
        ("deepspeed.a.c.d", False),
        ("deepspeed.e", True),
    ]


def test_finding_the_sources_takes_little_of_the_time_of_planning() -> None:
    """Planning takes under 0.9 s in all; composing again would cost a sixth of a second."""
    choices = {"zero": "stage2", "model": "tiny", "optim": "adamw", "data": "stdlib", "cluster": "local"}
    provenance.given(choices, [])
    times = []
    for _ in range(5):
        start = time.perf_counter()
        provenance.given(choices, [("run.steps", False)])
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
