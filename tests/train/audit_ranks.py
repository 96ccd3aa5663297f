"""Runs the jobs of tests/audit_corpus at stage 3 under the audit, one after the other in the same ranks.

Run in ranks that the engine server forks, by test_audit.py.
Must never let one job see what another left: an engine and an audit for each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import parameter_offload
from torch.nn.modules import module as hooks
from torch.optim import optimizer
from torch.overrides import TorchFunctionMode

from launcher.errors import UserError
from launcher.plan import Plan
from launcher.rundir import RunDir
from recipes import pretrain
from recipes.shared.audit.auditor import Audit
from recipes.shared.construct import ShardedConstruction
from recipes.shared.losses import CausalLM
from recipes.worker import _failure

STEPS = 2
PATIENCE_S = 5.0
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def corpus(case: dict[str, Any]) -> dict[str, Any]:
    """{job: what the audit found, and the error it ended with} for each of `case["jobs"]`."""
    answers = {}
    for job in case["jobs"]:
        with tempfile.TemporaryDirectory() as folder:
            answers[job] = run(job, Path(folder))
    return {"jobs": answers}


def strict(case: dict[str, Any]) -> dict[str, Any]:
    """What a job ends with when its first finding is raised, and whether the audit was gone by then."""
    with tempfile.TemporaryDirectory() as folder:
        answer = run(case["job"], Path(folder), strict=True)
    return {"ended": answer["error"], "installed": _installed()}


def recipe_with_a_trap(case: dict[str, Any]) -> dict[str, Any]:
    """The recipe as workers run it, with an objective that looks at a weight beside the forward."""

    class Penalised(CausalLM):
        def loss(self, engine: Any, batch: Any) -> Any:
            return super().loss(engine, batch) + engine.module.lm_head.weight.norm()

    pretrain.objective_of = lambda plan: Penalised()
    try:
        pretrain.run(Plan.from_json(case["plan"]), RunDir(case["run_dir"]))
        ended: list[Any] = []
    except UserError as error:
        ended = [error.problems[0].where, error.code]
    return {"ended": ended}


def taken_away(case: dict[str, Any]) -> dict[str, Any]:
    """What is installed while the audit watches, and what is left of it when it has seen its steps."""
    before = _installed()
    module = importlib.import_module("tests.audit_corpus.clean.norm_by_gather")
    audit = Audit(steps=1, strict=False)
    audit.install()
    during = _installed()
    engine = _engine(module)
    hooks, threads = [_hooks(engine.module)], [_threads_of_groups()]
    with _Other() as other:
        module.step(engine, torch.zeros(4, 6, dtype=torch.int64))
        assert torch._C._get_function_stack_at(torch._C._len_torch_function_stack() - 1) is other
    hooks.append(_hooks(engine.module))
    threads.append(_threads_of_groups())
    calls = {"backward", "step", "save_checkpoint", "load_checkpoint", "no_sync"}
    left = sorted(calls & set(vars(engine)))
    answer = {"before": before, "during": during, "after": _installed(), "hooks": hooks, "left": left}
    return answer | {"threads": threads}


class _Other(TorchFunctionMode):
    """A context of the user's own, entered after the audit's and left after it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def alone(case: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 waits for something else while rank 0 goes into a forward."""
    module = importlib.import_module("tests.audit_corpus.clean.norm_by_gather")
    audit = Audit(steps=1, strict=False, patience_s=2.0)
    audit.install()
    engine = _engine(module)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 has given up"])
        return {}
    try:
        module.step(engine, torch.zeros(4, 6, dtype=torch.int64))
        said = ""
    except UserError as error:
        said = error.problems[0].why
    store.set("rank 0 has given up", "")
    return {"said": said}


def lost(case: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 ends before its forward; rank 0 writes, to `case["file"]`, what kind of failure it has."""
    module = importlib.import_module("tests.audit_corpus.clean.norm_by_gather")
    audit = Audit(steps=1, strict=False)
    audit.install()
    engine = _engine(module)
    if dist.get_rank() == 1:
        os._exit(1)
    try:
        module.step(engine, torch.zeros(4, 6, dtype=torch.int64))
    except RuntimeError as error:
        Path(case["file"]).write_text(_failure(error, 0, "here")["kind"])
    return {}


def _installed() -> dict[str, Any]:
    """What an audit changes in a process."""
    gathered = deepspeed.zero.GatheredParameters
    return {
        "modes": torch._C._len_torch_function_stack(),
        "initialize": deepspeed.initialize.__module__,
        "gathers": sorted(
            {getattr(gathered, name).__code__.co_filename for name in ("__init__", "__enter__", "__exit__")}
        ),
        "registration": len(hooks._global_parameter_registration_hooks) + len(hooks._global_module_registration_hooks),
        "optimizers": len(optimizer._global_optimizer_pre_hooks),
    }


def _threads_of_groups() -> int:
    """Threads of this process that wait for what other ranks send, one for each process group."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def _hooks(model: torch.nn.Module) -> int:
    """Forward pre-hooks of all modules, and hooks on gradients."""
    counted = sum(len(module._forward_pre_hooks) for module in model.modules())
    return counted + sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def run(job: str, folder: Path, strict: bool = False) -> dict[str, Any]:
    """One job in this process group; all ranks."""
    parameter_offload.FWD_MODULE_STACK.clear()  # a forward that raised leaves it as it was
    torch.manual_seed(7)
    audit = Audit(steps=STEPS + 1, strict=strict, patience_s=PATIENCE_S)  # ended here, after `after`
    audit.install()
    error = None
    try:
        _steps(importlib.import_module(f"tests.audit_corpus.{job}"), folder)
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    audit.finish()
    found = [dataclasses.asdict(finding) for finding in audit.merged]
    return {"found": json.loads(json.dumps(found)), "error": error}


def _engine(module: Any) -> Any:
    """The job's engine, as a recipe builds one."""
    with ShardedConstruction(torch.device("cpu")) as construction:
        model = module.build()
    construction.partition(model, torch.float32, CONFIG)
    if hasattr(module, "prepared"):
        module.prepared(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=CONFIG, dist_init_required=False)
    return engine


def _steps(module: Any, folder: Path) -> None:
    engine = _engine(module)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        module.step(engine, torch.randint(0, 16, (4, 6), generator=generator))
    if hasattr(module, "after"):
        with contextlib.chdir(folder):
            module.after(engine, folder)
