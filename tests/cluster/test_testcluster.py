"""Claims about scripts/testcluster: what it makes behaves as SSH hosts, and it leaves nothing behind.

Called by pytest; skips with the reason where a machine cannot make hosts.
Must never change hosts without the fixtures, which hold the claim on them.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.hosts import TESTCLUSTER, Hosts, call, claimed, status

pytestmark = pytest.mark.cluster

# The hosts answer in about 0.1 s, and in 0.5 s where the login shell of this machine is slow.
SSH = ["ssh", "-o", "ConnectTimeout=2"]


@pytest.fixture
def fake_program(tmp_path, monkeypatch):
    """fake_program(NAME, SCRIPT) puts a shell script of that name first in PATH."""

    def put(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


def traces() -> list[str]:
    """Everything on the machine that bears the mark of the hosts."""
    patterns = ("run/zerolaunch-testcluster", "run/netns/zl-*", "etc/netns/zl-*")
    files = [str(found) for pattern in patterns for found in Path("/").glob(pattern)]
    links = [line for line in run("ip", "-o", "link").splitlines() if "zl-" in line or "bridge0" in line]
    sshds = [line for line in run("ps", "-eo", "args").splitlines() if "zerolaunch-testcluster/" in line]
    return [*files, *links, *sshds]


def run(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


@contextmanager
def asleep(hosts: Hosts, name: str, length_s: str = "60") -> Iterator[subprocess.Popen]:
    """A sleep that runs on a host, and is killed in the end."""
    with hosts.popen(name, ["sleep", length_s]) as process:
        try:
            while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":  # on its way onto the host
                assert process.poll() is None
                time.sleep(0.01)
            yield process
        finally:
            process.kill()


def refused(*argv: str) -> str:
    """What testcluster says on stderr as it fails."""
    done = subprocess.run([*TESTCLUSTER, *argv], capture_output=True, text=True)
    assert done.returncode == 1
    return done.stderr


# The hosts ---------------------------------------------------------------------------------------------------------


def test_a_host_has_its_own_name_and_address_inside_and_over_ssh(two_hosts):
    for name in two_hosts.names:
        for way in (["sh", "-c"], ["ssh", name]):
            seen = two_hosts.exec(name, [*way, "hostname; hostname -I"])
            assert seen.stdout.split() == [name, two_hosts.address(name)], seen.stderr


def test_an_ssh_session_finds_every_host_and_itself_by_name(two_hosts):
    seen = two_hosts.exec("zl-node1", ["ssh", "zl-node2", "cat /etc/hosts; ip -o address show dev lo up"]).stdout
    hosts_file, _, loopback = seen.partition("1:")
    assert hosts_file == "127.0.0.1 localhost\n10.213.7.1 zl-node1\n10.213.7.2 zl-node2\n"
    assert "127.0.0.1/8" in loopback


def test_hosts_ssh_to_each_other_without_a_prompt(two_hosts):
    for here, there in (("zl-node1", "zl-node2"), ("zl-node2", "zl-node1")):
        # No terminal and no input: a prompt would fail here.
        seen = two_hosts.exec(here, ["ssh", there, "hostname"], stdin=subprocess.DEVNULL, start_new_session=True)
        assert (seen.stdout, seen.stderr) == (f"{there}\n", "")


def test_pdsh_reaches_all_hosts(two_hosts):
    seen = two_hosts.exec("zl-node1", ["pdsh", "-R", "ssh", "-w", "zl-node1,zl-node2", "hostname"])
    assert sorted(seen.stdout.splitlines()) == ["zl-node1: zl-node1", "zl-node2: zl-node2"]


def test_ssh_brings_nothing_of_the_callers_environment(two_hosts):
    seen = two_hosts.exec("zl-node1", ["ssh", "zl-node2", "env"], env={**os.environ, "LC_ZL": "x", "ZL_PROBE": "x"})
    assert "HOME=" in seen.stdout
    assert "ZL_PROBE" not in seen.stdout and "LC_ZL" not in seen.stdout


def test_exec_passes_environment_folder_options_and_exit_code(two_hosts, tmp_path):
    script = 'echo "$ZL_PROBE" "$PWD" "$@"; exit 7'
    seen = two_hosts.exec(
        "zl-node2", ["sh", "-c", script, "sh", "--", "-x", "a  b"], cwd=tmp_path, env={**os.environ, "ZL_PROBE": "p"}
    )
    assert (seen.stdout, seen.returncode) == (f"p {tmp_path} -- -x a  b\n", 7)


def test_popen_is_the_command_itself_with_default_signals(two_hosts):
    seen = two_hosts.exec("zl-node1", ["sh", "-c", "grep SigIgn /proc/$$/status"])
    assert seen.stdout.split() == ["SigIgn:", "0" * 16]
    with asleep(two_hosts, "zl-node1") as process:
        process.terminate()
        assert process.wait(timeout=5) == -signal.SIGTERM


def test_pids_are_those_of_one_host_without_its_sshd(two_hosts):
    assert two_hosts.pids("zl-node1") == []
    with asleep(two_hosts, "zl-node1") as process:
        assert two_hosts.pids("zl-node1") == [process.pid]
        assert two_hosts.pids("zl-node2") == []


def test_pkill_over_ssh_reaches_one_host_only(two_hosts):
    # An uncommon length marks the sleeps; the ssh that asks bears it too, on the host that must be spared.
    length = f"60.{os.getpid()}"
    with asleep(two_hosts, "zl-node1", length) as spared, asleep(two_hosts, "zl-node2", length) as killed:
        assert two_hosts.exec("zl-node1", ["ssh", "zl-node2", f"pkill -f 'sleep {length}'"]).returncode == 0
        assert killed.wait(timeout=5) == -signal.SIGTERM
        assert spared.poll() is None


def test_link_down_cuts_ssh_and_link_up_restores_it(two_hosts):
    ask = [*SSH, "zl-node2", "hostname"]
    two_hosts.link_down("zl-node2")
    cut = two_hosts.exec("zl-node1", ask)
    assert cut.returncode == 255
    assert "zl-node2 port 22" in cut.stderr
    assert two_hosts.exec("zl-node2", ask).stdout == "zl-node2\n"
    two_hosts.link_up("zl-node2")
    assert two_hosts.exec("zl-node1", ask).stdout == "zl-node2\n"


def test_another_number_of_hosts_replaces_them(make_hosts):
    three = make_hosts(3)
    assert three.names == ["zl-node1", "zl-node2", "zl-node3"]
    assert three.exec("zl-node3", [*SSH, "zl-node1", "hostname"]).stdout == "zl-node1\n"


# What is left behind -----------------------------------------------------------------------------------------------


def test_down_leaves_nothing_and_may_be_repeated(two_hosts):
    assert traces()
    # Outlives its ssh session and its process group, as a hung training does.
    orphan = two_hosts.exec("zl-node1", ["ssh", "zl-node2", "setsid sleep 60 >/dev/null 2>&1 & echo $!"])
    assert len(two_hosts.pids("zl-node2")) == 1, orphan
    (pid,) = two_hosts.pids("zl-node2")
    for _ in range(2):
        call("down", "--claimed")
        assert traces() == []
    assert not Path(f"/proc/{pid}/ns/net").exists()


def test_status_tells_a_dead_sshd_and_up_replaces_it(two_hosts):
    os.kill(status()[1]["sshd_pid"], signal.SIGKILL)
    seen = subprocess.run([*TESTCLUSTER, "status"], capture_output=True, text=True)
    assert seen.returncode == 1
    one, two = seen.stdout.splitlines()
    assert one.endswith(" reachable") and two.split() == ["zl-node2", "10.213.7.2", "sshd", "dead", "UNREACHABLE"]
    call("up", "2", "--claimed")
    assert all(row["reachable"] for row in status())


def test_up_clears_what_a_namespace_deleted_by_hand_leaves(two_hosts):
    pid = status()[1]["sshd_pid"]
    run("ip", "netns", "delete", "zl-node2")
    Path("/run/netns/zl-node2").touch()  # what a death inside `ip netns add` leaves
    call("up", "2", "--claimed")
    assert all(row["reachable"] for row in status())
    assert not Path(f"/proc/{pid}/ns/net").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_up_ended_midway_cleans_up_or_leaves_it_to_the_next(make_hosts, number):
    call("down", "--claimed")
    process = subprocess.Popen([*TESTCLUSTER, "up", "2", "--claimed"], stderr=subprocess.PIPE, text=True)
    while not Path("/etc/netns/zl-node1").exists():
        assert process.poll() is None
    process.send_signal(number)
    assert process.communicate()[1] == ""
    if number == signal.SIGKILL:
        assert traces()
        call("up", "2", "--claimed")
        assert all(row["reachable"] for row in status())
    else:
        assert process.returncode == 128 + number
        assert traces() == []


def test_up_that_fails_midway_cleans_up_and_says_one_line(make_hosts, fake_program):
    fake_program("sshd", 'echo "first" >&2; echo "no entropy" >&2; exit 1')
    message = refused("up", "2", "--claimed")
    assert message.count("\n") == 1
    assert message.startswith("testcluster: ") and message.endswith(": no entropy\n")
    assert traces() == []


def test_root_folder_takes_the_state_and_is_left_empty(make_hosts, tmp_path):
    tmp_path.chmod(0o777)  # sshd would refuse keys below it, were it not told otherwise
    call("up", "1", "--claimed", "--root", str(tmp_path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["zerolaunch-testcluster"]
    assert (tmp_path / "zerolaunch-testcluster").stat().st_mode & 0o777 == 0o700
    call("down", "--claimed")
    assert list(tmp_path.iterdir()) == []
    assert traces() == []


# What is refused ---------------------------------------------------------------------------------------------------


def test_up_and_down_are_refused_while_another_is_at_work(two_hosts):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind("\0zerolaunch-testcluster-busy")
        for verb in (["up", "2"], ["down"]):
            assert refused(*verb, "--claimed") == "testcluster: another up or down is at work\n"
    assert all(row["reachable"] for row in status())


def test_others_are_refused_while_a_test_session_uses_the_hosts(two_hosts):
    for verb in (["up", "2"], ["down"]):
        assert refused(*verb) == "testcluster: a test session is using the hosts; wait for it or end it\n"
    with pytest.raises(TimeoutError, match="another test session has used the hosts for 0 s"), claimed(wait_s=0):
        pass


def test_unknown_host_is_named_with_those_that_are_up(two_hosts):
    expected = "testcluster: no host 'zl-node7'; up are: zl-node1, zl-node2\n"
    assert refused("exec", "zl-node7", "--", "true") == refused("link", "zl-node7", "down") == expected


def test_a_caller_without_root_is_told_so():
    # In a user namespace without a mapping, root is nobody.
    done = subprocess.run(["unshare", "--user", *TESTCLUSTER, "up", "2"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "testcluster: root is needed to make network namespaces\n")
