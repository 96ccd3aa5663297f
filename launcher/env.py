"""The only reader of the process environment: folders, forwarded variables, redaction.

Used by the planner of commands (what workers get) and by scripts (where compiled operators live).
Must never write a secret to a file or a log: values of `SECRET` names leave this module redacted.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path

from launcher.errors import Problem, raise_if

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
    "PYTHONPATH",
    "TOKENIZERS_PARALLELISM",
    "TORCH_EXTENSIONS_DIR",
    "TRANSFORMERS_OFFLINE",
    "WANDB_DIR",
    "WANDB_ENTITY",
    "WANDB_MODE",
    "WANDB_PROJECT",
)
FORWARDED_PREFIXES = ("NCCL_", "UCX_", "FI_", "TORCH_NCCL_", "MLFLOW_", "MALLOC_")
# Reach the workers of other hosts through their memory alone, never through a file, a command line or a log.
SECRETS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "WANDB_API_KEY",
)
# What DeepSpeed's front-end would write, half quoted, into the command it sends through a remote shell.
EXPORTED_PREFIXES = ("MLFLOW", "PYTHON", "MV2", "UCX", "NCCL")
DS_ENV_FILE = ".deepspeed_env"
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


def front_end_environment(extra: dict[str, str], remote_shell: bool) -> dict[str, str]:
    """Environment of the `deepspeed` front-end.

    `remote_shell`: it will send a command through one, so it finds nothing to put into it: workers get variables from
    the plan, and DeepSpeed's own file of them (which it reads line by line, comments included) is read by us.
    """
    everything = child_environment(extra)
    everything.pop("CUDA_VISIBLE_DEVICES", None)  # the slots of the plan decide; the front-end would ignore it
    if not remote_shell:
        return everything
    kept = {name: value for name, value in everything.items() if not name.startswith(EXPORTED_PREFIXES)}
    return kept | {"DS_ENV_FILE": ".zerolaunch-reads-it-itself"}


def secrets() -> dict[str, str]:
    """The secrets among this process's variables and in DeepSpeed's env files. Never to be written or shown."""
    own = {name: os.environ[name] for name in SECRETS if os.environ.get(name)}
    return own | {name: value for name, value in deepspeed_env_files().items() if SECRET.search(name)}


def deepspeed_env_files() -> dict[str, str]:
    """Variables of ~/.deepspeed_env and, over them, ./.deepspeed_env (DS_ENV_FILE names another file).

    NAME=VALUE a line, taken literally; blank lines, comments and a leading `export` are fine.
    Raises UserError with every line that is none of these.
    """
    name = os.environ.get("DS_ENV_FILE", DS_ENV_FILE)
    found: dict[str, str] = {}
    problems = []
    for path in dict.fromkeys(folder / name for folder in (Path.home(), Path.cwd())):
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        for number, line in enumerate(lines, 1):
            text = line.strip().removeprefix("export ").strip()
            if not text or text.startswith("#"):
                continue
            match = re.match(r"^([A-Za-z_][A-Za-z0-9_]*)=(.*)$", text)
            if match:
                found[match[1]] = match[2]
            else:
                shown = "(not shown)" if SECRET.search(text) else text
                problems.append(Problem(f"{path}:{number}", shown, "not NAME=VALUE", "correct or remove the line"))
    raise_if(problems)
    return found


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


def pdsh_ssh_arguments() -> list[str]:
    """What the user has pdsh add to every ssh (PDSH_SSH_ARGS_APPEND): our own connections take it too."""
    return shlex.split(os.environ.get("PDSH_SSH_ARGS_APPEND", ""))


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
