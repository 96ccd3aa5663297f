"""In a rank: builds a plan's engine and trains a few steps, and says how many bytes were allocated at each moment.

Called by the bench `planner` and by tests, in forked ranks. On a CPU torch's allocator reports every allocation to the
profiler; on a GPU its own counters are read.
Must never take a figure from the plan.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from launcher.plan import Plan
from launcher.planner.prediction import MOMENTS
from recipes.shared import distributed
from recipes.shared.engine import build_engine
from recipes.shared.losses import CausalLM
from recipes.shared.model import build_model
from recipes.shared.moments import Moments

COLLECTIVES = ("allreduce", "allgather", "all_gather_single", "reduce_scatter", "reduce_scatter_single", "broadcast")
GLOO_THREADS = "pt_gloo_runloop"  # as torch names them
LET_GO_S = 2.0  # at most
MARK = "moment: "


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """{"peaks": bytes by moment, "resident": bytes after the last step} of this rank; case: plan, steps."""
    plan = Plan.from_json(case["plan"])
    ranks = distributed.initialise(plan)
    recorder = CpuRecorder() if ranks.device.type == "cpu" else CudaRecorder(ranks.device)
    with recorder:
        with recorder.at("init"):
            engine = build_engine(plan, build_model(plan, ranks))
        objective = CausalLM()
        for batch in _batches(plan, ranks, case["steps"]):
            with recorder.at("forward"):
                loss = objective.loss(engine, batch)
            with recorder.at("backward"):
                engine.backward(loss)
            del loss
            with recorder.at("step"):
                engine.step()
    return recorder.found()


def _batches(plan: Plan, ranks: Any, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    shape = (plan.batch.micro_batch_size, plan.config.train.sequence_length)
    generator = torch.Generator().manual_seed(ranks.rank)
    for _ in range(steps * plan.batch.gradient_accumulation_steps):
        tokens = torch.randint(0, plan.config.model.config["vocab_size"], shape, generator=generator)
        yield {"input_ids": tokens.to(ranks.device), "labels": tokens.to(ranks.device)}


class CpuRecorder:
    """The running total of torch's CPU allocator, which reports every allocation to the profiler."""

    def __enter__(self) -> CpuRecorder:
        _count_all_threads()
        for name in COLLECTIVES:
            setattr(dist.ProcessGroup, name, _over(getattr(dist.ProcessGroup, name)))
        self.profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self.profiler.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.profiler.__exit__(*error)

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """What is allocated in it counts for `name`."""
        with record_function(MARK + name):
            yield

    def found(self) -> dict[str, Any]:
        """Peaks of every moment over all steps, and what was left."""
        inner: Any = self.profiler.profiler
        events = list(inner.kineto_results.experimental_event_tree())
        spans, totals = [], []
        while events:
            event = events.pop()
            events += event.children
            if event.name.startswith(MARK):
                spans.append((event.start_time_ns, event.name.removeprefix(MARK)))
            elif event.tag == _EventType.Allocation:
                totals.append((event.start_time_ns, event.typed[1].total_allocated))
        spans.sort()
        peaks, at = dict.fromkeys(MOMENTS, 0), 0
        for moment, total in sorted(totals):
            while at + 1 < len(spans) and moment >= spans[at + 1][0]:
                at += 1
            peaks[spans[at][1]] = max(peaks[spans[at][1]], total)
        return {"peaks": peaks, "resident": sorted(totals)[-1][1]}


def _over(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The collective, over when gloo's threads wait for the next one; one that is asynchronous stays so.

    A thread lets go of its tensors, a copy of its own among them, a moment after it said that it is done: they would be
    counted or not as the machine is busy.
    """

    def call(*arguments: Any, **named: Any) -> Any:
        work = collective(*arguments, **named)
        if any(getattr(argument, "asyncOp", False) for argument in arguments):
            return work
        work.wait()
        until = time.monotonic() + LET_GO_S
        while time.monotonic() < until and not (_at_rest() and _at_rest()):
            time.sleep(0.0002)
        return _Done()

    return call


class _Done:
    """A collective that is over; torch's own would go on holding its tensors."""

    def wait(self, *arguments: Any) -> bool:
        """Nothing is waited for."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


def _at_rest() -> bool:
    """Whether each of gloo's threads sleeps (state S of proc_pid_stat(5)); one that only lost its core does not."""
    for task in Path("/proc/self/task").iterdir():
        name, _, rest = (task / "stat").read_text(encoding="utf-8").partition("(")[2].rpartition(")")
        if name == GLOO_THREADS and rest.split()[0] != "S":
            return False
    return True


def _count_all_threads() -> None:
    """Has the allocator count every thread's frees: a collective's tensors are freed by gloo's (CPUAllocator.cpp)."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


class CudaRecorder(Moments):
    """The counters of torch's CUDA allocator, as recipe=profile reads them."""

    def __enter__(self) -> CudaRecorder:
        return self

    def __exit__(self, *error: Any) -> None:
        self.resident = int(torch.cuda.memory_allocated(self.device))

    def found(self) -> dict[str, Any]:
        """Peaks of every moment over all steps, what was left, and what was taken from the device."""
        return {"peaks": self.peaks, "resident": self.resident, "reserved": self.highest()["reserved_bytes"]}
