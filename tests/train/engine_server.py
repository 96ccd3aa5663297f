"""Answers "does DeepSpeed's engine take this plan?": imports torch once, then forks the ranks of each case.

Started by the fixture `engines` of conftest.py; one JSON object a line in and out. A rank lives for one case: a stage-3
engine is never freed, and process groups are global.
Must never build an engine, or start a thread, in the process that forks.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import json
import operator
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

sys.path[0] = str(Path(__file__).resolve().parents[2])
os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", MASTER_ADDR="127.0.0.1")
# Ranks meet in a file. DeepSpeed names the memory that they share after this: servers beside each other must differ.
os.environ["MASTER_PORT"] = str(os.getpid())
os.environ["PATH"] = (
    f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # ninja lies beside the interpreter
)

from launcher.env import extensions_dir  # noqa: E402

os.environ["TORCH_EXTENSIONS_DIR"] = str(extensions_dir())  # where setup compiled them: torch's own folder has none

import deepspeed  # noqa: E402 - DeepSpeed reads the environment when it is imported
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402 - every engine imports it, and the compiler: seconds
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers.models.gpt2.modeling_gpt2  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402, F401 - transformers imports a family at its first use
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.ops.op_builder.all_ops import ALL_OPS  # noqa: E402

from launcher.plan import Plan  # noqa: E402
from launcher.rundir import RunDir, drop_shared_memory  # noqa: E402
from recipes import finetune, pretrain  # noqa: E402
from recipes.shared import distributed, gather  # noqa: E402
from recipes.shared.checkpoint import load, save  # noqa: E402
from recipes.shared.effective import differences, read_back  # noqa: E402
from recipes.shared.engine import build_engine  # noqa: E402
from recipes.shared.model import build_model  # noqa: E402
from recipes.shared.startup import remember_cpu  # noqa: E402

PEER_GRACE_S = 1.0  # what the other ranks get to fail themselves after the first one has


def main() -> None:
    """Serves until stdin ends."""
    answer_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print on stdout; answers must be alone there
    torch.set_num_threads(1)
    fp16 = get_accelerator().is_fp16_supported() is True
    answer_to.write(json.dumps({"operators": load_operators(), "fp16": fp16}) + "\n")
    answer_to.flush()
    gc.freeze()  # DeepSpeed collects at stage 3: a rank would visit, and so copy, all of what it inherits
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            answer_to.write(json.dumps(run_case(json.loads(line), Path(folder))) + "\n")
        answer_to.flush()
    drop_shared_memory(os.environ["MASTER_PORT"])


def load_operators() -> list[str]:
    """Loads every operator that is compiled, and compiles none; ranks inherit them. Returns their names."""
    remember_cpu(extensions_dir())
    assert deepspeed.ops.__compatible_ops__  # asks the compiler now, where every rank would ask again
    script = Path(__file__).resolve().parents[2] / "scripts" / "build_ops.py"
    ready = subprocess.run([sys.executable, str(script), "--ready"], stdout=subprocess.PIPE, text=True, check=True)
    names, loaded = ready.stdout.split(), []
    for builder in ALL_OPS.values():
        if builder.name in names:
            builder.load(verbose=False)
            loaded.append(builder.name)
    return loaded


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Forks the ranks of `case` and collects them: rank 0's facts, or the error of the rank that failed first."""
    started = time.monotonic()
    pipes, pids = [], []
    for rank in range(case["world_size"]):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _be_rank(case, folder, rank, write)
        os.close(write)
        pipes.append(read)
        pids.append(pid)
    answers = _collect(pipes, pids, started + case["timeout_s"])
    failures = [answer for answer in answers if "error" in answer]
    answer = min(failures, key=lambda failure: failure["time"]) if failures else answers[0]
    answer["seconds"] = time.monotonic() - started
    if failures:
        answer["log"] = (folder / f"rank{answer['rank']}.log").read_text(errors="replace")[-4000:]
    return answer


def _collect(pipes: list[int], pids: list[int], deadline: float) -> list[dict[str, Any]]:
    """One answer per rank; ranks that outlive `deadline`, or a failed peer by PEER_GRACE_S, are killed."""
    texts: dict[int, bytes] = dict.fromkeys(pipes, b"")
    waiting, answers = set(pipes), {}
    while waiting and time.monotonic() < deadline:
        for pipe in select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))[0]:
            part = os.read(pipe, 65536)
            texts[pipe] += part
            if not part:
                waiting.discard(pipe)
                rank = pipes.index(pipe)
                answers[rank] = json.loads(texts[pipe]) if texts[pipe] else _failure(rank, "died without an answer")
                if "error" in answers[rank]:
                    deadline = min(deadline, time.monotonic() + PEER_GRACE_S)
    for pipe in waiting:
        answers[pipes.index(pipe)] = _failure(pipes.index(pipe), "no answer in time")
        os.kill(pids[pipes.index(pipe)], signal.SIGKILL)
    for pipe, pid in zip(pipes, pids, strict=True):
        os.close(pipe)
        os.waitpid(pid, 0)
    return [answers[rank] for rank in range(len(pipes))]


