"""An exported run loads with Hugging Face alone and has the loss that the run logged."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from recipes.shared.checkpoint.reader import open_checkpoint
from tests.train.running import ROOT, Runs, launch, records
from tests.train.test_parity import overrides

CLEAN_PROCESS = """
import json, sys
sys.path.insert(0, {root!r})
from pathlib import Path
import numpy as np, torch
from transformers import AutoModelForCausalLM
from launcher.plan import read_plan
from recipes.shared.data.build import prepare
from recipes.shared.data.corpus import open_corpus
run, folder = Path(sys.argv[1]), sys.argv[2]
config = read_plan(run / "plan.json").config
data = prepare(config.data, config.train.sequence_length, Path(config.data["cache_dir"]))
validation = open_corpus(data, config.train.sequence_length)[2]
tokens = torch.from_numpy(validation.tokens(np.arange(config.eval.samples)))
model = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    loss = model.float()(input_ids=tokens, labels=tokens).loss.item()
tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
print(json.dumps({{"loss": loss, "tied": tied, "deepspeed": "deepspeed" in sys.modules}}))
"""


def reload(run: Path, folder: Path) -> dict[str, object]:
    """Validation loss of an exported folder in a clean process without DeepSpeed."""
    done = subprocess.run(
        [sys.executable, "-c", CLEAN_PROCESS.format(root=str(ROOT)), str(run), str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    ("tied", "zero", "offload"),
    [("true", "stage0", "none"), ("true", "stage2", "none"), ("true", "stage3", "cpu"), ("false", "stage3", "cpu_all")],
)
def test_export_reproduces_the_logged_validation_loss(
    runs: Runs, tmp_path: Path, tied: str, zero: str, offload: str
) -> None:
    """deepspeedai/DeepSpeed#8376: tied weights, stored once. huggingface/transformers#25817: no dummy at stage 3."""
    run, folder = runs.get(*overrides(tied, zero, offload)), tmp_path / "export"
    done = launch("recipe=export", f"run.dir={run}", f"export.dir={folder}")
    assert done.returncode == 0, done.stderr
    answer = reload(run, folder)
    assert answer["loss"] == pytest.approx(records(run)[-1]["eval_loss"], rel=1e-5)
    assert answer["tied"] is (tied == "true")
    assert answer["deepspeed"] is False


def test_bf16_export_is_the_rounded_masters_in_shards(runs: Runs, tmp_path: Path) -> None:
    run, folder = runs.get(*overrides("true", "stage2", "none")), tmp_path / "export"
    done = launch(
        "recipe=export", f"run.dir={run}", f"export.dir={folder}", "export.dtype=bf16", "export.max_shard_bytes=60000"
    )
    assert done.returncode == 0, done.stderr
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    masters = {entry.name: entry.read() for entry in open_checkpoint(run / "checkpoints" / "step_00000020")}
    assert index.keys() == masters.keys()
    for name, file in index.items():
        with safe_open(folder / file, "pt") as shard:
            assert torch.equal(shard.get_tensor(name), masters[name].to(torch.bfloat16)), name
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_equals_zero_to_fp32_bit_for_bit(runs: Runs) -> None:
    for zero in ("stage1", "stage2", "stage3"):
        run = runs.get(*overrides("true", zero, "none"))
        source, target = str(run / "checkpoints"), str(run / "theirs.pt")
        script = (
            "import torch; from deepspeed.utils import zero_to_fp32 as z;"
            f"theirs = z.get_fp32_state_dict_from_zero_checkpoint({source!r}, 'step_00000020');"
            f"torch.save(dict(theirs), {target!r})"
        )
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
        theirs = torch.load(run / "theirs.pt", weights_only=True)
        for entry in open_checkpoint(run / "checkpoints" / "step_00000020"):
            assert torch.equal(entry.read(), theirs[entry.name]), (zero, entry.name)


def test_export_never_replaces_a_folder(runs: Runs, tmp_path: Path) -> None:
    run, folder = runs.get(*overrides("true", "stage2", "none")), tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep me")
    done = launch("recipe=export", f"run.dir={run}", f"export.dir={folder}")
    assert done.returncode == 2
    assert "not empty" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_stage_is_read_however_python_writes_a_member_of_an_enum(runs: Runs, tmp_path: Path) -> None:
    """By its value, or, as Python 3.11.2 does, as getattr(ZeroStageEnum, its name): that is not looked up."""
    from deepspeed.runtime.zero.config import ZeroStageEnum

    class Named:
        def __reduce__(self) -> tuple[object, tuple[object, str]]:
            return getattr, (ZeroStageEnum, "gradients")

    source = runs.get(*overrides("true", "stage2", "none")) / "checkpoints" / "step_00000020"
    folder = tmp_path / source.name
    shutil.copytree(source, folder)
    for shard in folder.glob("*optim_states.pt"):
        content = torch.load(shard, weights_only=False)
        content["optimizer_state_dict"]["zero_stage"] = Named()
        torch.save(content, shard)
    found, expected = open_checkpoint(folder), open_checkpoint(source)
    assert found.stage == expected.stage == 2
    assert all(torch.equal(a.read(), b.read()) for a, b in zip(found, expected, strict=True))


def test_a_poisoned_checkpoint_is_refused_and_not_run(runs: Runs, tmp_path: Path) -> None:
    """Lightning-AI/pytorch-lightning#20643: what torch no longer unpickles by default is read, and nothing is run."""

    class Poison:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            import os

            return os.system, (f"touch {tmp_path / 'ran'}",)

    folder = tmp_path / "step_00000001"
    folder.mkdir()
    torch.save({"module": {}, "x": Poison()}, folder / "mp_rank_00_model_states.pt")
    from launcher.errors import UserError

    with pytest.raises(UserError, match="names code that no checkpoint"):
        open_checkpoint(folder)
    assert not (tmp_path / "ran").exists()
