"""Claims about which hosts and slots a request uses: filters, uneven hosts, Slurm, and this machine's GPUs.

Run by pytest; the hostfile's grammar is in test_hostfile.py.
Must never look at the machine's own GPUs or its own allocation.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import env
from launcher.cluster import value
from launcher.cluster.filters import apply_filters, parse_filter, spec
from launcher.cluster.slurm import expand_nodelist, slurm_hosts
from launcher.errors import UserError
from tests.plan.asking import planned, refuses

THREE = {name: tuple(range(8)) for name in ("node1", "node2", "node3")}
ALL = tuple(range(8))


# --- include and exclude: deepspeedai/DeepSpeed#6671 -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "hosts"),
    [
        pytest.param("node3", {"node3": ALL}, id="DeepSpeed#6671 host without slots"),
        pytest.param("node3:1,2@node1", {"node1": ALL, "node3": (1, 2)}, id="DeepSpeed#6671 the hostfile's order"),
        pytest.param("node2:7,0,7", {"node2": (0, 7)}, id="sorted, once"),
        pytest.param("node2:0@node2:1", {"node2": (0, 1)}, id="a host twice"),
        pytest.param(" node2:0, 1 ", {"node2": (0, 1)}, id="spaces"),
    ],
)
def test_include_uses_exactly_what_it_names(include: str, hosts: dict[str, tuple[int, ...]]) -> None:
    assert apply_filters(THREE, include, None) == hosts
    assert list(apply_filters(THREE, include, None)) == list(hosts)


@pytest.mark.parametrize(
    ("exclude", "hosts"),
    [
        ("node2:0", {"node1": ALL, "node2": (1, 2, 3, 4, 5, 6, 7), "node3": ALL}),
        ("node2", {"node1": ALL, "node3": ALL}),
        ("node1@node2:0,1,2,3,4,5,6,7", {"node3": ALL}),
    ],
)
def test_exclude_leaves_the_rest(exclude: str, hosts: dict[str, tuple[int, ...]]) -> None:
    assert apply_filters(THREE, None, exclude) == hosts


def test_without_a_filter_every_host_is_used() -> None:
    assert apply_filters(THREE, None, None) == THREE


@pytest.mark.parametrize(
    ("include", "exclude", "contents"),
    [
        pytest.param(
            *("node9", None, ("cluster.include", "node9 is not a host", "hosts: node1, node2, node3")),
            id="DeepSpeed#6671 unknown host",
        ),
        pytest.param(
            *(None, "node9:0", ("cluster.exclude", "node9 is not a host", "hosts: node1, node2, node3")),
            id="DeepSpeed#6671 unknown host excluded",
        ),
        pytest.param(
            *("node1:8", None, ("cluster.include", "slot 8 is not one of node1's", "use ids 0..7, or raise slots")),
            id="DeepSpeed#6671 slot out of range",
        ),
        pytest.param(
            *("node1", "node2", ("cluster.include", "DeepSpeed takes one of the two")), id="DeepSpeed#6671 both"
        ),
        pytest.param(
            *(None, "node1@node2@node3", ("cluster.exclude", "nothing is left to run on", "exclude less")),
            id="DeepSpeed#6671 empty result",
        ),
        pytest.param(
            *("node1:", None, ("empty slot list for node1", "write node1 for all slots, or node1:0,1")),
            id="DeepSpeed#2601 empty slot list",
        ),
        pytest.param("node1:0,", None, ("slot (empty) is not one of node1's",), id="DeepSpeed#2601 trailing comma"),
        pytest.param("node1:-1", None, ("slot -1 is not one of node1's",), id="negative slot"),
        pytest.param("node1:0-3", None, ("slot 0-3 is not one of node1's",), id="range of slots"),
        pytest.param("node1@", None, ("an empty name is not a host",), id="trailing separator"),
        pytest.param("ops@node1", None, ("ops is not a host",), id="DeepSpeedExamples#575 user@host"),
        pytest.param("node1,node2", None, ("node1,node2 is not a host",), id="comma between hosts"),
    ],
)
def test_a_filter_that_names_what_is_not_there_is_refused(
    include: str | None, exclude: str | None, contents: tuple[str, ...]
) -> None:
    with refuses(*contents):
        apply_filters(THREE, include, exclude)


def test_slots_count_what_exists_not_what_is_wanted() -> None:
    """deepspeedai/DeepSpeed#3624: GPUs 2 and 3 of a host listed with slots=2."""
    with refuses("slots=N counts the GPUs that exist, so ids run from 0 to 1", "raise slots in the hostfile"):
        apply_filters({"work1": (0, 1)}, "work1:2,3", None)


