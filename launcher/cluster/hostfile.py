"""Hostfile text -> host names and slot ids, in file order, with a strict grammar.

Called by `launcher.cluster.value`. One host a line, `HOST slots=N`; comments, blank lines, CRLF, tabs, a BOM are fine.
Must never accept a line DeepSpeed would read differently: `slots=4x` is an error here and a 4 there.
"""

from __future__ import annotations

import re
from pathlib import Path

from launcher.errors import Problem, UserError, raise_if

FORM = "HOST slots=N, for example `node1 slots=8`"
CREDENTIALS = "credentials do not belong in a hostfile"
_LINE = re.compile(r"^(?P<host>\S+)[ \t]+slots=(?P<slots>[0-9]+)$")
_SECRET = re.compile(r"(passw|secret|token|://)", re.IGNORECASE)
_HOST = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$")


def parse_hostfile(path: Path) -> dict[str, tuple[int, ...]]:
    """Reads `path`; returns {host: (0, ..., slots - 1)}; raises one UserError with every bad line."""
    if not path.is_file():
        raise UserError(
            Problem(
                "cluster.hostfile",
                str(path),
                "there is no such file",
                f"name an existing file; each line is {FORM}",
            )
        )
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is not UTF-8: {error.reason}"
        raise UserError(Problem("cluster.hostfile", str(path), f"it {reason}", f"each line is {FORM}")) from None
    return parse_lines(text, str(path))


def parse_lines(text: str, name: str) -> dict[str, tuple[int, ...]]:
    """Parses hostfile `text`; `name` is the file shown in messages as NAME:LINE."""
    hosts: dict[str, tuple[int, ...]] = {}
    first_seen: dict[str, int] = {}
    problems: list[Problem] = []
    for number, raw in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        problem = _line_problem(line)
        if problem is not None:
            got = "(not shown)" if problem[0] == CREDENTIALS else raw.strip()
            problems.append(Problem(f"{name}:{number}", got, *problem))
            continue
        match = _LINE.match(line)
        assert match is not None
        host = match["host"]
        if host in hosts:
            problems.append(
                Problem(
                    f"{name}:{number}",
                    raw.strip(),
                    f"host {host} is already on line {first_seen[host]}",
                    "keep one line per host, with all its slots",
                )
            )
            continue
        hosts[host], first_seen[host] = tuple(range(int(match["slots"]))), number
    if not hosts and not problems:
        problems.append(Problem(name, "no host", "the file names no host", f"each line is {FORM}"))
    raise_if(problems)
    return hosts


def _line_problem(line: str) -> tuple[str, str] | None:
    """(why, fix) when `line` is not exactly HOST slots=N."""
    host, match = line.split()[0], _LINE.match(line)
    named = match is not None and _HOST.match(host)  # a machine may be called token-ring
    if (not named and _SECRET.search(line)) or re.match(r"^[^@\s]+:[^@\s]+@", host):
        return CREDENTIALS, "use SSH keys; the line is " + FORM
    if "@" in host:
        return (
            "'@' separates hosts in include/exclude filters",
            f"put the user name into ~/.ssh/config (Host {host.split('@')[-1]}, User ...) and name only the host",
        )
    if host.count(":") == 1:
        return "a port does not belong in a hostfile", "set cluster.ssh_port or ~/.ssh/config; the line is " + FORM
    if ":" in host:
        return (
            "DeepSpeed's filters cannot hold an IPv6 address",
            "give the address a name in /etc/hosts or ~/.ssh/config and use the name",
        )
    if match is None:
        extra = re.match(r"^\S+[ \t]+slots=[0-9]+[ \t]+(\S.*)$", line)
        if extra:
            return f"{extra[1]!r} after the slots is not read by DeepSpeed", "remove it; the line is " + FORM
        return "the line is not of the expected form", "write " + FORM
    if not _HOST.match(host):
        return "the host name has characters that no host name has", "write " + FORM
    if not match["slots"].strip("0"):
        return "a host without slots takes no part", "remove the line or give it slots=1 or more"
    if len(match["slots"].lstrip("0")) > 4 or int(match["slots"]) > 1024:
        return "no machine has that many accelerators", "slots is the number of GPUs of the host"
    return None
