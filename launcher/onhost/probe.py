"""What one host looks like to a run: a script that `launcher.remote` sends to the host's own interpreter.

Standard library only: the host may lack everything else. Prints one marked JSON line per answer: its clock, the facts.
Must never change the host: what it writes to try a folder is removed before it ends.
"""

from __future__ import annotations

import contextlib
import getpass
import glob
import hashlib
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Request = dict[str, Any]
MARK = "@zerolaunch "  # login scripts may print around us
CONNECT_S = 3.0
LISTEN_S = 60.0
TOOL_S = 10.0
IMPORT_S = 15.0  # of torch, from a slow file system; less than a host may take to answer (check.timeout_s)


def main(request: Request) -> None:
    """Answers {"time"} at once, then the facts; a host that is the master listens until stdin ends."""
    say({"time": time.time()})
    facts: dict[str, Any] = {}
    listener = listen(request["master_port"]) if request["is_master"] else None
    for name, look in LOOKS.items():
        facts[name] = seen(look, request)
    if listener is not None:
        facts["listens"] = listener
    say(facts)
    if listener is not None and listener.get("ok"):
        watchdog = threading.Timer(LISTEN_S, os._exit, (0,))
        watchdog.daemon = True
        watchdog.start()
        sys.stdin.read()


def seen(look: Callable[[Request], Any], request: Request) -> Any:
    """What `look` found; {"error"} where it failed: a finding about the host, not the end of the probe."""
    try:
        return look(request)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def say(value: Any) -> None:
    print(MARK + json.dumps(value), flush=True)


def listen(port: int) -> dict[str, Any]:
    """Accepts connections on `port` from now on, as the rendezvous of the run will."""
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(("", port))
    except OSError as error:
        return {"ok": False, "error": error.strerror or str(error)}
    server.listen(1024)

    def accept() -> None:
        while True:
            server.accept()[0].close()

    threading.Thread(target=accept, daemon=True).start()
    return {"ok": True}


def identity(request: Request) -> dict[str, Any]:
    with open("/proc/sys/kernel/random/boot_id") as file:
        machine = f"{socket.gethostname()} {file.read().strip()}"
    return {
        "hostname": socket.gethostname(),
        "machine": machine,
        "user": getpass.getuser(),
        "cores": len(os.sched_getaffinity(0)),
    }


def versions(request: Request) -> dict[str, str | None]:
    """Of what decides a run's numbers, without importing any of it."""
    from importlib import metadata

    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in request["distributions"]:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def code(request: Request) -> str | None:
    """One digest of the checkout's Python files; null where there is no checkout."""
    if not os.path.isdir(request["root"]):
        return None
    digest = hashlib.sha256()
    for folder in ("launcher", "recipes"):
        for path in sorted(glob.glob(os.path.join(request["root"], folder, "**", "*.py"), recursive=True)):
            with open(path, "rb") as file:
                digest.update(os.path.relpath(path, request["root"]).encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()[:16]


def folders(request: Request) -> dict[str, Any]:
    """Of each folder the run needs: whether it is there, may be written, and what room it has."""
    return {path: folder(path, needs["write"]) for path, needs in request["folders"].items()}


def folder(path: str, write: bool) -> dict[str, Any]:
    if not os.path.isdir(path):
        return {"exists": False}
    size = os.statvfs(path)
    found: dict[str, Any] = {"exists": True, "free_bytes": size.f_bavail * size.f_frsize, "writable": None}
    if write:
        name = os.path.join(path, f".zerolaunch-probe-{socket.gethostname()}-{os.getpid()}")
        try:
            with open(name, "wb") as file:
                file.write(b"x" * 4096)
                file.flush()
                os.fsync(file.fileno())
            found["writable"] = True
        except OSError as error:
            found["writable"], found["error"] = False, error.strerror
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name)
    return found


def token(request: Request) -> str | None:
    """What stands in the file that the launcher has just written where the run folder will be; null without it."""
    try:
        with open(request["token_file"]) as file:
            return file.read()
    except OSError:
        return None


def missing_files(request: Request) -> list[str]:
    return [path for path in request["files"] if not os.path.exists(path)]


