"""A LoRA adapter over frozen weights: trained alike at every stage, resumed, laid out anew, exported both ways.

Run by pytest: the recipe as its workers run it, in ranks that the engine server forks.
Must never take our own word for what was written: PEFT and Hugging Face load it, and the losses are computed anew.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from launcher.errors import UserError
from launcher.plan import Plan, read_plan
from launcher.planner.shapes import count_adapter
from launcher.resume import changed_options
from launcher.rundir import RunDir, write_json
from recipes import check_export, export
from recipes.shared import adapter_export
from recipes.shared.checkpoint import manifest
from recipes.shared.checkpoint.entries import Checkpoint
from recipes.shared.checkpoint.reader import open_checkpoint
from recipes.shared.data.build import prepare
from recipes.shared.data.corpus import open_corpus
from recipes.shared.lora import adapted
from recipes.shared.model import from_config
from tests.plan.asking import planned, refused, refuses
from tests.train.engines import GPT2, Engines, request
from tests.train.running import Runs, launch, losses, records
from tests.train.test_elastic_matrix import tensors
from tests.train.test_export_job import plan_json
from tests.train.test_export_job import request as export_request

RELATIVE = 1e-5  # of a loss in fp32: the same sums in another order, over twenty steps
LLAMA: dict[str, Any] = {"vocab_size": 256, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
TRAINING = (
    *("peft=lora", "peft.rank=4", "peft.alpha=12", "peft.modules_to_save=[lm_head]"),
    *("train.sequence_length=32", "train.gradient_accumulation_steps=1", "train.global_batch_size=12"),
    *("eval.every=0", "eval.samples=12", "run.steps=20", "checkpoint.every=10", "checkpoint.keep=0"),
    *("schedule=constant", "deepspeed.optimizer.params.lr=0.01"),
)
Layout = tuple[int, str, str]


def weights(folder: Path, family: str, **fields: Any) -> Path:
    """A Hugging Face folder of weights that no construction would give, norms among them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            model.save_pretrained(folder)
    return folder


def base(runs: Runs) -> Path:
    """The weights that runs of this file begin with."""
    return weights(runs.folder / "lora-base", "llama", tie_word_embeddings=False, **LLAMA, **HEADS)


def plan_of(runs: Runs, layout: Layout, *options: str) -> Plan:
    """The plan of a run over given weights in `layout`."""
    ranks, zero, offload = layout
    where = (f"zero={zero}", f"offload={offload}", f"cluster.num_procs={ranks}")
    return planned("model=hf", f"model.init_from={base(runs)}", *TRAINING, *where, *options)


def trained(engines: Engines, runs: Runs, layout: Layout, *options: str) -> Path:
    """A finished run of `plan_of`; shared by the tests of a session."""
    run = runs.folder / "-".join(map(str, ("lora", *layout, *options)))
    with FileLock(f"{run}.lock"):
        if not (run / "control" / "result.json").exists():
            plan = plan_of(runs, layout, *options)
            engines.run_recipe(plan, run)
            write_json(RunDir(run).plan, plan.to_json())
    return run


def step(run: Path, number: int) -> Path:
    """The checkpoint of a step."""
    return RunDir(run).checkpoint(number)


def exported(run: Path, form: str, target: Path, **changes: Any) -> Path:
    """What the export's job left for the launcher to name."""
    asked = export_request(run, target, lora=form) | {"max_shard_bytes": 10**9} | changes
    return Path(export.run_job(asked)["staging"])


def validation_loss(run: Path, model: Any) -> float:
    """Mean loss over the samples that the run evaluated."""
    config = read_plan(RunDir(run).plan).config
    data = prepare(config.data, config.train.sequence_length, Path(config.data["cache_dir"]))
    tokens = torch.from_numpy(open_corpus(data, config.train.sequence_length)[2].tokens(np.arange(config.eval.samples)))
    with torch.no_grad():
        return float(model.eval()(input_ids=tokens, labels=tokens).loss)


def logged_loss(run: Path) -> float:
    """The last evaluation in metrics.jsonl."""
    return float([record["eval_loss"] for record in records(run) if "eval_loss" in record][-1])


