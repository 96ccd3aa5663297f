"""Compiles, once per machine, the DeepSpeed operators a training run needs, into `launcher.env.extensions_dir()`.

Called by scripts/setup.sh before every run: returns in two tenths of a second when there is nothing to do.
Must never import torch on that path, nor compile two operators at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.env import extensions_dir, requested_accelerator

# Stands in for the compiler while ninja is made to accept files that exist: outputs become newer than their inputs.
NOT_COMPILING = """#!/bin/sh
while [ $# -gt 0 ]; do
    case "$1" in -MF) dependencies=$2 ;; -o) output=$2 ;; esac
    shift
done
[ -z "$dependencies" ] || echo "$output:" >"$dependencies"
touch "$output"
"""


@dataclass(frozen=True)
class Operator:
    builder: str  # class name for DeepSpeed's create_op_builder, without "Builder"
    folders: tuple[str, ...]  # what it compiles: each folder/folder.so below the extensions folder
    about: str  # how long that takes


# Times are those of two cores.
CPU = (
    Operator("ShareMemComm", ("deepspeed_shm_comm",), "about 30 s"),
    Operator("FusedAdam", ("fused_adam",), "about 60 s"),
    Operator("CPUAdam", ("cpu_adam",), "about 60 s"),
)
NVME = (Operator("AsyncIO", ("pin_memory", "async_io"), "about 4 minutes"),)
MORE = (
    Operator("CPULion", ("cpu_lion",), "about 60 s"),
    Operator("CPUAdagrad", ("cpu_adagrad",), "about 45 s"),
)
CUDA = (
    Operator("FusedAdam", ("fused_adam",), "a minute or more"),
    Operator("CPUAdam", ("cpu_adam",), "a minute or more"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the DeepSpeed operators this machine needs.")
    parser.add_argument("--all", action="store_true", help="also AsyncIO for NVMe, and Lion and Adagrad for offload")
    parser.add_argument("--only", metavar="NAME", nargs="*", help="just these, whatever the defaults")
    parser.add_argument("--ready", action="store_true", help="compile nothing; print what loads as it is")
    parser.add_argument("--retry", action="store_true", help="try again what failed before")
    args = parser.parse_args()

    root = extensions_dir()
    os.environ.pop("TORCH_EXTENSIONS_DIR", None)
    key = extensions_dir().name  # interpreter, torch, deepspeed, CPU: what binaries must agree on to be exchanged
    # The venv's ninja, as in training: another version cannot read this one's log and would compile everything again.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)))

    if args.ready:
        print(*ready(root, key), sep="\n")
        return 0
    operators = needed(args.all, args.only)
    if all(is_built(operator, root) for operator in operators) and not any(root.glob("*/lock")):
        return 0
    root.mkdir(parents=True, exist_ok=True)
    with only_one_build(root):
        remove_stale_locks(root)
        missing = [operator for operator in operators if not (is_built(operator, root) or adopt(operator, root, key))]
        results = [
            build(operator, root, key, f"[{i}/{len(missing)}]", args.retry) for i, operator in enumerate(missing, 1)
        ]
    return 0 if all(results) else 1


def needed(everything: bool, only: list[str] | None) -> tuple[Operator, ...]:
    """The operators for this machine's accelerator, told without torch the way DeepSpeed will tell it with torch."""
    cuda = requested_accelerator() != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))
    every = (CUDA if cuda else CPU) + NVME + MORE
    if only is not None:
        return tuple(operator for operator in every if operator.builder in only)
    if everything:
        headers = (Path(prefix, "libaio.h") for prefix in ("/usr/include", "/usr/local/include"))
        return tuple(op for op in every if op not in NVME or any(header.is_file() for header in headers))
    return CUDA if cuda else CPU


def ready(root: Path, key: str) -> list[str]:
    """Folders of every operator whose loading compiles nothing, after adopting what can be adopted."""
    if not root.is_dir():
        return []
    with only_one_build(root):
        found = [op for op in needed(True, None) if is_built(op, root) or adopt(op, root, key)]
    return [folder for operator in found for folder in operator.folders]


def is_built(operator: Operator, root: Path) -> bool:
    """Whether loading it will compile nothing: made from this environment's sources, and ninja finds no work."""
    for folder in (root / name for name in operator.folders):
        if not (folder / f"{folder.name}.so").is_file() or _sources(folder) != str(_site_packages()):
            return False
        if not _names_this_python(folder) or b"no work to do" not in _ninja(folder, "-n"):
            return False
    return True