def master(request: Request) -> dict[str, Any] | None:
    """Whether this host reaches the rendezvous address."""
    if request["is_master"] or request["master_addr"] is None:
        return None
    deadline, error = time.monotonic() + CONNECT_S, None
    while time.monotonic() < deadline:
        try:
            found = socket.getaddrinfo(request["master_addr"], request["master_port"], 0, socket.SOCK_STREAM)
            address = (str(found[0][4][0]), int(request["master_port"]))
        except OSError as trouble:
            return {"ok": False, "error": f"{request['master_addr']} does not resolve here: {trouble}"}
        try:
            socket.create_connection(address, timeout=CONNECT_S).close()
            return {"ok": True, "address": address[0]}
        except OSError as trouble:
            error = trouble.strerror or str(trouble)
            time.sleep(0.1)
    return {"ok": False, "error": error, "address": address[0]}


def own_address(request: Request) -> str | dict[str, str]:
    """What this host's own name resolves to: gloo takes the address for its listener from there."""
    try:
        return str(socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)[0][4][0])
    except OSError as error:
        return {"error": str(error)}


def interfaces(request: Request) -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


def gpus(request: Request) -> list[dict[str, Any]] | None:
    """Cards and the processes on them, by nvidia-smi; null where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return None
    cards = table("gpu=index,uuid,name,memory.total,memory.used,driver_version")
    found: list[dict[str, Any]] = [
        {"index": int(index), "uuid": uuid, "name": name, "total_mib": total, "used_mib": used, "driver": driver}
        for index, uuid, name, total, used, driver in cards
    ]
    for card in found:
        card["users"] = []
    by_uuid = {card["uuid"]: card for card in found}
    for uuid, pid, used in table("compute-apps=gpu_uuid,pid,used_memory"):
        if uuid in by_uuid:
            by_uuid[uuid]["users"].append({"pid": int(pid), "used_mib": used, "user": owner(pid)})
    return found


def table(query: str) -> list[list[str]]:
    text = subprocess.run(
        ["nvidia-smi", "--query-" + query, "--format=csv,noheader,nounits"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TOOL_S,
    )
    if text.returncode:
        raise RuntimeError(text.stdout.decode(errors="replace").strip()[:200])
    return [[cell.strip() for cell in line.split(",")] for line in text.stdout.decode().splitlines() if line.strip()]


def owner(pid: str) -> str | None:
    import pwd

    try:
        return pwd.getpwuid(os.stat(f"/proc/{pid}").st_uid).pw_name
    except (OSError, KeyError):
        return None


def limits(request: Request) -> dict[str, Any]:
    """Soft limits; -1 is none. Shared memory that is free, in bytes."""
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shm_free_bytes": None if shm is None else shm.f_bavail * shm.f_frsize,
    }


def memory(request: Request) -> int | None:
    """Bytes of RAM a new job may take."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def cpu_fp16(request: Request) -> bool | None:
    """Whether torch computes in fp16 on this CPU, by torch's own answer, which DeepSpeed heeds; null: nobody asks."""
    if not request["cpu_fp16"]:
        return None
    asked = "import torch; print(torch.ops.mkldnn._is_mkldnn_fp16_supported())"
    answer = subprocess.run([sys.executable, "-c", asked], capture_output=True, timeout=IMPORT_S)
    said = answer.stdout.decode(errors="replace").strip()
    if said not in ("True", "False"):
        raise RuntimeError(answer.stderr.decode(errors="replace").strip()[-200:])
    return said == "True"


def operators(request: Request) -> dict[str, Any]:
    """Which compiled DeepSpeed operators are there, and whether the others could be compiled."""
    missing = [
        name
        for name, built in request["operators"].items()
        if not glob.glob(os.path.join(request["extensions"], built))
    ]
    ninja = os.path.join(os.path.dirname(sys.executable), "ninja")
    tools = {"c++": shutil.which("c++") or shutil.which("g++"), "ninja": shutil.which("ninja") or shutil.which(ninja)}
    if request["accelerator"] == "cuda":
        tools["nvcc"] = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    return {"missing": missing, "tools_missing": sorted(name for name, path in tools.items() if path is None)}


LOOKS = {
    "identity": identity,
    "versions": versions,
    "code": code,
    "folders": folders,
    "token": token,
    "missing_files": missing_files,
    "interfaces": interfaces,
    "own_address": own_address,
    "gpus": gpus,
    "limits": limits,
    "memory": memory,
    "cpu_fp16": cpu_fp16,
    "operators": operators,
    "master": master,
}