def loaded(folder: Path) -> Any:
    """The model in a folder, by Hugging Face."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)


def with_adapter(folder: Path, adapter: Path) -> Any:
    """The model in a folder with an exported adapter in it, by PEFT."""
    from peft import PeftModel

    return PeftModel.from_pretrained(loaded(folder), adapter)


@pytest.mark.parametrize("layout", [(2, "stage2", "none"), (2, "stage3", "none"), (2, "stage3", "cpu_all")])
def test_losses_agree_at_every_stage(engines: Engines, runs: Runs, layout: Layout) -> None:
    expected = losses(trained(engines, runs, (2, "stage0", "none")))
    found = losses(trained(engines, runs, layout))
    assert len(expected) == 20 and expected[-1] < expected[0]
    assert found == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("begin", ["given", "drawn"])
@pytest.mark.parametrize("zero", ["stage0", "stage1", "stage3"])
def test_the_adapter_begins_alike_at_every_stage(
    engines: Engines, runs: Runs, tmp_path: Path, zero: str, begin: str
) -> None:
    """A learning rate of 0: what the first checkpoint holds is what the run began with, under PEFT's own names."""
    plan = plan_of(runs, (2, zero, "none"), "run.steps=1", "deepspeed.optimizer.params.lr=0.0")
    if begin == "drawn":
        drawn = dataclasses.replace(plan.config.model, init_from=None)
        plan = dataclasses.replace(plan, config=dataclasses.replace(plan.config, model=drawn))
    engines.run_recipe(plan, tmp_path / "run")
    found = {entry.name: entry for entry in open_checkpoint(step(tmp_path / "run", 1))}
    torch.manual_seed(plan.config.run.seed)
    model = adapted(plan, loaded(base(runs)) if begin == "given" else from_config(plan))
    expected = dict(model.named_parameters())
    assert found.keys() == expected.keys() and any("lora_B.default" in name for name in expected)
    for name, entry in found.items():
        assert torch.equal(entry.read(), expected[name].detach()), name
        assert entry.trainable == (".lora_" in name or ".modules_to_save." in name), name


@pytest.mark.parametrize("begin", ["given", "drawn"])
def test_at_stage3_no_rank_holds_the_model_while_the_adapter_is_put_in(
    engines: Engines, runs: Runs, begin: str
) -> None:
    more = () if begin == "given" else ("model=tiny", "model.init_from=null", "model.config.tie_word_embeddings=false")
    plan = plan_of(runs, (2, "stage3", "none"), *more)
    answer = engines.call("tests.train.resident:build", 2, plan=plan.to_json(), at_most=20_000)
    assert "error" not in answer, answer
    config = plan.config.model.config
    largest = 4 * config["hidden_size"] * max(config["vocab_size"], config["intermediate_size"])
    assert answer["left"] == 0
    assert answer["at_once"] <= 2 * largest < answer["whole"] / 2  # the one that is needed, and the one before
    assert answer["at_once"] >= 4 * config["hidden_size"] * config["vocab_size"]  # the head, of which a copy is trained


@pytest.mark.parametrize("layout", [(2, "stage0", "none"), (2, "stage2", "none"), (2, "stage3", "none")])
def test_a_resumed_run_is_the_same_run(engines: Engines, runs: Runs, tmp_path: Path, layout: Layout) -> None:
    """huggingface/peft#746: adapter and base both come from the checkpoint; the base is built from other values."""
    whole, run = trained(engines, runs, layout), tmp_path / "run"
    plan = dataclasses.replace(plan_of(runs, layout), resume_from=str(step(whole, 10)))
    engines.run_recipe(plan, run)
    assert losses(run) == losses(whole)[10:]
    expected, found = tensors(step(whole, 20)), tensors(step(run, 20))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((2, "stage3", "none"), (4, "stage3", "none")),
        ((2, "stage3", "none"), (2, "stage2", "none")),
        ((2, "stage2", "none"), (2, "stage3", "cpu_all")),
        ((2, "stage3", "none"), (2, "stage0", "none")),
    ],
)
def test_another_layout_goes_on_with_the_same_base_and_adapter(
    engines: Engines, runs: Runs, tmp_path: Path, old: Layout, new: Layout
) -> None:
    whole, run, resaved = trained(engines, runs, old), tmp_path / "run", tmp_path / "resaved"
    plan = dataclasses.replace(plan_of(runs, new), resume_from=str(step(whole, 10)))
    engines.run_recipe(plan, run, resaved)
    expected, found = tensors(step(whole, 10)), tensors(step(resaved, 10))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    assert losses(run) == pytest.approx(losses(whole)[10:], rel=RELATIVE)


