"""The checks of a preflight that are made host by host: what a plan needs there, and whether the facts say so. Pure.

Called by `launcher.cluster.preflight`, which asks the hosts and puts the findings together.
Must never fail a host for a thing the plan does not need.
"""

from __future__ import annotations

import math
from typing import Any

from launcher.cluster.value import Host
from launcher.command import ROOT
from launcher.plan import Plan

OK, WARN, FAIL = "ok", "warn", "fail"
GB = 1e9
# NCCL comes as a wheel whose name holds the CUDA version.
NCCL = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
OPEN_FILES = 4096  # sockets of every peer, shards and data files of one rank
SHM_PER_CPU_RANK = 70_000_000  # DeepSpeed's CPU collectives: 69 MB a rank, measured
SHM_PER_GPU_RANK = 64_000_000  # NCCL's transport between processes of a host that have no peer access
LOCKED_BYTES = 64 * 2**20

Found = list[tuple[str, str, str, str]]
"""(status, got, why, fix) of each thing that a check has looked at."""


def versions(plan: Plan, host: Host, here: dict[str, Any], facts: dict[str, Any]) -> Found:
    mine, theirs = here["versions"], facts["versions"]
    if "error" in theirs:
        return [(FAIL, theirs["error"], "its packages cannot be read", "install the same environment there")]
    different = {
        name: (theirs.get(name), mine[name])
        for name in mine
        if theirs.get(name) != mine[name] and not (name in NCCL and plan.cluster.accelerator == "cpu")
    }
    if different:
        got = ", ".join(
            f"{name} {theirs or 'missing'} (here {mine or 'missing'})" for name, (theirs, mine) in different.items()
        )
        why = "ranks of different versions differ in what they compute, or wait for each other for ever"
        return [(FAIL, got, why, "install constraints.txt of this checkout there, at the same path")]
    return [(OK, f"python {mine['python']}, torch {mine['torch']}, deepspeed {mine['deepspeed']}", "", "")]


def code(plan: Plan, host: Host, here: dict[str, Any], facts: dict[str, Any]) -> Found:
    if facts["code"] == here["code"]:
        return [(OK, str(here["code"]), "", "")]
    got = f"{facts['code']}, here {here['code']}" if facts["code"] else f"no {ROOT}"
    why = "workers run the checkout on their own host"
    return [(FAIL, got, why, f"put this revision at {ROOT} there, or share the folder")]


def folders(plan: Plan, host: Host, here: dict[str, Any], facts: dict[str, Any]) -> Found:
    found: Found = []
    needed = room_needed(plan, here["checkpoints"])
    for path, state in facts["folders"].items():
        if not state["exists"]:
            found.append((FAIL, f"{path}: missing", "the run writes there", "create it, or mount it there"))
        elif state["writable"] is False:
            found.append((FAIL, f"{path}: {state['error']}", "the run writes there", "make it writable, or make room"))
        elif state["free_bytes"] < needed.get(path, needed[""]):
            wants = needed.get(path, needed[""])
            got = f"{path}: {state['free_bytes'] / GB:.1f} GB free of {wants / GB:.1f} GB that are needed"
            found.append((FAIL, got, "the run would end at a full disk", "make room, or lower checkpoint.keep"))
        else:
            found.append((OK, f"{path}: {state['free_bytes'] / GB:.0f} GB free", "", ""))
    return found


