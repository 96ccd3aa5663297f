"""Fine-tuning on conversations: what is learned, in whatever layout; adapters that hold something; answers in ranks.

Run by pytest: the recipe as its workers run it, in ranks that the engine server forks, and one launch from end to end.
Must never take our own word for what was written: PEFT and Hugging Face load it in a process of their own.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from torch.nn import functional

from launcher import run as launcher_run
from launcher.plan import Plan
from launcher.resume import changed_options
from launcher.rundir import RunDir, write_json
from recipes.shared.adapter import trained_targets
from recipes.shared.apart import refuse_mixed, refuse_others
from recipes.shared.checkpoint.reader import open_checkpoint
from recipes.shared.data.build import prepare
from recipes.shared.data.corpus import open_conversations
from recipes.shared.data.layouts import IGNORED
from recipes.shared.losses import CausalLM
from recipes.shared.model import from_config
from tests.plan.asking import planned, refuses
from tests.plan.chats import MARKED, WORDS, conversation, word_tokenizer, written
from tests.train.engines import Engines
from tests.train.running import ROOT, Runs, launch, losses
from tests.train.test_lora import exported, loaded, logged_loss, step, weights

RELATIVE = 1e-5  # of a loss in fp32: the same sums in another order
LENGTH = 32
MODEL: dict[str, Any] = {"vocab_size": len(WORDS), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
TARGETS = ["q_proj", "v_proj", "down_proj"]
LORA = ("peft=lora", "peft.rank=2", f"peft.target=[{','.join(TARGETS)}]", "deepspeed.optimizer.params.lr=0.01")
Layout = tuple[int, str, int]  # ranks, zero, micro-batch; the rest of the global batch of 6 is accumulated


def talks(count: int, seed: int) -> list[dict[str, Any]]:
    """Conversations of one to three turns, of different lengths; the answer repeats what was asked."""
    drawn = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        turns = []
        for _ in range(int(drawn.integers(1, 4))):
            asked = " ".join(f"w{number}" for number in drawn.integers(0, 90, int(drawn.integers(1, 4))))
            turns += [asked, asked]
        made.append(conversation(*turns))
    return made


def given(runs: Runs) -> Path:
    """A folder with weights and a tokenizer in `base`, train.jsonl and heldout.jsonl."""
    folder = runs.folder / "finetune"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            weights(folder / "base", "llama", tie_word_embeddings=False, **MODEL, **HEADS)
            word_tokenizer(folder / "base")
            written(folder / "train.jsonl", *talks(60, 1))
            written(folder / "heldout.jsonl", *talks(12, 2))
    return folder


def asked(runs: Runs, layout: Layout, *options: str) -> tuple[str, ...]:
    """A short run over the words in `layout`."""
    folder, (ranks, zero, micro) = given(runs), layout
    return (
        *("recipe=finetune", "data=chat", "model=hf", f"model.init_from={folder / 'base'}"),
        *(f"data.files=[{folder}/train.jsonl]", f"data.validation_files=[{folder}/heldout.jsonl]"),
        *(f"data.tokenizer={folder / 'base'}", f"data.cache_dir={runs.folder / 'cache'}"),
        *(f"cluster.num_procs={ranks}", f"zero={zero}", f"train.micro_batch_size={micro}"),
        *("train.global_batch_size=6", f"train.sequence_length={LENGTH}", "schedule=constant"),
        *("run.steps=4", "eval.every=0", "eval.samples=5", "checkpoint.every=2", "checkpoint.keep=0"),
        *options,
    )


def plan_of(runs: Runs, layout: Layout, *options: str) -> Plan:
    """The plan of `asked`; of an option that comes twice the last counts."""
    options = asked(runs, layout, *options)
    return planned(*{option.partition("=")[0]: option for option in options}.values())


def trained(engines: Engines, runs: Runs, layout: Layout, *options: str) -> Path:
    """A finished run of `plan_of`; shared by the tests of a session."""
    run = runs.folder / "-".join(map(str, ("chat", *layout, *options)))
    with FileLock(f"{run}.lock"):
        if not (run / "control" / "result.json").exists():
            plan = plan_of(runs, layout, *options)
            engines.run_recipe(plan, run)
            write_json(RunDir(run).plan, plan.to_json())
    return run


def samples(plan: Plan) -> tuple[Any, Any]:
    """(training, validation) of a plan's data."""
    data, length = plan.config.data, plan.config.train.sequence_length
    return open_conversations(prepare(data, length, Path(data["cache_dir"])), length, data["packing"])[1:]


