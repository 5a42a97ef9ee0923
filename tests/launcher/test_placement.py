"""Who gets which ranks: first cycle, substitution, shrinking and growing."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keepstep.launcher.coordination.placement import (
    Candidate,
    Placement,
    Shape,
    Waiting,
    block_nodes,
    place,
)
from keepstep.launcher.coordination.topology import distance, order

LEVELS = st.lists(st.sampled_from("abc"), max_size=3)


def node(name: str, levels: str = "", nproc: int = 2, joined: int = 0) -> Candidate:
    return Candidate(name=name, host=f"host-{name}", nproc=nproc, levels=list(levels), joined=joined)


def nodes(text: str, **fields: Any) -> list[Candidate]:
    """ "a:xy b c" -> nodes a (levels x, y), b and c, joined in this order."""
    parts = [item.partition(":") for item in text.split()]
    return [node(name, levels, joined=at, **fields) for at, (name, _, levels) in enumerate(parts)]


def names(candidates: list[Candidate]) -> str:
    return " ".join(c.name for c in candidates)


def seats(placement: Placement) -> list[tuple[str, int]]:
    return [(c.name, c.nproc) for c in placement.nodes]


def placed(result: Placement | Waiting) -> Placement:
    assert isinstance(result, Placement), result
    return result


def waits(result: Placement | Waiting) -> Waiting:
    assert isinstance(result, Waiting), result
    return result


# ---- cases, first cycle

FIXED = Shape(nnodes=3, min_nodes=3, spares=1)
ELASTIC = Shape(nnodes=4, min_nodes=2)


def test_first_cycle_takes_a_whole_group_and_keeps_the_rest_as_spares() -> None:
    result = placed(place(FIXED, nodes("n4:x n10:y n2:y n9:y"), None, set()))
    assert names(result.nodes) == "n2 n9 n10"
    assert names(result.spares) == "n4"
    assert result.path == "first"
    assert result.scatter["warning"] is None


def test_first_cycle_waits_for_nodes_and_then_for_spares_as_long_as_the_caller_wants() -> None:
    two, three = nodes("a b"), nodes("a b c")
    assert waits(place(FIXED, two, None, set(), wait_for_spares=False)).missing == 1
    assert waits(place(FIXED, two, None, set(), wait_for_nodes=False)).missing == 1
    assert waits(place(FIXED, three, None, set())).missing == 1
    assert names(placed(place(FIXED, three, None, set(), wait_for_spares=False)).nodes) == "a b c"


def test_a_job_that_may_be_smaller_starts_smaller_only_when_the_caller_gives_up() -> None:
    three = nodes("a b c")
    assert waits(place(ELASTIC, three, None, set())).missing == 1
    assert names(placed(place(ELASTIC, three, None, set(), wait_for_nodes=False)).nodes) == "a b c"
    assert waits(place(ELASTIC, three[:1], None, set(), wait_for_nodes=False)).missing == 1


def test_an_excluded_node_is_never_used() -> None:
    result = place(FIXED, nodes("a b c"), None, {"b"}, wait_for_spares=False)
    assert waits(result).reason == "2 of 3 nodes are here"


def test_of_two_nodes_with_one_name_the_first_counts() -> None:
    twins = [node("a", "x", joined=5), node("a", "y", joined=2), node("b", "y", joined=3)]
    result = placed(place(Shape(nnodes=2, min_nodes=2), twins, None, set()))
    assert [(c.name, c.joined) for c in result.nodes] == [("a", 2), ("b", 3)]


# ---- cases, later cycles

SIX = nodes("a:xp b:xp c:xq s1:yp s2:xq s3:xp")
THREE = [("a", 2), ("b", 2), ("c", 2)]


def test_the_same_nodes_again() -> None:
    result = placed(place(FIXED, SIX, THREE, set()))
    assert (names(result.nodes), names(result.spares), result.path) == ("a b c", "s1 s2 s3", "respawn")


@pytest.mark.parametrize(("lost", "spare"), [("a", "s3"), ("c", "s2")])
def test_the_nearest_spare_takes_the_seat_and_nobody_else_moves(lost: str, spare: str) -> None:
    result = placed(place(FIXED, SIX, THREE, {lost}))
    assert names(result.nodes) == "a b c".replace(lost, spare)
    assert result.path == "spare"
    assert result.substitutes == [(lost, spare)]


def test_levels_of_a_node_that_is_gone_come_from_the_caller() -> None:
    here = [c for c in SIX if c.name != "c"]
    assert placed(place(FIXED, here, THREE, {"c"}, places={"c": ["x", "q"]})).substitutes == [("c", "s2")]
    assert placed(place(FIXED, here, THREE, {"c"})).substitutes == [("c", "s1")]


def test_equally_near_spares_go_by_joining() -> None:
    here = [*nodes("a b c"), node("s1", joined=9), node("s2", joined=8)]
    assert placed(place(FIXED, here, THREE, {"b"})).substitutes == [("b", "s2")]


def test_a_spare_with_another_number_of_ranks_cannot_take_the_seat() -> None:
    here = [*nodes("a b"), node("s", nproc=4)]
    waiting = waits(place(FIXED, here, THREE, {"c"}))
    assert (waiting.missing, waiting.reason) == (1, "no spare with the same number of ranks for c")


def test_a_node_that_came_back_takes_its_own_seat_but_not_with_other_ranks() -> None:
    assert placed(place(FIXED, [node("b", joined=99), *nodes("a c s")], THREE, set())).path == "respawn"
    changed = placed(place(FIXED, [node("b", nproc=4), *nodes("a c s")], THREE, set()))
    assert (names(changed.nodes), names(changed.spares)) == ("a s c", "b")


def test_without_a_spare_the_job_shrinks_and_grows_back() -> None:
    four = nodes("a:x b:x c:y d:y")
    before = [(c.name, 2) for c in four]
    small = placed(place(ELASTIC, four, before, {"b"}))
    assert (names(small.nodes), small.path, small.world_size) == ("a c d", "shrink", 6)
    again = placed(place(ELASTIC, four, seats(small), set()))
    assert (names(again.nodes), again.path) == ("a b c d", "grow")
    assert waits(place(ELASTIC, four, before, {"a", "b", "c"})).missing == 1


def test_growing_takes_the_nearest_nodes_first() -> None:
    shape = Shape(nnodes=3, min_nodes=1)
    result = placed(place(shape, nodes("far:p near:x a:x b:x"), [("a", 2), ("b", 2)], set()))
    assert (names(result.nodes), names(result.spares)) == ("a b near", "far")


def test_growing_leaves_earlier_holders_first() -> None:
    result = placed(place(Shape(nnodes=3, min_nodes=1), nodes("a:x b:x c:x"), [("c", 2), ("b", 2)], set()))
    assert names(result.nodes) == "c b a"


def test_a_replica_that_spans_nodes_is_dropped_whole_and_its_rest_helps_the_others() -> None:
    shape = Shape(nnodes=6, min_nodes=2, replica_size=4)
    before = [(name, 2) for name in "abcdef"]
    one = placed(place(shape, nodes("a b c d e f"), before, {"d"}))
    assert (names(one.nodes), names(one.spares), one.path) == ("a b e f", "c", "shrink")
    two = placed(place(shape, nodes("a b c d e f"), before, {"a", "d"}))
    assert (names(two.nodes), two.substitutes) == ("c b e f", [("a", "c")])


def test_nodes_with_other_ranks_make_up_for_lost_ones_when_the_job_may_change() -> None:
    here = [*nodes("a b"), node("s", nproc=4)]
    result = placed(place(Shape(nnodes=3, min_nodes=2), here, THREE, {"c"}))
    assert (names(result.nodes), result.path, result.world_size) == ("a b s", "grow", 8)


def test_with_two_numbers_of_ranks_the_most_frequent_is_taken_and_survivors_stay() -> None:
    twos, fours = nodes("a b c d"), [node(name, nproc=4, joined=9) for name in ("w", "x", "y")]
    assert names(placed(place(ELASTIC, [*fours, *twos], None, set())).nodes) == "a b c d"
    before = [("a", 2), ("b", 2), ("w", 4), ("x", 4)]
    assert names(placed(place(ELASTIC, [*fours[:2], *twos], before, {"x"})).nodes) == "a b w c"


@pytest.mark.parametrize(("nproc", "replica", "expected"), [(8, 1, 1), (8, 4, 1), (8, 16, 2), (8, 12, 3), (1, 6, 6)])
def test_block_nodes(nproc: int, replica: int, expected: int) -> None:
    assert block_nodes(replica, nproc) == expected


# ---- invariants


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Shape, list[Candidate]]:
    """A shape and candidates with up to two numbers of ranks a node."""
    nnodes = draw(st.integers(1, 7))
    shape = Shape(
        nnodes=nnodes,
        min_nodes=draw(st.one_of(st.just(nnodes), st.integers(1, nnodes))),
        spares=draw(st.integers(0, 3)),
        replica_size=draw(st.sampled_from([1, 1, 2, 4, 6])),
    )
    kinds = draw(st.sampled_from([[2], [1], [4], [2, 4], [3, 2]]))
    count = draw(st.integers(1, 12))
    each = st.tuples(st.sampled_from(kinds), LEVELS, st.integers(0, 5))
    drawn = draw(st.lists(each, min_size=count, max_size=count))
    return shape, [
        Candidate(name=f"n{at}", host=f"h{at}", nproc=nproc, levels=levels, joined=joined)
        for at, (nproc, levels, joined) in enumerate(drawn)
    ]


@st.composite
def later(draw: st.DrawFn) -> tuple[Shape, list[Candidate], list[tuple[str, int]], set[str]]:
    """A job that ran a first cycle, and what is lost now. Some nodes may have joined after it began."""
    shape, everyone = draw(jobs())
    early = draw(st.lists(st.sampled_from(everyone), unique_by=lambda c: c.name))
    first = place(shape, early, None, set(), wait_for_nodes=False, wait_for_spares=False)
    assume(isinstance(first, Placement))
    assert isinstance(first, Placement)
    lost = set(draw(st.lists(st.sampled_from([c.name for c in everyone]), max_size=6)))
    return shape, everyone, seats(first), lost


def feasible(shape: Shape, usable: list[Candidate], least: int) -> int:
    """By trying all: the most nodes, from `least` to nnodes, of whole blocks of each number of ranks; 0 when there are none."""
    return max(
        (total for counts in mixes(shape, usable) if least <= (total := sum(counts.values())) <= shape.nnodes),
        default=0,
    )


def mixes(shape: Shape, usable: list[Candidate]) -> list[dict[int, int]]:
    """All ways to take nodes in whole blocks: number of ranks -> nodes."""
    kinds = sorted({c.nproc for c in usable})
    choices = []
    for nproc in kinds:
        block = block_nodes(shape.replica_size, nproc)
        choices.append(range(0, sum(c.nproc == nproc for c in usable) // block * block + 1, block))
    return [dict(zip(kinds, counts, strict=True)) for counts in itertools.product(*choices)]


def check_sound(shape: Shape, usable: list[Candidate], result: Placement) -> None:
    everyone = [c.name for c in [*result.nodes, *result.spares]]
    assert sorted(everyone) == sorted(c.name for c in usable)
    assert result.world_size % shape.replica_size == 0
    assert shape.min_nodes <= len(result.nodes) <= shape.nnodes
    ranks, replica = 0, set()
    for c in result.nodes:
        ranks += c.nproc
        replica.add(c.nproc)
        assert len(replica) == 1, "a replica spans nodes with different numbers of ranks"
        if ranks % shape.replica_size == 0:
            replica = set()
    assert result.spares == sorted(result.spares, key=lambda c: (c.joined, c.name))


@settings(deadline=None)
@given(jobs(), st.booleans(), st.booleans())
def test_first_cycle(job: tuple[Shape, list[Candidate]], wait_nodes: bool, wait_spares: bool) -> None:
    shape, everyone = job
    result = place(shape, everyone, None, set(), wait_for_nodes=wait_nodes, wait_for_spares=wait_spares)
    most = feasible(shape, everyone, shape.min_nodes)
    patient = (wait_nodes and len(everyone) < shape.nnodes) or (
        wait_spares and shape.nnodes <= len(everyone) < shape.nnodes + shape.spares
    )
    assert isinstance(result, Placement) == (most > 0 and not patient)
    if isinstance(result, Waiting):
        assert result.missing >= 1
        return
    check_sound(shape, everyone, result)
    assert len(result.nodes) == most
    if shape.replica_size == 1:
        assert names(result.nodes).split() == order({c.name: c.levels for c in result.nodes})


@settings(deadline=None, max_examples=300)
@given(later(), st.randoms(use_true_random=False))
def test_later_cycle(case: tuple[Shape, list[Candidate], list[tuple[str, int]], set[str]], random: Any) -> None:
    shape, everyone, previous, lost = case
    usable = [c for c in everyone if c.name not in lost]
    result = place(shape, everyone, previous, lost)
    shuffled = random.sample(everyone, len(everyone))
    assert place(shape, shuffled, previous, frozenset(lost)) == result

    ranks_of = dict(previous)
    survivors = {c.name for c in usable if ranks_of.get(c.name) == c.nproc}
    gone = [nproc for name, nproc in previous if name not in survivors]
    free = [c.nproc for c in usable if c.name not in ranks_of]
    same_shape = all(gone.count(nproc) <= free.count(nproc) for nproc in set(gone))
    elastic = shape.min_nodes < shape.nnodes
    most = feasible(shape, usable, shape.min_nodes)
    assert isinstance(result, Placement) == (same_shape or (elastic and most > 0))
    if isinstance(result, Waiting):
        assert result.missing >= 1
        return

    check_sound(shape, usable, result)
    world = sum(ranks_of.values())
    if result.path in ("respawn", "spare"):
        assert same_shape
        assert [c.nproc for c in result.nodes] == [nproc for _, nproc in previous]
        held = dict(result.substitutes)
        assert [held.get(name, name) for name, _ in previous] == [c.name for c in result.nodes]
        assert set(held) == set(ranks_of) - survivors
        assert (result.path == "respawn") == (not held)
        assert most <= len(previous), "the job could have grown"
    else:
        assert elastic
        assert len(result.nodes) == most
        assert (result.path == "shrink") == (result.world_size < world)
    if same_shape:
        assert result.path != "shrink"
        # Where nodes differ in their ranks, the most nodes may be a mix that has no room for all who were there.
        kept = Counter(ranks_of[name] for name in survivors)
        room = any(
            sum(counts.values()) == len(result.nodes) and all(counts.get(n, 0) >= k for n, k in kept.items())
            for counts in mixes(shape, usable)
        )
        assert survivors <= {c.name for c in result.nodes} or not room


@st.composite
def losses(draw: st.DrawFn, fits: bool) -> tuple[list[Candidate], list[tuple[str, int]], set[str]]:
    """Candidates, the nodes of the cycle before, and the lost ones: as many as the spares can replace, or more."""
    kinds = draw(st.sampled_from([[2], [2, 4]] if fits else [[2]]))
    lost = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    kept = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    free = [*lost, *draw(st.lists(st.sampled_from(kinds), max_size=4))] if fits else lost[1:]
    everyone = [
        Candidate(name=f"n{at}", host="h", nproc=nproc, levels=draw(LEVELS), joined=draw(st.integers(0, 3)))
        for at, nproc in enumerate(draw(st.permutations([*lost, *kept, *free])))
    ]
    shuffled = draw(st.permutations(everyone))
    seated: list[Candidate] = []
    for nproc in draw(st.permutations([*lost, *kept])):
        seated.append(next(c for c in shuffled if c.nproc == nproc and c not in seated))
    gone: set[str] = set()
    for nproc in lost:
        gone.add(next(c.name for c in seated if c.nproc == nproc and c.name not in gone))
    return everyone, [(c.name, c.nproc) for c in seated], gone


@settings(deadline=None)
@given(losses(fits=True))
def test_the_nearest_spare_is_the_nearest(case: tuple[list[Candidate], list[tuple[str, int]], set[str]]) -> None:
    everyone, previous, lost = case
    shape = Shape(nnodes=len(previous), min_nodes=len(previous))
    result = placed(place(shape, everyone, previous, lost))
    assert result.path == "spare"
    assert [name for name, _ in result.substitutes] == [name for name, _ in previous if name in lost]
    node_of = {c.name: c for c in everyone}
    taken = {name for name, _ in previous}
    for name, substitute in result.substitutes:
        near, chosen = node_of[name], node_of[substitute]
        free = [c for c in everyone if c.name not in taken and c.nproc == near.nproc]
        assert chosen == min(free, key=lambda c: (distance(near.levels, c.levels), c.joined, c.name))
        taken.add(substitute)


@settings(deadline=None)
@given(losses(fits=False), st.sampled_from([1, 2, 4, 6]))
def test_shrinking_keeps_the_order_of_those_that_stay(
    case: tuple[list[Candidate], list[tuple[str, int]], set[str]], replica_size: int
) -> None:
    everyone, previous, lost = case
    whole = len(previous) // block_nodes(replica_size, 2) * block_nodes(replica_size, 2)
    before = previous[:whole]
    usable = [c for c in everyone if c.name not in lost]
    shape = Shape(nnodes=max(whole, 2), min_nodes=1, replica_size=replica_size)
    result = place(shape, everyone, before, lost)
    if not before or isinstance(result, Waiting) or result.path != "shrink":
        assert whole < len(previous) or len(usable) < block_nodes(replica_size, 2)
        return
    moved = {substitute for _, substitute in result.substitutes}
    stay = [c.name for c in result.nodes if c.name not in moved]
    assert stay == [name for name, _ in before if name in stay]
    if block_nodes(replica_size, 2) == 1:
        assert stay == [name for name, _ in before if name not in lost]


def test_a_shape_that_never_fits_waits_and_says_why() -> None:
    waiting = waits(place(Shape(nnodes=3, min_nodes=3, replica_size=16), nodes("a b c", nproc=8), None, set()))
    assert "whole replicas of 16 ranks" in waiting.reason