def room_needed(plan: Plan, there: int) -> dict[str, int]:
    """{folder: bytes}: checkpoints in the run's ("" stands for it), offloaded state of a host on NVMe.

    `there`: checkpoints that the run has already, which give way to new ones.
    """
    one = 0 if plan.config.recipe.name == "profile" else plan.estimate.checkpoint_bytes or 0  # it saves none
    keep, every, steps = plan.config.checkpoint.keep, plan.config.checkpoint.every, plan.config.run.steps
    written = 1 + (steps // every if every else 0)
    kept = min(keep + 1, written) if keep else written  # the older one goes once the newer one stands
    for_good = plan.config.checkpoint.keep_every
    if keep and every and for_good:
        kept = min(written, kept + steps // math.lcm(every, for_good))
    needed = {"": one * max(kept - there, 1)}
    zero = plan.deepspeed.get("zero_optimization", {})
    per_rank = {"optimizer": ("master", "moments", "gradients"), "param": ("weights",)}
    slots = max(len(host.slots) for host in plan.cluster.hosts)
    for what, terms in per_rank.items():
        block = zero.get(f"offload_{what}") or {}
        if block.get("device") == "nvme":
            size = sum(plan.estimate.host_bytes.get(term, 0) for term in terms) * slots
            needed[str(block["nvme_path"])] = needed.get(str(block["nvme_path"]), 0) + size
    return needed


def missing_files(plan: Plan, host: Host, here: dict[str, Any], facts: dict[str, Any]) -> Found:
    return [
        (FAIL, f"{path}: missing", "workers read it", "copy it there, or put it on a shared file system")
        for path in facts["missing_files"]
    ]


def accelerators(plan: Plan, host: Host, here: dict[str, Any], facts: dict[str, Any]) -> Found:
    if plan.cluster.accelerator != "cuda":
        cores = facts["identity"].get("cores", 0)
        got = f"{cores} cores for {len(host.slots)} ranks"
        if cores < len(host.slots):
            return [(WARN, got, "ranks take turns on a core", "use fewer slots")]
        return [(OK, got, "", "")]
    cards = facts["gpus"]
    if not isinstance(cards, list):
        got = (cards or {}).get("error", "no nvidia-smi")
        return [(FAIL, got, "there is no working NVIDIA driver", "install it, or leave the host out")]
    found: Found = []
    by_index = {card["index"]: card for card in cards}
    absent = [slot for slot in host.slots if slot not in by_index]
    if absent:
        got = f"{len(cards)} GPUs, slots {','.join(map(str, absent))} missing"
        found.append((FAIL, got, "one rank needs one GPU", "correct slots in the hostfile, or use cluster.exclude"))
    for slot in host.slots:
        for user in by_index.get(slot, {}).get("users", []):
            got = f"GPU {slot}: process {user['pid']} of {user['user'] or 'somebody'}, {user['used_mib']} MiB"
            found.append((FAIL, got, "it is in use", "end that process, or leave the GPU out: cluster.exclude"))
    drivers = {card["driver"] for card in cards}
    mine = {card["driver"] for card in here["gpus"]} if isinstance(here["gpus"], list) else drivers
    if drivers != mine:
        found.append((WARN, f"driver {'/'.join(sorted(drivers))}, here {'/'.join(sorted(mine))}", "drivers differ", ""))
    names = {card["name"] for card in cards}
    return found or [(OK, f"{len(cards)} x {'/'.join(sorted(names))}, driver {'/'.join(sorted(drivers))}", "", "")]


def precision(plan: Plan, host: Host, here: dict[str, Any], facts: dict[str, Any]) -> Found:
    able = facts["cpu_fp16"]
    if able is None:
        return []
    if isinstance(able, dict):
        return [(WARN, able["error"], "whether its CPU computes in fp16 is not known", "")]
    if able:
        return [(OK, "its CPU computes in fp16", "", "")]
    why = "DeepSpeed refuses fp16 on a CPU that does not compute in it (AVX512-FP16)"
    return [(FAIL, "fp16 on a CPU without it", why, "use precision=bf16 or precision=fp32")]


def rendezvous(plan: Plan, host: Host, here: dict[str, Any], facts: dict[str, Any]) -> Found:
    if facts.get("listens") is not None:
        if facts["listens"]["ok"]:
            return [(OK, "its port is free", "", "")]
        got = f"port {plan.config.cluster.master_port or 'chosen'}: {facts['listens']['error']}"
        return [(FAIL, got, "the ranks meet there", "choose another cluster.master_port, or leave it out")]
    state = facts["master"]
    if state is None:
        return []
    if state.get("ok"):
        return [(OK, f"reaches {state['address']}", "", "")]
    got = f"{state.get('address', '')} {state['error']}".strip()
    fix = "give cluster.master_addr an address that every host reaches; open cluster.master_port in its firewall"
    return [(FAIL, got, "it does not reach the first host, where the ranks meet", fix)]


def interface(plan: Plan, host: Host, here: dict[str, Any], facts: dict[str, Any]) -> Found:
    found: Found = []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        wanted = plan.env.get(name)
        if wanted and not interface_matches(wanted, facts["interfaces"], exact=name.startswith("GLOO")):
            got = f"{name}={wanted}; it has {', '.join(facts['interfaces'])}"
            fix = f"give {name} a value that fits every host, in NCCL a prefix: cluster.env.{name}=eth,eno"
            found.append((FAIL, got, "it has no such network interface", fix))
    return found


def interface_matches(wanted: str, interfaces: list[str], exact: bool = False) -> bool:
    """NCCL's reading: comma-separated prefixes, `=` before them makes them exact, `^` excludes them."""
    excluded, wanted = wanted.startswith("^"), wanted.lstrip("^")
    exact, names = exact or wanted.startswith("="), [name for name in wanted.lstrip("=").split(",") if name]
    hits = [i for i in interfaces if any(i == name if exact else i.startswith(name) for name in names)]
    return any(i not in hits and i != "lo" for i in interfaces) if excluded else bool(hits)


def limits(plan: Plan, host: Host, here: dict[str, Any], facts: dict[str, Any]) -> Found:
    state, found = facts["limits"], []
    if "error" in state:
        return [(WARN, state["error"], "limits cannot be read", "")]
    if 0 <= state["open_files"] < OPEN_FILES:
        why = "each rank holds a socket for its peers and files of data and shards"
        found.append((WARN, f"{state['open_files']} open files", why, "raise it: ulimit -n 65536, limits.conf"))
    per_rank = SHM_PER_GPU_RANK if plan.cluster.accelerator == "cuda" else SHM_PER_CPU_RANK
    free, wants = state["shm_free_bytes"] or 0, per_rank * len(host.slots)
    if free < wants:
        got = f"/dev/shm: {free / 1e6:.0f} MB free of {wants / 1e6:.0f} MB"
        why = "ranks of a host talk through it and die of SIGBUS when it is full"
        found.append((FAIL, got, why, "make room in it, or mount it larger (containers: --shm-size)"))
    pinned = plan.offload_device("optimizer") or plan.offload_device("param")
    if plan.cluster.accelerator == "cuda" and pinned and 0 <= state["locked_bytes"] < LOCKED_BYTES:
        why = "offloaded state is kept in locked memory"
        found.append((WARN, f"{state['locked_bytes']} bytes may be locked", why, "ulimit -l unlimited"))
    return found or [(OK, f"{state['open_files']} open files, {free / 1e6:.0f} MB shared memory", "", "")]


def memory(plan: Plan, host: Host, here: dict[str, Any], facts: dict[str, Any]) -> Found:
    wants = sum(plan.estimate.host_bytes.values()) * len(host.slots)
    nvme = [w for w in ("optimizer", "param") if plan.offload_device(w) == "nvme"]
    free = facts["memory"]
    if not isinstance(free, int) or not wants or nvme:
        return []
    if free < wants:
        got = f"{free / GB:.1f} GB free of {wants / GB:.1f} GB for offloaded state"
        return [(FAIL, got, "the kernel would kill a rank", "offload less, or use more hosts")]
    return [(OK, f"{free / GB:.0f} GB free for {wants / GB:.1f} GB of offloaded state", "", "")]


def operators(plan: Plan, host: Host, here: dict[str, Any], facts: dict[str, Any]) -> Found:
    state = facts["operators"]
    if "error" in state:
        return [(WARN, state["error"], "compiled operators cannot be looked for", "")]
    if not state["missing"]:
        return [(OK, "compiled", "", "")]
    got, folder = f"{', '.join(state['missing'])} not compiled", plan.env.get("TORCH_EXTENSIONS_DIR")
    if state["tools_missing"]:
        got += f", and no {', '.join(state['tools_missing'])}"
        return [(FAIL, got, "it could not be compiled there", f"install the compiler, or share {folder}")]
    why = "it is compiled when training starts: minutes in which the other hosts wait"
    return [(WARN, got, why, f"share {folder}, or run scripts/build_ops.py there")]


def needs_cpu_fp16(plan: Plan) -> bool:
    """Whether ranks of `plan` would compute in fp16 on a CPU."""
    return plan.cluster.accelerator == "cpu" and plan.precision == "fp16"


CHECKS = (
    versions,
    code,
    folders,
    missing_files,
    accelerators,
    precision,
    rendezvous,
    interface,
    limits,
    memory,
    operators,
)