@pytest.mark.parametrize("new", [(2, "stage2", "none"), (2, "stage3", "none")])
@pytest.mark.parametrize("old", [(2, "stage2", "none"), (2, "stage3", "none")])
def test_a_missing_frozen_tensor_is_fatal_by_name(
    engines: Engines, runs: Runs, tmp_path: Path, old: Layout, new: Layout
) -> None:
    """huggingface/peft#746: a base that is not in the checkpoint is not replaced by one that was drawn anew."""
    lost = "base_model.model.model.norm.weight"
    source = tmp_path / "step_00000010"
    source.mkdir()
    for path in step(trained(engines, runs, old), 10).iterdir():
        if not path.name.endswith("model_states.pt"):
            (source / path.name).symlink_to(path)
            continue
        content = torch.load(path, weights_only=False)
        for part in ("module", "frozen_param_shapes", "frozen_param_fragments"):
            (content[part] or {}).pop(lost, None)
        torch.save(content, source / path.name)
    plan = dataclasses.replace(plan_of(runs, new), resume_from=str(source))
    with pytest.raises(AssertionError, match=lost):
        engines.run_recipe(plan, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_checkpoint_of_another_model_is_refused_by_name(engines: Engines, runs: Runs, tmp_path: Path) -> None:
    whole = trained(engines, runs, (2, "stage2", "none"))
    adapter = dataclasses.replace(plan_of(runs, (2, "stage2", "none")).config.peft, modules_to_save=[])
    plan = plan_of(runs, (2, "stage2", "none"))
    other = dataclasses.replace(plan.config, peft=adapter)
    assert [problem.where for problem in changed_options(plan.config, other)] == ["peft.modules_to_save"]
    with pytest.raises(AssertionError, match=r"base_model\.model\.lm_head\.weight"):
        plan = dataclasses.replace(plan, config=other, resume_from=str(step(whole, 10)))
        engines.run_recipe(plan, tmp_path / "run")


@pytest.mark.parametrize("layout", [(2, "stage0", "none"), (2, "stage2", "none"), (2, "stage3", "none")])
def test_a_merged_export_is_a_plain_model_with_the_logged_loss(
    engines: Engines, runs: Runs, tmp_path: Path, layout: Layout
) -> None:
    """deepspeedai/DeepSpeed#3205: the frozen base is in the full export, under its own names."""
    run = trained(engines, runs, layout)
    folder = exported(run, "merged", tmp_path / "export", max_shard_bytes=60_000)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and not (folder / "adapter_config.json").exists()
    found = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert found.keys() == loaded(base(runs)).state_dict().keys()
    assert validation_loss(run, loaded(folder)) == pytest.approx(logged_loss(run), rel=RELATIVE)
    checked = {"plan": plan_json(run), "folder": str(folder), "dtype": "fp32", "bytes": 1}
    answer = check_export.run_job(checked | {"expected": (manifest.read(step(run, 20)) or {})["fixed_batch_loss"]})
    assert "loss" in answer


@pytest.mark.parametrize("layout", [(2, "stage0", "none"), (2, "stage2", "none"), (2, "stage3", "none")])
def test_an_adapter_alone_is_what_peft_loads(engines: Engines, runs: Runs, tmp_path: Path, layout: Layout) -> None:
    """huggingface/peft#2892: 40 bytes at stage 3, and no modules_to_save. deepspeedai/DeepSpeed#3205: it alone."""
    from peft import get_peft_model_state_dict

    run = trained(engines, runs, layout)
    folder = exported(run, "adapter", tmp_path / "export")
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    model = with_adapter(base(runs), folder)
    assert validation_loss(run, model) == pytest.approx(logged_loss(run), rel=RELATIVE)
    found, own = load_file(folder / "adapter_model.safetensors"), get_peft_model_state_dict(model)
    assert {name: list(t.shape) for name, t in found.items()} == {name: list(t.shape) for name, t in own.items()}
    assert list(found["base_model.model.lm_head.weight"].shape) == [256, 48]
    assert not torch.equal(found["base_model.model.lm_head.weight"], loaded(base(runs)).lm_head.weight)
    described = json.loads((folder / "adapter_config.json").read_text())
    assert (described["base_model_name_or_path"], described["peft_type"]) == (str(base(runs)), "LORA")
    assert validation_loss(run, loaded(base(runs))) > 1.01 * logged_loss(run)


def test_layers_that_store_their_weights_transposed_merge_as_peft_merges_them(
    engines: Engines, runs: Runs, tmp_path: Path
) -> None:
    """GPT-2's layers; two of them are square, so that a wrong orientation has the right shape."""
    fields = {"vocab_size": 256, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    folder = weights(runs.folder / "lora-gpt2", "gpt2", **fields)
    options = ("peft=lora", "peft.target=[all-linear]", "zero=stage3", "run.steps=5", "eval.samples=2", "eval.every=0")
    begin = [option for option in GPT2 if not option.startswith("model")]
    plan = planned(*request("model=hf", f"model.init_from={folder}", *options, base=begin))
    run = tmp_path / "run"
    engines.run_recipe(plan, run)
    write_json(RunDir(run).plan, plan.to_json())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(export, "PART_ELEMENTS", 100)  # three rows at once
        merged = loaded(exported(run, "merged", tmp_path / "merged")).state_dict()
    expected = with_adapter(folder, exported(run, "adapter", tmp_path / "adapter")).merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(merged[name], tensor, rtol=1e-6, atol=1e-7), name  # sums of 16 products
    layer = "transformer.h.0.attn.c_proj.weight"
    assert not torch.equal(merged[layer], loaded(folder).state_dict()[layer])


def test_embeddings_that_are_saved_are_in_both_exports(engines: Engines, runs: Runs, tmp_path: Path) -> None:
    run = trained(engines, runs, (2, "stage3", "none"), "peft.modules_to_save=[embed_tokens]", "peft.target=[q_proj]")
    alone = load_file(exported(run, "adapter", tmp_path / "adapter") / "adapter_model.safetensors")
    saved = alone["base_model.model.model.embed_tokens.weight"]
    merged = load_file(exported(run, "merged", tmp_path / "merged") / "model.safetensors")
    assert torch.equal(merged["model.embed_tokens.weight"], saved)
    assert not torch.equal(saved, loaded(base(runs)).model.embed_tokens.weight)
    model = with_adapter(base(runs), tmp_path / ".adapter.exporting")
    assert validation_loss(run, model) == pytest.approx(logged_loss(run), rel=RELATIVE)


def test_in_16_bit_the_adapter_is_merged_in_fp32_and_then_rounded_once(
    engines: Engines, runs: Runs, tmp_path: Path
) -> None:
    run = trained(engines, runs, (2, "stage3", "none"), "precision=bf16", "peft.modules_to_save=[]")
    entries = {entry.name: entry.read().float() for entry in open_checkpoint(step(run, 20))}
    layer = "model.layers.1.mlp.down_proj"
    a, b = (entries[f"base_model.model.{layer}.lora_{matrix}.default.weight"] for matrix in "AB")
    expected = entries[f"base_model.model.{layer}.base_layer.weight"] + 12 / 4 * (b @ a)
    for dtype, cast in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        found = load_file(exported(run, "merged", tmp_path / dtype, dtype=dtype) / "model.safetensors")
        assert torch.equal(found[f"{layer}.weight"], expected.to(cast)), dtype


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("peft.target=[q_proj,w_proj]", ("w_proj", "no module of this model has such a name")),
        ("peft.target=[embed_tokens]", ("model.embed_tokens", "only linear layers are adapted")),
        ("peft.modules_to_save=[head]", ("head", "no module of this model has such a name")),
        ("peft.modules_to_save=[lm_head]", ("lm_head", "its weights are tied to another module's")),
        ("peft.target=[lm_head]", ("lm_head", "its weights are tied to another module's")),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name(option: str, named: tuple[str, ...]) -> None:
    """PEFT leaves out in silence whatever it does not find beside something it does."""
    plan = planned("peft=lora", option)  # of model=tiny, whose embeddings are tied
    with refuses(option.partition("=")[0], *named):
        adapted(plan, from_config(plan))


def test_a_norm_that_is_saved_is_the_one_of_that_name() -> None:
    """PEFT compares ends of names without the dot: input_layernorm would be saved with norm."""
    plan = planned("peft=lora", "peft.modules_to_save=[norm]")
    parameters = adapted(plan, from_config(plan)).named_parameters()
    saved = [name for name, parameter in parameters if parameter.requires_grad and ".lora_" not in name]
    assert saved == ["base_model.model.model.norm.modules_to_save.default.weight"]


def test_without_the_package_nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    [problem] = refused("peft=lora")
    assert problem.where == "peft" and "pip install -e '.[lora]'" in problem.fix
    assert planned("peft=none")


def test_the_command_line_exports_both_forms_and_reloads_them(runs: Runs, tmp_path: Path) -> None:
    """The adapter's reload puts it into the folder the run began with, in a process that never saw the checkpoint."""
    run = tmp_path / "run"
    options = ("model=hf", f"model.init_from={base(runs)}", *TRAINING, "zero=stage3", "run.steps=3")
    done = launch(*options, "cluster.num_procs=2", "cluster.accelerator=cpu", f"run.dir={run}")
    assert done.returncode == 0, done.stderr
    for form in ("merged", "adapter"):
        target = tmp_path / form
        done = launch("recipe=export", f"run.dir={run}", f"export.lora={form}", f"export.dir={target}")
        assert done.returncode == 0, done.stderr
        answer = json.loads((target / "export.json").read_text())
        assert answer["verified"]["tensors"] is True
        assert answer["verified"]["loss"] == pytest.approx(answer["fixed_batch_loss"], rel=RELATIVE)
    assert validation_loss(run, with_adapter(base(runs), tmp_path / "adapter")) == pytest.approx(
        logged_loss(run), rel=RELATIVE
    )


def test_a_run_without_an_adapter_has_none_to_export() -> None:
    with pytest.raises(UserError, match="not one of a run with peft=lora"):
        adapter_export.exported(Checkpoint((), {}, 3), None, "adapter")


@pytest.mark.parametrize("target", ["[q_proj]", "[all-linear]", "[k_proj,o_proj,down_proj]"])
def test_the_plan_counts_the_adapters_parameters(target: str) -> None:
    model = ("model=llama_125m", "model.config.num_hidden_layers=2", "model.config.num_key_value_heads=3")
    untied = ("model.config.tie_word_embeddings=false", "peft.modules_to_save=[lm_head,norm]")
    plan = planned("peft=lora", f"peft.target={target}", *model, *untied)
    section, config = plan.config.peft, plan.config.model.config
    with torch.device("meta"):
        trained = sum(p.numel() for p in adapted(plan, from_config(plan)).parameters() if p.requires_grad)
    assert count_adapter(config, section.rank or 0, section.target, section.modules_to_save) == trained
    assert count_adapter(config, 4, ["w_proj"], []) is None
    assert count_adapter({"model_type": "gpt2"}, 4, ["c_attn"], []) is None


@pytest.mark.parametrize("zero", ["stage0", "stage2", "stage3"])
def test_a_checkpoint_is_as_large_as_the_plan_predicts(engines: Engines, runs: Runs, zero: str) -> None:
    """Room for it is asked for before a run starts: moments and masters for the base would double it."""
    run = trained(engines, runs, (2, zero, "none"))
    found = sum(path.stat().st_size for path in step(run, 10).glob("*.pt"))
    predicted = plan_of(runs, (2, zero, "none")).estimate.checkpoint_bytes or 0
    headers = 100_000  # names, shapes and zip entries, of which a small model has as many as a large one
    assert abs(found - predicted) < headers, (found, predicted)
