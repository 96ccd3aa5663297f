"""The only reader of the process environment: folders, forwarded variables, redaction.

Used by the planner of commands (what workers get) and by scripts (where compiled operators live).
Must never write a secret to a file or a log: values of `SECRET` names leave this module redacted.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path

# Forwarded to workers on every host by name or prefix; anything else needs `cluster.env`.
FORWARDED = (
    "CUDA_DEVICE_ORDER",
    "DS_ACCELERATOR",
    "GLOO_SOCKET_IFNAME",
    "HF_DATASETS_CACHE",
    "HF_DATASETS_OFFLINE",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "PYTHONHASHSEED",
    "TOKENIZERS_PARALLELISM",
    "TORCH_EXTENSIONS_DIR",
    "TRANSFORMERS_OFFLINE",
    "WANDB_DIR",
    "WANDB_ENTITY",
    "WANDB_MODE",
    "WANDB_PROJECT",
)
FORWARDED_PREFIXES = ("NCCL_", "UCX_", "FI_", "TORCH_NCCL_")
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSW|CREDENTIAL)", re.IGNORECASE)


def forwarded() -> dict[str, str]:
    """The allow-listed variables of this process, without anything that looks like a secret."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in FORWARDED or name.startswith(FORWARDED_PREFIXES)) and not SECRET.search(name)
    }


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Environment of a process started on this host: everything inherited, then `extra`."""
    inherited = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    return inherited | extra


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES as the user set it, or None."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def requested_accelerator() -> str | None:
    """DS_ACCELERATOR as the user set it, or None."""
    return os.environ.get("DS_ACCELERATOR") or None


def has_wandb_key() -> bool:
    """Whether W&B can log in: a key in the environment or in the user's netrc."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    netrc = Path.home() / (os.environ.get("NETRC") or ".netrc")
    return netrc.is_file() and "wandb" in netrc.read_text(errors="replace")


def slurm() -> dict[str, str]:
    """The SLURM_* variables of an allocation (empty outside one)."""
    return {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}


def show_full_hydra_errors() -> None:
    """Makes Hydra raise its exceptions instead of printing them and leaving with its own exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"


def cache_dir() -> Path:
    """Per-user cache folder: tokenised corpora, model profiles, compiled operators."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "zerolaunch"


def extensions_dir() -> Path:
    """Folder of compiled DeepSpeed operators: one per interpreter, torch, deepspeed and CPU feature set.

    TORCH_EXTENSIONS_DIR wins when it is set. Computed without importing torch.
    """
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen)
    key = "-".join(
        (
            f"py{sys.version_info.major}{sys.version_info.minor}",
            f"torch{_version('torch')}",
            f"ds{_version('deepspeed')}",
            platform.machine(),
            _cpu_flags_hash(),
        )
    )
    return cache_dir() / "torch_extensions" / key


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "none"


def _cpu_flags_hash() -> str:
    """Operators are compiled for this CPU's vector units: another CPU behind the same home needs its own."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "nocpu"
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(flags.encode()).hexdigest()[:8]
