"""Reading where nodes are, distance and order, and the scatter report."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.launcher.coordination.topology import (
    choose,
    distance,
    natural_key,
    order,
    own_levels,
    read_topology,
    scatter,
)
from keepstep.records.errors import ConfigError
from keepstep.records.hostlist import expand_hosts

LEVELS = st.lists(st.sampled_from(["g1", "g2", "g10"]), max_size=3)
NAMES = st.integers(0, 30).map("n{}".format)
PLACES = st.dictionaries(NAMES, LEVELS, min_size=1, max_size=12)


def written(folder: Path, text: str) -> Path:
    path = folder / "topology.conf"
    path.write_text(text)
    return path


# ---- files

HOSTS = [
    ("n7", ["n7"]),
    ("n[1-3]", ["n1", "n2", "n3"]),
    ("n[008-010,7],login", ["n008", "n009", "n010", "n7", "login"]),
    ("r[1-2]n[0-1]", ["r1n0", "r1n1", "r2n0", "r2n1"]),
    ("gpu-a.site[1].x", ["gpu-a.site1.x"]),
]


@pytest.mark.parametrize(("text", "names"), HOSTS)
def test_host_lists(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    "text", ["", "a,,b", "n[1-", "n]1[", "n[3-1]", "n[a-b]", "n[]", "n[1-200000]", "r[1-999]n[1-999]"]
)
def test_wrong_host_lists(text: str) -> None:
    with pytest.raises(ValueError):
        expand_hosts(text)


@given(st.integers(0, 5000), st.integers(0, 200), st.integers(1, 6))
def test_a_range_names_each_number_once_at_its_width(low: int, more: int, width: int) -> None:
    names = expand_hosts(f"n[{str(low).zfill(width)}-{str(low + more).zfill(width)}]")
    assert [int(name[1:]) for name in names] == list(range(low, low + more + 1))
    assert all(len(name) - 1 >= width for name in names)


def test_own_format(tmp_path: Path) -> None:
    path = written(tmp_path, "# site A\nn[01-02] block1 leaf1\n\nn3 block1 leaf2 # new\nn4\n")
    assert read_topology(path) == {
        "n01": ["block1", "leaf1"],
        "n02": ["block1", "leaf1"],
        "n3": ["block1", "leaf2"],
        "n4": [],
    }


def test_slurm_tree(tmp_path: Path) -> None:
    text = "SwitchName=s1 Nodes=n[1-2]\nswitchname=s2 nodes=n3 LinkSpeed=900\nSwitchName=s0 Switches=s[1-2]\n"
    text += "SwitchName=top Switches=s0 # core\n"
    levels = read_topology(written(tmp_path, text))
    assert levels == {"n1": ["top", "s0", "s1"], "n2": ["top", "s0", "s1"], "n3": ["top", "s0", "s2"]}


def test_slurm_blocks(tmp_path: Path) -> None:
    path = written(tmp_path, "BlockName=b1 Nodes=n[1-2]\nBlockName=b2 Nodes=n[3-4]\nBlockSizes=2,4\n")
    assert read_topology(path) == {"n1": ["b1"], "n2": ["b1"], "n3": ["b2"], "n4": ["b2"]}


WRONG_FILES = {
    "no node": ("# nothing\n", "names no node"),
    "twice": ("n1 a\nn[1-2] b\n", "line 2: node 'n1' is in line 1 already"),
    "range": ("n1 a\nn[3-1] b\n", "line 2: [3-1]"),
    "yaml": ("---\n- topology: default\n", "line 1: '---' is not NODE"),
    "mixed": ("n1 a\nSwitchName=s0 Nodes=n2\n", "line 2"),
    "slurm key": ("SwitchName=s0 Node=n1\n", "line 1: Node=n1 is not one of"),
    "slurm half": ("SwitchName=s0\n", "line 1: 'SwitchName=s0' needs"),
    "slurm twice": ("SwitchName=s0 Nodes=n1\nSwitchName=s0 Nodes=n2\n", "line 2: 's0' is in line 1 already"),
    "slurm undefined": (
        "SwitchName=s0 Switches=s[1-2]\nSwitchName=s1 Nodes=n1\n",
        "line 1: no line defines switch 's2'",
    ),
    "slurm loop": ("SwitchName=s0 Switches=s1\nSwitchName=s1 Switches=s0\n", "is below itself"),
    "slurm stray": ("SwitchName=s0 Nodes=n1\nInclude other.conf\n", "line 2: 'Include other.conf' needs"),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, case: str) -> None:
    text, says = WRONG_FILES[case]
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_topology(path)
    assert str(path) in str(caught.value)
    assert says in str(caught.value)


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", binary):
        with pytest.raises(ConfigError, match=path.name):
            read_topology(path)


# ---- environment

ADDR = "SLURM_TOPOLOGY_ADDR"
ENVIRONMENTS = [
    ({}, []),
    ({"KEEPSTEP_TOPOLOGY": "b1/s1/l1", ADDR: "s0.n1", ADDR + "_PATTERN": "switch.node"}, ["b1", "s1", "l1"]),
    ({ADDR: "s0.s1.n1", ADDR + "_PATTERN": "switch.switch.node"}, ["s0", "s1"]),
    ({ADDR: "s0.n1.site.org", ADDR + "_PATTERN": "switch.node"}, ["s0"]),
    ({ADDR: "b7.n1", ADDR + "_PATTERN": "block.node"}, ["b7"]),
    ({ADDR: "n1", ADDR + "_PATTERN": "node"}, []),
    ({ADDR: "s0.n1"}, []),
]


@pytest.mark.parametrize(("env", "levels"), ENVIRONMENTS)
def test_own_levels(env: dict[str, str], levels: list[str]) -> None:
    assert own_levels(env) == levels


@pytest.mark.parametrize("value", ["/a", "a//b", "a/ /b", "a/"])
def test_an_empty_level_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="KEEPSTEP_TOPOLOGY"):
        own_levels({"KEEPSTEP_TOPOLOGY": value})


# ---- distance and order


def test_distance_counts_levels_below_the_common_group() -> None:
    assert distance(["b", "s", "l"], ["b", "s", "l"]) == 0
    assert distance(["b", "s", "l"], ["b", "s", "m"]) == 1
    assert distance(["b", "s", "l"], ["c", "s", "l"]) == 3
    assert distance(["b", "s", "l"], ["b"]) == distance(["b"], ["b", "s", "l"]) == 2
    assert distance([], ["b", "s"]) == 2


@given(LEVELS, LEVELS, LEVELS)
def test_distance_is_a_metric_of_places(a: list[str], b: list[str], c: list[str]) -> None:
    assert distance(a, b) == distance(b, a)
    assert (distance(a, b) == 0) == (a == b)
    assert distance(a, c) <= distance(a, b) + distance(b, c)


def test_natural_order() -> None:
    assert sorted(["n10", "n2", "n02", "m3", "n"], key=natural_key) == ["m3", "n", "n02", "n2", "n10"]


def test_order_is_by_group_then_name_and_unknown_places_come_last() -> None:
    places = {"n1": ["b10"], "n10": ["b2"], "n2": ["b2"], "n0": [], "n3": ["b2", "l1"]}
    assert order(places) == ["n3", "n2", "n10", "n1", "n0"]
    assert order(places, ["n1", "n10"]) == ["n1", "n3", "n10", "n2", "n0"]


@given(PLACES, st.lists(NAMES, max_size=5), st.randoms())
def test_order_keeps_every_group_together(places: dict[str, list[str]], first: list[str], random: Random) -> None:
    names = order(places, first)
    assert sorted(names) == sorted(places)
    for depth in range(1, 4):
        groups = [key for key, _ in itertools.groupby(tuple(places[name][:depth]) for name in names)]
        assert len(groups) == len(set(groups))
    shuffled = list(places)
    random.shuffle(shuffled)
    assert order({name: places[name] for name in shuffled}, first) == names
    known = [name for name in first if name in places]
    if known:
        outermost = places[known[0]][:1]
        assert places[names[0]][:1] == outermost or not outermost


@given(st.lists(st.text("a0129-", max_size=6)))
def test_natural_key_orders_any_names(names: list[str]) -> None:
    assert len({natural_key(name) for name in names}) == len(set(names))
    assert sorted(sorted(names, reverse=True), key=natural_key) == sorted(names, key=natural_key)


# ---- scatter


def test_scatter_of_an_ordered_and_of_a_mixed_job() -> None:
    a, b = ["x", "a"], ["x", "b"]
    good = scatter([a, a, b, b])
    assert good["warning"] is None
    assert good["levels"] == [
        {"level": 0, "groups": 1, "crossings": 0, "best_crossings": 0, "best_groups": 1},
        {"level": 1, "groups": 2, "crossings": 2, "best_crossings": 2, "best_groups": 2},
    ]
    mixed = scatter([a, b, a, b])
    assert mixed["levels"][1]["crossings"] == 4
    assert mixed["warning"] == (
        "the job is more scattered than it need be: level 1: 2 groups (best 2), 4 crossings (best 2)"
    )


def test_scatter_sees_that_a_spare_would_need_fewer_groups() -> None:
    a, b = ["a"], ["b"]
    report = scatter([a, a, b], [a, a, b, a])
    assert report["levels"][0]["best_groups"] == 1
    assert "2 groups (best 1)" in report["warning"]


@given(st.lists(LEVELS, min_size=1, max_size=6))
def test_best_crossings_is_the_least_over_all_orders(ring: list[list[str]]) -> None:
    for entry in scatter(ring)["levels"]:
        level = entry["level"]
        rings = itertools.permutations([tuple(levels[: level + 1]) for levels in ring])
        least = min(sum(one != keys[at - 1] for at, one in enumerate(keys)) for keys in rings)
        assert entry["best_crossings"] == least <= entry["crossings"]


@settings(deadline=None)
@given(st.lists(LEVELS, min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 3))
def test_choose_needs_the_fewest_outermost_groups(places: list[list[str]], units: int, unit: int) -> None:
    n = units * unit
    if n > len(places):
        return
    chosen = choose(places, n, unit)
    assert len(set(chosen)) == n
    assert chosen == sorted(chosen)
    if unit == 1:
        sets = itertools.combinations([tuple(levels[:1]) for levels in places], n)
        assert len({tuple(places[index][:1]) for index in chosen}) == min(len(set(keys)) for keys in sets)


def test_choose_keeps_whole_replicas_inside_a_group() -> None:
    places = [["a"]] * 3 + [["b"]] * 3 + [["c"]] * 2
    assert [places[index][0] for index in choose(places, 6, 2)] == ["a", "a", "b", "b", "c", "c"]
    assert [places[index][0] for index in choose(places, 6, 1)] == ["a", "a", "a", "b", "b", "b"]


def test_choose_takes_the_smallest_group_that_is_large_enough() -> None:
    assert choose([["a"]] * 5 + [["b"]] * 3 + [["c"]], 2) == [5, 6]
    assert choose([["a", "p"], ["a", "q"], ["a", "q"], ["b", "p"]], 2) == [1, 2]