def tensors(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def plain_loss(model: Any, conversations: Any) -> float:
    """Mean over all response tokens of all conversations, each alone in a batch without mask or positions."""
    total = count = 0.0
    for number in range(len(conversations)):
        tokens, responses = (torch.from_numpy(part) for part in conversations.read(number))
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0, :-1]
        learned = responses[1:]
        total += float(functional.cross_entropy(logits[learned], tokens[1:][learned], reduction="sum").double())
        count += int(learned.sum())
    return total / count


# --- packs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_a_conversation_in_a_pack_has_the_loss_it_has_alone(runs: Runs, kernel: str) -> None:
    plan = plan_of(runs, (1, "stage0", 2), f"model.attn_implementation={kernel}")
    packed, _ = samples(plan)
    torch.manual_seed(3)
    model, several = from_config(plan), 0
    for pack in range(len(packed)):
        batch = tensors(packed.batch(np.array([pack, (pack + 1) % len(packed)])))
        start = 0
        for member in packed.members[packed.bounds[pack] : packed.bounds[pack + 1]]:
            tokens, responses = (torch.from_numpy(part) for part in packed.conversations.read(int(member)))
            alone = {"input_ids": tokens[None], "labels": torch.where(responses, tokens, IGNORED)[None]}
            only = torch.full_like(batch["labels"], IGNORED)
            only[0, start : start + len(tokens)] = batch["labels"][0, start : start + len(tokens)]
            with torch.no_grad():
                found = CausalLM().sample_losses(model, batch | {"labels": only})[0]
                expected = CausalLM().sample_losses(model, alone)[0]
            assert float(found) == pytest.approx(float(expected), rel=1e-6)
            several += start > 0
            start += len(tokens)
    assert several > 10


def test_a_model_that_mixes_packs_is_refused_before_it_trains(runs: Runs) -> None:
    plan = plan_of(runs, (1, "stage0", 2))
    training, model = samples(plan)[0], from_config(plan)

    class Engine:
        def __init__(self, positions: bool) -> None:
            self.module, self.positions = model, positions
            self.train, self.eval = model.train, model.eval

        def __call__(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> Any:
            return model(input_ids=input_ids, position_ids=position_ids if self.positions else None)

    def state(positions: bool) -> Any:
        return SimpleNamespace(engine=Engine(positions), plan=plan, ranks=SimpleNamespace(device="cpu"))

    refuse_mixed(state(True), training)
    with refuses("data.packing", "LlamaForCausalLM", "does not tell them apart", "use data.packing=false"):
        refuse_mixed(state(False), training)
    refuse_mixed(state(False), samples(plan_of(runs, (1, "stage0", 2), "data.packing=false"))[0])


def test_a_model_that_does_not_continue_a_text_is_refused(runs: Runs) -> None:
    plan = plan_of(runs, (1, "stage0", 2))

    def changed(**fields: Any) -> Plan:
        model = dataclasses.replace(plan.config.model, **fields)
        return dataclasses.replace(plan, config=dataclasses.replace(plan.config, model=model))

    refuse_others(plan)
    with refuses("t5", "it reads its input with an encoder"):
        refuse_others(changed(config={"model_type": "t5"}))
    with refuses("model.target", "my.Module", "use recipe=custom"):
        refuse_others(changed(target="my.Module"))


# --- one loss, whatever the layout -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("packing", "layout"), [("true", (2, "stage2", 3)), ("true", (2, "stage3", 1)), ("false", (2, "stage3", 1))]
)
def test_a_step_is_the_mean_over_its_response_tokens_for_any_ranks_and_accumulation(
    engines: Engines, runs: Runs, packing: str, layout: Layout
) -> None:
    """And an evaluation that over all held-out ones: five conversations for two ranks leave one with less to do."""
    one = trained(engines, runs, (1, "stage0", 6), f"data.packing={packing}")
    found = trained(engines, runs, layout, f"data.packing={packing}")
    assert len(losses(one)) == 4 and losses(one)[-1] < losses(one)[0]
    assert losses(found) == pytest.approx(losses(one), rel=RELATIVE)
    assert logged_loss(found) == pytest.approx(logged_loss(one), rel=RELATIVE)