def adopt(operator: Operator, root: Path, key: str) -> bool:
    """Takes over what another environment with the same versions compiled: a second instead of minutes.

    Ninja compiles again when the path of the sources changes, or their times (a new checkout, .venv made anew),
    though the binary would be the same. So the paths are rewritten and ninja runs once with a compiler that compiles
    nothing; at load torch writes the same build.ninja and ninja finds no work. Where anything else differs it compiles.
    """
    for folder in (root / name for name in operator.folders):
        stamp, plan, sources = folder / "zerolaunch.key", folder / "build.ninja", _sources(folder)
        if not stamp.is_file() or stamp.read_text() != key or not sources or not _names_this_python(folder):
            return False
        text = plan.read_text()
        if not (folder / f"{folder.name}.so").is_file() or "\ncxx = c++\n" not in text or "\nnvcc = " in text:
            return False
        wait_until_free(folder)
        plan.write_text(text.replace(f"{sources}/", f"{_site_packages()}/"))
        with tempfile.TemporaryDirectory() as place:
            compiler = Path(place, "c++")
            compiler.write_text(NOT_COMPILING)
            compiler.chmod(0o755)
            _ninja(folder, path=place)
    return is_built(operator, root)


def build(operator: Operator, root: Path, key: str, position: str, retry: bool) -> bool:
    """Compiles and loads one operator, one line before and one after; remembers a failure."""
    log, failed = root / f"{operator.builder}.log", root / f"{operator.builder}.failed"
    what = f"DeepSpeed operator {operator.builder}"
    compiler = os.environ.get("CXX", "c++")
    if failed.exists() and not retry:
        say(f"{what} failed to compile before (output: {log}); to try again: {sys.executable} {__file__} --retry")
        return False
    if shutil.which(compiler) is None:
        say(f"{what} needs a C++ compiler and there is no {compiler} (Debian: apt-get install g++)")
        return False
    if " " in str(_site_packages()):
        say(f"{what} cannot be compiled from a path with a space in it (torch does not quote it): {_site_packages()}")
        return False
    for name in operator.folders:
        wait_until_free(root / name)
        (root / name / "zerolaunch.key").unlink(missing_ok=True)
    say(f"compiling {what} ({operator.about}, once per machine) {position} ...")
    start = time.monotonic()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(root)
    try:
        with output_to(log):
            from deepspeed.accelerator import get_accelerator

            get_accelerator().create_op_builder(f"{operator.builder}Builder").load(verbose=True)
    except Exception as error:  # whatever a compiler, torch or DeepSpeed can raise: the next operator may still build
        failed.touch()
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        say(f"{what} failed after {time.monotonic() - start:.0f} s: {reason}; the whole output is in {log}")
        return False
    failed.unlink(missing_ok=True)
    for name in operator.folders:
        (root / name / "zerolaunch.key").write_text(key)
    say(f"compiled {what} {position}: {time.monotonic() - start:.0f} s")
    return True


@contextlib.contextmanager
def only_one_build(root: Path) -> Iterator[None]:
    """Holds the folder's lock, which the kernel releases however this process ends."""
    with (root / "zerolaunch.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that compiles DeepSpeed operators in {root} ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def remove_stale_locks(root: Path) -> None:
    """A process killed while it compiled or loaded leaves torch's `lock` file, for which every later load waits."""
    for lock in root.glob("*/lock"):
        if user_of(lock.parent) is None:
            lock.unlink(missing_ok=True)
            say(f"removed a lock left by a killed process: {lock}")


def wait_until_free(folder: Path) -> None:
    """Returns when no process of this machine works in `folder`: a killed build's compiler may still be running."""
    told = False
    while (pid := user_of(folder)) is not None:
        if not told:
            say(f"waiting for process {pid}, which works in {folder} ...")
        told = True
        time.sleep(0.5)
    (folder / "lock").unlink(missing_ok=True)


def user_of(folder: Path) -> int | None:
    """A process of this machine that compiles in `folder` (ninja and the compiler work there) or holds its lock."""
    place = str(folder.resolve())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if os.readlink(process / "cwd") == place:
                return int(process.name)
            for descriptor in (process / "fd").iterdir():
                if os.readlink(descriptor) == f"{place}/lock":
                    return int(process.name)
    return None


@contextlib.contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Sends this process's stdout and stderr to `log`, those of the compilers it starts included."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, descriptor in enumerate(saved, 1):
            os.dup2(descriptor, stream)
            os.close(descriptor)


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


def _site_packages() -> Path:
    return Path(str(metadata.distribution("deepspeed").locate_file(""))).resolve()


def _sources(folder: Path) -> str | None:
    """The site-packages folder whose deepspeed `folder` was compiled from."""
    plan = folder / "build.ninja"
    found = re.search(r": compile (.+?)/deepspeed/ops/csrc/", plan.read_text()) if plan.is_file() else None
    return found.group(1) if found else None


def _names_this_python(folder: Path) -> bool:
    """Whether it was compiled against the headers of the Python this process runs."""
    return f"-isystem {sysconfig.get_path('include')} " in (folder / "build.ninja").read_text()


def _ninja(folder: Path, *arguments: str, path: str | None = None) -> bytes:
    """Runs ninja in `folder`, with `path` ahead of PATH; its output, whatever its exit status."""
    environment = dict(os.environ)
    if path is not None:
        environment["PATH"] = os.pathsep.join((path, environment["PATH"]))
    try:
        return subprocess.run(["ninja", *arguments], cwd=folder, env=environment, capture_output=True).stdout
    except FileNotFoundError:
        return b""


if __name__ == "__main__":
    sys.exit(main())
