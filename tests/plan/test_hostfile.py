"""Claims about the hostfile's grammar.

Run by pytest; that DeepSpeed reads the accepted lines alike is tested in tests/run/test_hostfile_parity.py.
Must never accept a line for what it begins with.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.cluster.hostfile import parse_hostfile, parse_lines
from launcher.errors import Problem, UserError
from tests.plan.asking import refuses

FORM = "HOST slots=N, for example `node1 slots=8`"


def problems(text: str) -> list[Problem]:
    """The problems of hostfile `text`, called hosts; fails when it is accepted."""
    with pytest.raises(UserError) as refusal:
        parse_lines(text, "hosts")
    assert refusal.value.code == 2
    return list(refusal.value.problems)


# --- accepted --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"alpha slots=2\nbeta slots=3\n", id="plain"),
        pytest.param(b"alpha slots=2\nbeta slots=3", id="no final newline"),
        pytest.param(b"\n\nalpha slots=2\n\n  \t\nbeta slots=3\n\n", id="blank lines"),
        pytest.param(
            b"# rack A\n  # two\nalpha slots=2 # two bad GPUs\nbeta slots=3# x\n", id="clustershell#698 comments"
        ),
        pytest.param(b"alpha slots=2\r\nbeta slots=3\r\n", id="CRLF"),
        pytest.param(b"alpha slots=2\rbeta slots=3\r", id="CR"),
        pytest.param(b"\xef\xbb\xbfalpha slots=2\nbeta slots=3\n", id="BOM"),
        pytest.param(b"alpha\tslots=2\nbeta \t slots=3\t\n", id="tabs"),
        pytest.param(b"  alpha slots=2  \n\tbeta slots=3 ", id="spaces around"),
        pytest.param(b"alpha slots=0002\nbeta slots=3\n", id="leading zeros"),
        pytest.param("# Gestell Süd\nalpha slots=2\nbeta slots=3\n".encode(), id="non-ASCII comment"),
    ],
)
def test_a_harmless_variation_reads_the_same(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(content)
    assert parse_hostfile(path) == {"alpha": (0, 1), "beta": (0, 1, 2)}


def test_hosts_keep_the_files_order() -> None:
    assert list(parse_lines("z slots=1\na slots=1\nm slots=1\n", "hosts")) == ["z", "a", "m"]


@pytest.mark.parametrize("host", ["10.0.0.1", "pod-0.svc.ns.local", "NODE_7", "a", "token-ring", "7"])
def test_names_addresses_and_full_domain_names_are_hosts(host: str) -> None:
    """deepspeedai/DeepSpeed#2612: Kubernetes names."""
    assert parse_lines(f"{host} slots=2", "hosts") == {host: (0, 1)}


def test_a_host_may_have_1024_slots_and_no_more() -> None:
    assert len(parse_lines("a slots=1024", "hosts")["a"]) == 1024
    for slots in ("1025", "9" * 5000):
        [problem] = problems(f"a slots={slots}")
        assert problem.why == "no machine has that many accelerators"


# --- refused, with file, line and text -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "why"),
    [
        pytest.param("10.0.0.2 lots=8", "the line is not of the expected form", id="DeepSpeed#3669 lots=8"),
        pytest.param("beta slots=4x", "the line is not of the expected form", id="clustershell#698 slots=4x"),
        pytest.param("beta slots=4.5", "the line is not of the expected form", id="clustershell#698 slots=4.5"),
        pytest.param("beta slots = 4", "the line is not of the expected form", id="clustershell#698 slots = 4"),
        pytest.param(
            "beta slots=4 max_slots=8", "'max_slots=8' after the slots is not read", id="clustershell#698 max"
        ),
        pytest.param("beta", "the line is not of the expected form", id="no slots"),
        pytest.param("slots=4", "the line is not of the expected form", id="no host"),
        pytest.param("beta slots=", "the line is not of the expected form", id="no number"),
        pytest.param("beta slots=-1", "the line is not of the expected form", id="negative"),
        pytest.param("beta slots=٤", "the line is not of the expected form", id="other digits"),
        pytest.param("beta, slots=4", "the host name has characters that no host name has", id="comma"),
        pytest.param("-beta slots=4", "the host name has characters that no host name has", id="option"),
        pytest.param("$(id) slots=4", "the host name has characters that no host name has", id="shell"),
        pytest.param("bêta slots=4", "the host name has characters that no host name has", id="non-ASCII"),
        pytest.param("beta slots=0", "a host without slots takes no part", id="zero"),
        pytest.param("beta slots=000", "a host without slots takes no part", id="zeros"),
        pytest.param(
            "ops@10.0.0.5 slots=2", "'@' separates hosts in include/exclude", id="DeepSpeedExamples#575 user@host"
        ),
        pytest.param("beta:2222 slots=4", "a port does not belong in a hostfile", id="port"),
        pytest.param("fe80::1 slots=4", "DeepSpeed's filters cannot hold an IPv6 address", id="IPv6"),
        pytest.param("[fe80::1] slots=4", "DeepSpeed's filters cannot hold an IPv6 address", id="IPv6 brackets"),
        pytest.param("beta\u00a0slots=4", "the line is not of the expected form", id="no-break space"),
        pytest.param("beta\x0bslots=4", "the line is not of the expected form", id="vertical tab"),
    ],
)
def test_a_bad_line_is_named_with_its_number_text_and_form(line: str, why: str) -> None:
    [problem] = problems(f"# rack A\nalpha slots=8\n\n{line}\ngamma slots=8\n")
    assert (problem.where, problem.got) == ("hosts:4", line)
    assert why in problem.why
    assert problem.fix