def test_the_first_step_is_what_plain_pytorch_computes_on_those_conversations(engines: Engines, runs: Runs) -> None:
    """A step that holds every conversation of the corpus; the reference sees each of them alone."""
    options = ("run.steps=1", "data.packing=false", "train.global_batch_size=60")
    run = trained(engines, runs, (2, "stage3", 5), *options)
    training, _ = samples(plan_of(runs, (2, "stage3", 5), *options))
    expected = plain_loss(loaded(given(runs) / "base"), training.conversations)
    assert len(training) == 60
    assert losses(run)[0] == pytest.approx(expected, rel=RELATIVE)


# --- runs that go on -------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_same_run_and_refuses_other_data(engines: Engines, runs: Runs, tmp_path: Path) -> None:
    layout = (2, "stage3", 1)
    whole = trained(engines, runs, layout, "data.packing=true")
    plan = dataclasses.replace(plan_of(runs, layout, "data.packing=true"), resume_from=str(step(whole, 2)))
    engines.run_recipe(plan, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(whole)[2:]
    other = written(tmp_path / "other.jsonl", *talks(60, 5))
    config = dataclasses.replace(plan.config, data=plan.config.data | {"files": [other]})
    assert [problem.where for problem in changed_options(plan.config, config)] == ["data.files"]
    with pytest.raises(AssertionError, match="its files hold other samples now"):  # changed under the same name
        engines.run_recipe(dataclasses.replace(plan, config=config), tmp_path / "changed")


def test_a_model_with_a_smaller_vocabulary_than_the_tokenizers_is_refused_before_the_launch(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = MODEL | HEADS | {"vocab_size": len(WORDS) - 1}
    weights(tmp_path / "small", "llama", **small)
    plan = plan_of(runs, (1, "stage0", 1), f"model.init_from={tmp_path / 'small'}")
    with refuses("model.config.vocab_size", str(len(WORDS) - 1), f"the tokenizer in {given(runs) / 'base'}"):
        launcher_run._prepare_data(plan)
    said = capsys.readouterr().err
    assert "60 conversations to train on: 0 cut to 32 tokens, 0 left out" in said and "packed into" in said


# --- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ["none", "full"])
@pytest.mark.parametrize("zero", ["stage2", "stage3"])
def test_every_target_of_an_adapter_is_trained(engines: Engines, runs: Runs, zero: str, activation: str) -> None:
    """huggingface/peft#1402, huggingface/transformers#47254: also where frozen layers are computed a second time."""
    run = trained(engines, runs, (2, zero, 3), *LORA, f"activation={activation}")
    entries = {entry.name: entry.read() for entry in open_checkpoint(step(run, 4)) if ".lora_B." in entry.name}
    assert {name.split(".lora_B.")[0].rpartition(".")[2] for name in entries} == set(TARGETS)
    assert len(entries) == len(TARGETS) and all(bool(tensor.any()) for tensor in entries.values())
    assert json.loads((run / "control" / "result.json").read_text())["adapter"] == {"targets": len(TARGETS)}
    other = trained(engines, runs, (2, "stage2", 3), *LORA, "activation=none")
    assert losses(run) == pytest.approx(losses(other), rel=RELATIVE)


def test_an_adapter_that_holds_nothing_fails_the_run_by_name(engines: Engines, runs: Runs) -> None:
    """huggingface/peft#1402: a run whose B matrices never moved, as a learning rate of 0 leaves them."""
    still = ("run.steps=1", "deepspeed.optimizer.params.lr=0.0")
    run = trained(engines, runs, (2, "stage3", 3), *LORA[:-1], *still)
    assert json.loads((run / "control" / "result.json").read_text())["adapter"] == {"targets": len(TARGETS)}
    targets = [entry.name.split(".lora_B.")[0] for entry in open_checkpoint(step(run, 1)) if ".lora_B." in entry.name]
    tuner = SimpleNamespace(targeted_module_names=[name.removeprefix("base_model.model.") for name in targets])
    module = SimpleNamespace(peft_config={}, base_model=tuner)
    engine, ranks = SimpleNamespace(module=module), SimpleNamespace(is_main=True)
    state: Any = SimpleNamespace(engine=engine, ranks=ranks, run=RunDir(run), saved_step=1)
    with refuses("peft.target", "model.layers.0.self_attn.q_proj", "3 of 3", "is still zero"):
        trained_targets(state, moved=True)


def test_both_exports_have_the_logged_loss_in_a_process_of_hugging_faces_alone(
    engines: Engines, runs: Runs, tmp_path: Path
) -> None:
    run = trained(engines, runs, (2, "stage3", 3), *LORA, "activation=none")
    _, validation = samples(plan_of(runs, (2, "stage3", 3), *LORA))
    np.savez(tmp_path / "arrays.npz", **validation.batch(np.arange(5)))

    def plain(folder: Path, adapter: Path | str) -> float:
        script = Path(__file__).with_name("plain_chat_loss.py")
        command = [sys.executable, str(script), str(folder), str(adapter), str(tmp_path / "arrays.npz")]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    base, expected = given(runs) / "base", logged_loss(run)
    adapter, merged = exported(run, "adapter", tmp_path / "adapter"), exported(run, "merged", tmp_path / "merged")
    assert plain(base, adapter) == pytest.approx(expected, rel=RELATIVE)
    assert plain(merged, "-") == pytest.approx(expected, rel=RELATIVE)
    assert not math.isclose(plain(base, "-"), expected, rel_tol=1e-3)
    for folder in (adapter, merged):
        assert (folder / "chat_template.jinja").read_text() == (base / "chat_template.jinja").read_text()
        assert (folder / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


def test_an_export_has_the_template_that_the_run_was_trained_with(engines: Engines, runs: Runs, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    template = tmp_path / "own.jinja"
    template.write_text(MARKED)
    run, options = tmp_path / "run", ("run.steps=1", f"data.chat_template={template}")
    plan = plan_of(runs, (1, "stage0", 3), *options)
    engines.run_recipe(plan, run)
    write_json(RunDir(run).plan, plan.to_json())
    folder = exported(run, "merged", tmp_path / "export")
    assert AutoTokenizer.from_pretrained(folder, local_files_only=True).chat_template == MARKED


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "zero"), [(2, "stage3"), (4, "stage3"), (2, "stage0")])
def test_ranks_that_stop_at_different_lengths_give_the_answers_of_one_process(
    engines: Engines, runs: Runs, ranks: int, zero: str
) -> None:
    """deepspeedai/DeepSpeed#8262: three prompts, so that one rank of two has one less, and one of four has none."""
    prompts = [[3, 9, 2, 4], [3, 20, 21, 22, 2, 4], [5, 1]]
    case = {"prompts": prompts, "new": 7, "rows": 1, "positions": 64}
    plan = plan_of(runs, (1, "stage0", 6))
    free = engines.call("tests.train.chat_ranks:answer", 1, plan=plan.to_json(), ends=[[]], **case)["answers"][0]
    assert [len(answer) for answer in free] == [7, 7, 7]
    ends = [[], [free[0][1]], [free[1][2], free[2][4]], free[0]]
    expected = engines.call("tests.train.chat_ranks:answer", 1, plan=plan.to_json(), ends=ends, **case)
    for end, answers in zip(ends, expected["answers"], strict=True):
        stops = [next((at for at, token in enumerate(answer) if token in end), 6) + 1 for answer in free]
        assert answers == [answer[:stop] for answer, stop in zip(free, stops, strict=True)]
    assert len({len(answer) for answers in expected["answers"] for answer in answers}) > 2
    plan = plan_of(runs, (ranks, zero, 1), "train.global_batch_size=4")
    found = engines.call("tests.train.chat_ranks:answer", ranks, plan=plan.to_json(), ends=ends, **case)
    assert "error" not in found, found
    assert found["answers"] == expected["answers"]
    assert len(set(found["forwards"])) == 1 and found["training"] is True
    case |= {"positions": 8, "ends": [[]]}  # of a model with no more: the second prompt has room for two tokens
    found = engines.call("tests.train.chat_ranks:answer", ranks, plan=plan.to_json(), **case)
    assert found["answers"][0] == [free[0][:4], free[1][:2], free[2][:6]]


def test_evaluations_write_answers_to_held_out_prompts(engines: Engines, runs: Runs, tmp_path: Path) -> None:
    options = ("eval.generate=3", "eval.max_new_tokens=4", "eval.every=2")
    engines.run_recipe(plan_of(runs, (2, "stage3", 1), *options), tmp_path / "run")
    found = [json.loads(line) for line in (tmp_path / "run" / "generations.jsonl").read_text().splitlines()]
    assert [(record["step"], record["sample"]) for record in found] == [(s, n) for s in (2, 4) for n in range(3)]
    first = talks(12, 2)[0]["messages"]
    assert found[0]["prompt"] == f"user: {first[0]['content']} <end> assistant:"
    assert found[0]["response"] == f"{first[1]['content']} <end>"
    assert all(1 <= len(record["ids"]) <= 4 for record in found)


# --- from end to end -------------------------------------------------------------------------------------------------


def test_a_pretrained_model_learns_to_answer_and_its_export_has_its_loss(runs: Runs, tmp_path: Path) -> None:
    """The base is trained on raw text by our own recipe; no held-out name occurs in a conversation it is tuned on."""
    sys.path.insert(0, str(ROOT / "scripts"))
    import tiny_chat

    tiny, base, run = tmp_path / "tiny", tmp_path / "base", tmp_path / "run"
    tiny_chat.make(tiny)
    here = ("cluster.num_procs=2", "cluster.accelerator=cpu", "train.sequence_length=128", "eval.every=0")
    done = launch(
        *("model=hf", f"model.init_from={tiny}/base", "data=text", f"data.files=[{tiny}/text.txt]"),
        *(f"data.tokenizer={tiny}/base", "run.steps=40", f"run.dir={base}", "deepspeed.optimizer.params.lr=0.003"),
        *("train.micro_batch_size=4", "train.gradient_accumulation_steps=1", *here),
    )
    assert done.returncode == 0, done.stderr
    chat = (
        *("recipe=finetune", "data=chat", f"data.files=[{tiny}/train.jsonl]", f"data.tokenizer={tiny}/base"),
        *(f"data.validation_files=[{tiny}/heldout.jsonl]", "model=hf", f"model.init_from={base}", *here),
        *("train.micro_batch_size=4", "train.gradient_accumulation_steps=1", "eval.samples=100", "zero=stage3"),
    )
    before = held_out_loss(planned(*chat), base)
    done = launch(*chat, "run.steps=150", "deepspeed.optimizer.params.lr=0.003", "eval.generate=2", f"run.dir={run}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert logged_loss(run) < 0.7 * before
    summary = json.loads((run / "summary.json").read_text())
    assert summary["data"]["conversations"] > 3000 and summary["data"]["dropped"] == 0
    assert len((run / "generations.jsonl").read_text().splitlines()) == 2
    done = launch("recipe=export", f"run.dir={run}")
    assert done.returncode == 0, done.stderr
    answer = json.loads((run / "export" / "export.json").read_text())
    assert answer["verified"]["loss"] == pytest.approx(answer["fixed_batch_loss"], rel=RELATIVE)
    assert (run / "export" / "chat_template.jinja").read_text() == tiny_chat.TEMPLATE
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (run / "export", tiny / "base"))
    assert ours.keys() == theirs.keys()


def held_out_loss(plan: Plan, base: Path) -> float:
    """Response loss of the pretrained weights over the samples that the run will evaluate."""
    model = from_config(plan)
    found = {entry.name: entry.read() for entry in open_checkpoint(RunDir(base).checkpoint(40))}
    model.load_state_dict(found, strict=False)
    assert found.keys() == dict(model.named_parameters()).keys()
    batch = tensors(samples(plan)[1].batch(np.arange(plan.config.eval.samples)))
    with torch.no_grad():
        return float(model.eval()(**batch).loss)