@given(st.dictionaries(st.sampled_from(list(THREE)), st.sets(st.integers(0, 7), min_size=1), min_size=1))
def test_spec_is_the_filter_that_gives_the_same_hosts(chosen: dict[str, set[int]]) -> None:
    hosts = {name: tuple(sorted(chosen[name])) for name in THREE if name in chosen}
    assert apply_filters(THREE, spec(hosts), None) == hosts


@given(st.text(alphabet="node123:,@ -x", max_size=25))
def test_any_filter_gives_a_selection_or_a_refusal(text: str) -> None:
    try:
        chosen = parse_filter(text, THREE, "cluster.include")
    except UserError as error:
        assert [problem.where for problem in error.problems] == ["cluster.include"]
        return
    assert chosen and all(slots and set(slots) <= set(THREE[name]) for name, slots in chosen.items())


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def uneven(tmp_path: Path) -> tuple[str, ...]:
    path = tmp_path / "uneven"
    path.write_text("alpha slots=2\nbeta slots=4\n")
    return ("cluster=hostfile", f"cluster.hostfile={path}")


def test_ranks_of_uneven_hosts_follow_the_hostfile(uneven: tuple[str, ...]) -> None:
    """deepspeedai/DeepSpeed#3408."""
    cluster = planned(*uneven).cluster
    assert cluster.rank_hosts() == ["alpha"] * 2 + ["beta"] * 4
    assert (cluster.world_size, cluster.slots_per_host, cluster.local) == (6, None, False)


def test_filtered_ranks_follow_the_hostfile(uneven: tuple[str, ...]) -> None:
    cluster = planned(*uneven, 'cluster.include="beta:1,3@alpha"').cluster
    assert [(host.name, host.slots) for host in cluster.hosts] == [("alpha", (0, 1)), ("beta", (1, 3))]
    assert cluster.slots_per_host == 2


def test_a_process_count_is_refused_beside_a_hostfile(uneven: tuple[str, ...]) -> None:
    """deepspeedai/DeepSpeed#3408: DeepSpeed would start more processes than alpha has slots."""
    with refuses("cluster.num_procs", "4", "the slots decide", "cluster.include"):
        planned(*uneven, "cluster.num_procs=4")


def test_one_host_of_a_hostfile_is_still_a_cluster(one_host: tuple[str, ...]) -> None:
    cluster = planned(*one_host).cluster
    assert (cluster.local, cluster.world_size, cluster.slots_per_host) == (False, 4, 4)


# --- Slurm -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("alpha", ["alpha"]),
        ("alpha,beta", ["alpha", "beta"]),
        ("a[01-03,7],b", ["a01", "a02", "a03", "a7", "b"]),
        ("a[098-101]", ["a098", "a099", "a100", "a101"]),
        ("rack[1-2]n[01-02].x", ["rack1n01.x", "rack1n02.x", "rack2n01.x", "rack2n02.x"]),
        ("z9,a[2,1]", ["z9", "a2", "a1"]),
    ],
)
def test_slurm_node_lists_are_expanded_in_order(nodelist: str, hosts: list[str]) -> None:
    assert expand_nodelist(nodelist) == hosts