@pytest.mark.parametrize(
    "line",
    [
        "ops:hunter2@beta slots=4",
        "beta slots=4 password=hunter2",
        "ssh://hunter2@beta slots=4",
        "token=hunter2 slots=4",
    ],
)
def test_credentials_are_refused_and_not_shown(line: str) -> None:
    [problem] = problems(f"{line}\n")
    assert (problem.got, problem.why) == ("(not shown)", "credentials do not belong in a hostfile")
    assert "hunter2" not in str(problem)
    assert "use SSH keys" in problem.fix


def test_the_form_is_part_of_the_fix() -> None:
    [problem] = problems("beta slots=4x")
    assert problem.fix == f"write {FORM}"


def test_a_user_name_is_sent_to_the_ssh_configuration() -> None:
    [problem] = problems("ops@10.0.0.5 slots=2")
    assert problem.fix == "put the user name into ~/.ssh/config (Host 10.0.0.5, User ...) and name only the host"


def test_a_host_listed_twice_names_both_lines() -> None:
    """deepspeedai/DeepSpeed#2626."""
    [problem] = problems("alpha slots=4\nbeta slots=4\nalpha slots=2\n")
    assert (problem.where, problem.got) == ("hosts:3", "alpha slots=2")
    assert problem.why == "host alpha is already on line 1"


def test_every_bad_line_is_reported_at_once() -> None:
    found = problems("alpha slots=4\nbeta slots=4x\ngamma slots = 4\ndelta slots=4 max_slots=8\nalpha slots=1\n")
    assert [problem.where for problem in found] == ["hosts:2", "hosts:3", "hosts:4", "hosts:5"]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", " \t \r\n"])
def test_a_file_without_hosts_is_refused(text: str) -> None:
    [problem] = problems(text)
    assert (problem.where, problem.got, problem.why) == ("hosts", "no host", "the file names no host")
    assert problem.fix == f"each line is {FORM}"


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with refuses("cluster.hostfile", f"{tmp_path}/none", "there is no such file", FORM):
        parse_hostfile(tmp_path / "none")
    with refuses("cluster.hostfile", str(tmp_path), "there is no such file"):
        parse_hostfile(tmp_path)
    (tmp_path / "latin1").write_bytes("süd slots=4\n".encode("latin-1"))
    with refuses("cluster.hostfile", "latin1", "it is not UTF-8: invalid"):
        parse_hostfile(tmp_path / "latin1")


# --- anything else ---------------------------------------------------------------------------------------------------

PIECES = [
    "a",
    "b.c",
    "node-1",
    "slots=",
    "4",
    "0",
    "#",
    " ",
    "\t",
    "\r",
    "\n",
    "=",
    "@",
    ":",
    "x",
    "\ufeff",
    "\x0b",
    "²",
]


@given(st.text(max_size=60) | st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
@example("a slots=" + "9" * 5000)
@example("a slots=4\x85b slots=4")
def test_any_text_gives_hosts_or_a_refusal_with_file_and_line(text: str) -> None:
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    try:
        hosts = parse_lines(text, "hosts")
    except UserError as error:
        for problem in error.problems:
            file, _, line = problem.where.partition(":")
            assert file == "hosts"
            assert problem.why == "the file names no host" if not line else 1 <= int(line) <= len(lines)
            assert problem.got in ("no host", "(not shown)") or problem.got == lines[int(line) - 1].strip()
        return
    said = [line.split("#")[0].split() for line in lines]
    assert [(host, f"slots={len(slots)}") for host, slots in hosts.items()] == [
        (host, f"slots={int(slots.removeprefix('slots='))}") for host, slots in (words for words in said if words)
    ]
    assert all(slots == tuple(range(len(slots))) and slots for slots in hosts.values())