def _failure(rank: int, text: str) -> dict[str, Any]:
    return {"rank": rank, "error": text, "time": time.time()}


# --- in a rank -------------------------------------------------------------------------------------------------------


def _be_rank(case: dict[str, Any], folder: Path, rank: int, write: int) -> NoReturn:
    """Everything a rank does; leaves without running what the parent registered to run at exit."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        _join(case, folder, rank)
        answer = _called(case)
    except BaseException as error:
        traceback.print_exc()
        answer = _failure(rank, f"{type(error).__name__}: {str(error).strip()[:2000]}")
    with os.fdopen(write, "w") as pipe:
        pipe.write(json.dumps(answer))
    sys.stderr.flush()
    os._exit(0)


def _join(case: dict[str, Any], folder: Path, rank: int) -> None:
    """What DeepSpeed's launcher would have told this rank, and its process group."""
    world_size, slots = case["world_size"], case["slots"]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % slots), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(slots))
    dist.init_process_group("gloo", f"file://{folder}/store", world_size=world_size, rank=rank)


def _called(case: dict[str, Any]) -> dict[str, Any]:
    """What the function `module:name` that the case names makes of it."""
    module, name = case["call"].split(":")
    return dict(getattr(importlib.import_module(module), name)(case))


def run_recipe(case: dict[str, Any]) -> dict[str, Any]:
    """The recipe of a plan as a worker runs it; what it restores it also saves, unchanged, to `resaved`."""

    def restore(state: Any) -> None:
        load.restore(state)
        if case["resaved"]:
            save.save(dataclasses.replace(state, run=RunDir(case["resaved"])), {})

    plan = Plan.from_json(case["plan"])
    recipe: Any = {"pretrain": pretrain, "finetune": finetune}[plan.config.recipe.name]
    recipe.restore = restore
    if case["unchecked_room"]:
        save.refuse_without_room = lambda *arguments: None
    recipe.run(plan, RunDir(case["run_dir"]))
    return {}


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Builds model and engine as a recipe does and takes `steps` steps on one batch, which it learns by heart."""
    plan = Plan.from_json(case["plan"])
    world_size = plan.world_size
    ranks = distributed.initialise(plan)
    engine = build_engine(plan, build_model(plan, ranks))
    effective = read_back(engine)
    if case["load"]:
        engine.load_checkpoint(case["load"])
    facts: dict[str, Any] = {"losses": [], "grad_norms": [], "lrs": [], "weights": [_weights(engine)]}
    generator = torch.Generator().manual_seed(ranks.rank)
    shape = (plan.batch.gradient_accumulation_steps, plan.batch.micro_batch_size, plan.config.train.sequence_length)
    batch = torch.randint(0, plan.config.model.config["vocab_size"], shape, generator=generator)
    for _ in range(case["steps"]):
        facts["lrs"].append(engine.optimizer.param_groups[0]["lr"])
        loss = torch.zeros(())
        for tokens in batch:
            part = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(part)
            engine.step()
            loss += part.detach() / len(batch)
        dist.all_reduce(loss)
        norm = engine.get_global_grad_norm()
        facts["losses"].append(loss.item() / world_size)
        facts["grad_norms"].append(None if norm is None else float(norm))
        facts["weights"].append(_weights(engine))
    if case["save"]:
        engine.save_checkpoint(case["save"])
    facts["asked"] = {path: _asked(engine, path) for path in case["ask"]}
    ignored = [problem.where for problem in differences(plan, effective)]
    return facts | {"effective": effective, "ignored": ignored}


def _weights(engine: Any) -> float:
    """Norm of all weights together. All ranks."""
    return float(torch.tensor(list(gather.norms(engine.module).values()), dtype=torch.float64).norm())


def _asked(engine: Any, path: str) -> Any:
    """Value of the engine's attribute `path`, called when it is a method; "absent" where there is none."""
    try:
        value = operator.attrgetter(path)(engine)
    except AttributeError:
        return "absent"
    value = value() if callable(value) and not isinstance(value, type) else value
    return value if isinstance(value, bool | int | float | str | None) else str(value)


if __name__ == "__main__":
    main()