@pytest.mark.parametrize(
    ("variables", "counts"),
    [
        ({"SLURM_GPUS_ON_NODE": "8"}, [8, 8, 8]),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, [4, 4, 4]),
        ({"SLURM_GPUS_PER_NODE": "2"}, [2, 2, 2]),
        ({"SLURM_TASKS_PER_NODE": "2(x2),1"}, [2, 2, 1]),
        ({"SLURM_TASKS_PER_NODE": "3(x3)"}, [3, 3, 3]),
        ({"SLURM_GPUS_ON_NODE": "0", "SLURM_TASKS_PER_NODE": "2(x3)"}, [2, 2, 2]),
    ],
)
def test_slurm_slots_are_gpus_else_tasks(variables: dict[str, str], counts: list[int]) -> None:
    hosts = slurm_hosts({"SLURM_JOB_NODELIST": "n[1-3]"} | variables)
    assert [len(slots) for slots in hosts.values()] == counts


def test_slurm_outside_an_allocation_is_refused() -> None:
    with refuses("SLURM_JOB_NODELIST is not set", "run it under salloc"):
        slurm_hosts({})


def test_slurm_counts_that_do_not_fit_the_nodes_are_refused() -> None:
    with refuses("SLURM_TASKS_PER_NODE", "2(x2)", "it counts 2 nodes, the allocation has 3"):
        slurm_hosts({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2)"})


def test_a_slurm_allocation_becomes_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_GPUS_ON_NODE": "2"}
    monkeypatch.setattr(env, "slurm", lambda: variables)
    plan = planned("cluster=slurm", "cluster.exclude=n1")
    assert [(host.name, host.slots) for host in plan.cluster.hosts] == [("n2", (0, 1)), ("n3", (0, 1))]
    assert plan.config.cluster.launcher == "slurm"


# --- GPUs of this machine: deepspeedai/DeepSpeed#2601 ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "wanted", "slots"),
    [(None, None, (0, 1, 2, 3)), (None, 2, (0, 1)), ("2,3", None, (2, 3)), ("3,1", 1, (3,)), ("0,1,", None, (0, 1))],
)
def test_local_slots_are_the_visible_gpus(
    visible: str | None, wanted: int | None, slots: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value, "count_gpus", lambda: 4)
    monkeypatch.setattr(env, "visible_devices", lambda: visible)
    request = [] if wanted is None else [f"cluster.num_procs={wanted}"]
    cluster = planned("cluster.accelerator=cuda", *request).cluster
    assert (cluster.hosts[0].slots, cluster.accelerator, cluster.local) == (slots, "cuda", True)


@pytest.mark.parametrize(
    ("visible", "contents"),
    [
        ("", ("0 GPUs are usable here (CUDA_VISIBLE_DEVICES=)", "use cluster.accelerator=cpu")),
        ("-1", ("0 GPUs are usable here (CUDA_VISIBLE_DEVICES=-1)",)),
        ("0,-1,1", ("1 GPUs are usable here",)),
        ("GPU-8f2a,GPU-91bc", ("CUDA_VISIBLE_DEVICES", "GPU-8f2a,GPU-91bc", "name the cards by index")),
        ("0", ("cluster.num_procs", "1 GPUs are usable here (CUDA_VISIBLE_DEVICES=0)")),
    ],
)
def test_gpus_that_cannot_be_used_are_refused(
    visible: str, contents: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "visible_devices", lambda: visible)
    with refuses(*contents):
        planned("cluster.accelerator=cuda", "cluster.num_procs=2")


@pytest.mark.parametrize(
    ("requested", "gpus", "accelerator"), [(None, 0, "cpu"), (None, 2, "cuda"), ("cpu", 2, "cpu"), ("cuda", 0, "cuda")]
)
def test_auto_takes_the_gpus_unless_ds_accelerator_says_otherwise(
    requested: str | None, gpus: int, accelerator: str, monkeypatch: pytest.MonkeyPatch, one_host: tuple[str, ...]
) -> None:
    monkeypatch.setattr(value, "count_gpus", lambda: gpus)
    monkeypatch.setattr(env, "requested_accelerator", lambda: requested)
    section = planned(*one_host).config.cluster
    section.accelerator = "auto"
    assert value.resolve(section).accelerator == accelerator
