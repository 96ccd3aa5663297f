"""include / exclude filters over hosts and slots, with DeepSpeed's meaning and located errors.

Called by `launcher.cluster.value` after the hostfile is read; `spec` writes the filter back for the launcher.
Must never return an empty selection.
"""

from __future__ import annotations

from launcher.errors import Problem, UserError

Hosts = dict[str, tuple[int, ...]]


def apply_filters(hosts: Hosts, include: str | None, exclude: str | None) -> Hosts:
    """Hosts and slots that remain, in the hostfile's order."""
    if include and exclude:
        raise UserError(
            Problem(
                "cluster.include",
                f"{include} (and cluster.exclude={exclude})",
                "DeepSpeed takes one of the two",
                "say what to use with include, or what to leave out with exclude",
            )
        )
    if include:
        wanted = parse_filter(include, hosts, "cluster.include")
        return {host: wanted[host] for host in hosts if host in wanted}
    if exclude:
        dropped = parse_filter(exclude, hosts, "cluster.exclude")
        left = {host: tuple(s for s in slots if s not in dropped.get(host, ())) for host, slots in hosts.items()}
        left = {host: slots for host, slots in left.items() if slots}
        if not left:
            raise UserError(Problem("cluster.exclude", exclude, "nothing is left to run on", "exclude less"))
        return left
    return hosts


def parse_filter(text: str, hosts: Hosts, where: str) -> Hosts:
    """`HOST[:slot,slot]@HOST...` -> {host: slots}; a host without slots means all of them."""
    chosen: dict[str, set[int]] = {}
    for term in text.split("@"):
        host, colon, slot_text = term.strip().partition(":")
        if host not in hosts:
            raise UserError(
                Problem(where, term, f"{host or 'an empty name'} is not a host", f"hosts: {', '.join(hosts)}")
            )
        if not colon:
            chosen.setdefault(host, set()).update(hosts[host])
            continue
        if not slot_text.strip():
            raise UserError(
                Problem(where, term, f"empty slot list for {host}", f"write {host} for all slots, or {host}:0,1")
            )
        for part in slot_text.split(","):
            if not part.strip().isdecimal() or int(part) not in hosts[host]:
                count = len(hosts[host])
                raise UserError(
                    Problem(
                        where,
                        term,
                        f"slot {part.strip() or '(empty)'} is not one of {host}'s: slots=N counts the GPUs that exist, "
                        f"so ids run from 0 to {count - 1}",
                        f"use ids 0..{count - 1}, or raise slots in the hostfile to the number of GPUs of {host}",
                    )
                )
            chosen.setdefault(host, set()).add(int(part))
    return {host: tuple(sorted(slots)) for host, slots in chosen.items()}


def spec(hosts: Hosts) -> str:
    """The include filter that names exactly these hosts and slots."""
    return "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in hosts.items())
