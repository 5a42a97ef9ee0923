"""Retention rules, their text form, and the limits that no policy can lift."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.checkpoint.format.layout import FolderName
from keepstep.checkpoint.keeping.policy import (
    DEFAULT_POLICY,
    Best,
    Every,
    EverySteps,
    Last,
    Pinned,
    Policy,
    Window,
    any_of,
    parse_policy,
)
from keepstep.checkpoint.keeping.retention import Entry, Limits, Line, Suspicion, current, decide, deletion_order
from keepstep.records.errors import ConfigError

HOUR_NS = 3600 * 10**9
DAY_NS = 24 * HOUR_NS
NOW_NS = 1_800_000_000 * 10**9 // DAY_NS * DAY_NS + 12 * HOUR_NS  # noon of a day


def entry(
    step: int, *, age_h: float = 0.0, cycle: int = 0, attempt: int = 1, run: str = "job7", **fields: object
) -> Entry:
    """A committed checkpoint of `step`, `age_h` hours old."""
    name = FolderName(step, cycle, attempt, 0, run)
    given = {"name": name, "committed": True, "created_ns": NOW_NS - int(age_h * HOUR_NS), **fields}
    return msgspec.convert(given, Entry)


def kept(entries: list[Entry], policy: str, **limits: object) -> list[int]:
    """Steps that stay, in order."""
    lines = decide(entries, parse_policy(policy), Limits(now_ns=NOW_NS, **limits))  # type: ignore[arg-type]
    return sorted(line.step for line in lines if line.keep)


def line_of(entries: list[Entry], step: int, policy: str = "last:1", **limits: object) -> Line:
    """The line about `step`."""
    lines = decide(entries, parse_policy(policy), Limits(now_ns=NOW_NS, **limits))  # type: ignore[arg-type]
    return next(line for line in lines if line.step == step)


# ---- grammar


def test_the_default_policy_is_what_it_says() -> None:
    policy = parse_policy(DEFAULT_POLICY)
    assert policy.rules == (Last(3), Window("hourly", within_s=86400), Window("daily", within_s=30 * 86400), Pinned())
    assert policy.text == DEFAULT_POLICY


rules = st.one_of(
    st.builds(Last, st.integers(1, 999)),
    st.builds(EverySteps, st.integers(1, 10**9)),
    st.builds(Every, st.integers(1, 10**9)),
    st.builds(Window, st.sampled_from(["hourly", "daily", "weekly"]), count=st.integers(1, 999)),
    st.builds(Window, st.sampled_from(["hourly", "daily", "weekly"]), within_s=st.integers(1, 10**9)),
    st.builds(Best, st.sampled_from(["loss", "eval/acc"]), st.integers(1, 9), st.sampled_from(["min", "max"])),
    st.just(Pinned()),
)


@given(st.lists(rules, min_size=1, max_size=5, unique=True))
def test_a_policy_reads_back_from_its_own_text(chosen: list[object]) -> None:
    policy = Policy(tuple(chosen))  # type: ignore[arg-type]
    assert parse_policy(policy.text) == policy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no rule"),
        ("last:3,,pinned", "'' is no rule"),
        ("last", "'last' is no rule"),
        ("last:0", "at least 1"),
        ("last:-1", "at least 1"),
        ("latest:3", "'latest:3' is no rule"),
        ("every:60", "not a time such as 90s"),
        ("hourly:1y", "not a time"),
        ("every:999999999w", "at most 100 years"),
        ("best:loss:3", "best:METRIC:K:min or best:METRIC:K:max"),
        ("best:lo ss:3:min", "not the name of a metric"),
        ("pinned:3", "'pinned:3' is no rule"),
    ],
)
def test_a_wrong_policy_is_refused_with_the_part_and_the_valid_rules(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match="valid are last:K, every-steps:N") as caught:
        parse_policy(text, "--keep")
    assert said in str(caught.value)
    assert str(caught.value).startswith("--keep")


# ---- rules


def test_last_keeps_the_newest_by_step() -> None:
    assert kept([entry(step) for step in (100, 300, 200, 400)], "last:2") == [300, 400]


def test_every_steps_keeps_the_first_from_each_multiple_on() -> None:
    steps = [30, 90, 100, 150, 230, 260, 310, 390]
    assert kept([entry(step) for step in steps], "every-steps:100") == [100, 230, 310, 390]


def test_time_buckets_keep_their_newest() -> None:
    """Noon now; ages in hours. 11:30 and 11:10 are of one hour, 12:00 of the next."""
    entries = [entry(100 - i, age_h=age) for i, age in enumerate([0.0, 0.5, 0.8, 1.2, 5.0, 30.0])]
    assert kept(entries, "hourly:2") == [99, 100]
    assert kept(entries, "hourly:1d") == [96, 97, 99, 100]
    assert kept(entries, "daily:2") == [95, 100]
    assert kept(entries, "every:2h") == [95, 96, 99, 100]


def test_spans_reach_back_from_the_newest_and_not_from_now() -> None:
    """A job that stood still for a month loses nothing by it."""
    entries = [entry(step, age_h=720 + 20 - step) for step in range(1, 21)]
    assert kept(entries, "hourly:1d") == list(range(1, 21))


def test_best_needs_the_metric_and_prefers_the_newer_of_equals() -> None:
    values = {1: 0.5, 2: 0.1, 3: float("nan"), 4: 0.1, 5: 0.9, 6: 0.7}
    entries = [entry(step, metrics={"loss": value}) for step, value in values.items()] + [entry(7)]
    assert kept(entries, "best:loss:1:min") == [4, 7]
    assert kept(entries, "best:loss:2:max") == [5, 6, 7]
    assert "loss 0.1 is number 1" in line_of(entries, 4, "best:loss:1:min").reasons[0]


def test_any_of_keeps_what_any_keeps() -> None:
    entries = [entry(step) for step in range(1, 10)]
    policy = any_of(parse_policy("last:2"), parse_policy("every-steps:4"), parse_policy("last:2"))
    assert policy.text == "last:2, every-steps:4"
    assert kept(entries, policy.text) == [4, 8, 9]


# ---- limits


def test_a_torn_checkpoint_never_takes_the_place_of_a_good_one() -> None:
    """Two newer folders without a marker, as after two killed saves: last:2 still means two committed ones."""
    torn = [entry(step, committed=False, age_h=100) for step in (400, 500)]
    lines = decide([entry(100), entry(200), entry(300), *torn], parse_policy("last:2"), Limits(now_ns=NOW_NS))
    assert [line.step for line in lines if not line.keep] == [100]


def test_damaged_quarantined_and_abandoned_ones_count_as_little() -> None:
    entries = [
        entry(100),
        entry(200),
        entry(300, problem="signature"),
        entry(400, quarantined_ns=NOW_NS),
        entry(500, abandoned_by="run job7 cycle 3"),
        entry(600, tombstoned=True, committed=False),
    ]
    assert kept(entries, "last:2") == [100, 200, 300, 400, 500]
    assert current(entries) == entries[1]


def test_nothing_committed_goes_where_nothing_can_be_restored() -> None:
    entries = [entry(100, abandoned_by="x", age_h=9999), entry(200, quarantined_ns=0), entry(300, problem="bit")]
    assert kept(entries, "last:1") == [100, 200, 300]


def test_what_was_restored_from_stays_until_a_newer_one_is_known_to_be_whole() -> None:
    entries = [entry(100, proven="restored"), entry(200), entry(300)]
    assert kept(entries, "last:1") == [100, 300]
    assert kept([*entries, entry(400, proven="verified")], "last:1") == [400]


def test_pins_and_permits_hold_under_every_policy() -> None:
    old = [entry(100, pins=("paper",)), entry(110, permits=("p1",), abandoned_by="x", age_h=99), entry(120)]
    assert kept([*old, entry(500)], "last:1") == [100, 110, 500]


def test_an_open_suspicion_keeps_everything_from_before_it() -> None:
    entries = [entry(step) for step in (100, 200, 300, 400)]
    doubt = Suspicion(since_step=200, reason="loss spike", time="", by="me")
    assert kept(entries, "last:1", suspicions=(doubt,)) == [100, 200, 400]
    other = msgspec.structs.replace(doubt, run="another")
    assert kept(entries, "last:1", suspicions=(other,)) == [400]
    assert "loss spike" in line_of(entries, 100, suspicions=(doubt,)).reasons[0]


def test_quarantined_ones_go_when_released_or_too_old() -> None:
    def old(*, released: bool = False) -> Entry:
        return entry(100, quarantined_ns=NOW_NS - 10 * DAY_NS, released=released)

    assert kept([old(), entry(200)], "last:1") == [100, 200]
    assert kept([old(released=True), entry(200)], "last:1") == [200]
    assert kept([old(), entry(200)], "last:1", quarantine_s=9 * 86400) == [200]


def test_an_unfinished_one_goes_only_when_fenced_and_old_and_not_whole() -> None:
    torn = entry(300, committed=False, age_h=30)
    newer = entry(200, cycle=1)
    assert kept([torn, newer], "last:1") == [200]
    assert kept([torn, entry(200)], "last:1") == [200, 300], "its own cycle may still commit it"
    assert kept([torn, entry(200, cycle=1, problem="?")], "last:1") == [200, 300], "a forged marker fences nothing"
    assert kept([torn, entry(200, cycle=1, run="other")], "last:1") == [200, 300]
    assert kept([torn, entry(200)], "last:1", ended_runs=frozenset({"job7"})) == [200]
    assert kept([entry(300, committed=False, age_h=23), newer], "last:1") == [200, 300]
    whole = entry(300, committed=False, age_h=30, complete=True)
    assert kept([whole, newer], "last:1") == [200, 300]
    assert "a copy without it?" in line_of([whole, newer], 300).reasons[0]


def test_what_no_save_wrote_is_not_deleted_with_a_checkpoint() -> None:
    assert kept([entry(100, foreign=("notes.txt",)), entry(200)], "last:1") == [100, 200]


def test_a_run_that_looks_only_at_its_own_keeps_its_own() -> None:
    entries = [entry(step, run=run, scope=run) for run in "ab" for step in (100, 200, 300)]
    lines = decide(entries, parse_policy("last:1"), Limits(now_ns=NOW_NS))
    assert sorted(line.checkpoint[0] + str(line.step) for line in lines if line.keep) == ["a300", "b300"]


def test_a_tombstone_alone_does_not_bury_what_the_policy_keeps() -> None:
    """Whoever may write records could otherwise have the pruner delete the newest checkpoint."""
    entries = [entry(100), entry(200), entry(300), entry(400, tombstoned=True)]
    assert kept(entries, "last:2") == [200, 300, 400]
    assert "yet it would be kept" in line_of(entries, 400, "last:2").reasons[0]
    assert kept([entry(50, tombstoned=True), *entries], "last:2") == [200, 300, 400], "a begun deletion goes on"


def test_the_last_manifest_that_tells_of_an_abandonment_stays_with_what_it_abandons() -> None:
    """Cycle 1 went back before 400, which is pinned; only the checkpoints of cycle 1 tell of it."""
    second, third = ("job7", 1, 1, 200), ("job7", 2, 1, 300)
    entries = [
        entry(400, abandoned_by="x", abandoning=frozenset({second}), pins=("look at it",)),
        entry(410, cycle=1, life=second),
        entry(420, cycle=1, life=second),
        entry(500, cycle=2, life=third),
    ]
    assert kept(entries, "last:1") == [400, 420, 500]
    assert kept([msgspec.structs.replace(entries[0], pins=(), created_ns=0), *entries[1:]], "last:1") == [500]


def test_abandoned_ones_are_deleted_before_the_manifests_that_tell_of_it() -> None:
    second, third = ("job7", 1, 1, 200), ("job7", 2, 1, 300)
    first = entry(410, abandoned_by="x", abandoning=frozenset({second}), age_h=90, life=("job7", 0, 1, 100))
    middle = entry(430, cycle=1, abandoned_by="x", abandoning=frozenset({third}), age_h=80, life=second)
    entries = [entry(390, cycle=2, life=third), middle, first, entry(500, cycle=2, life=third)]
    lines = decide(entries, parse_policy("last:1"), Limits(now_ns=NOW_NS))
    assert [line.step for line in deletion_order(entries, lines)] == [410, 430, 390]


# ---- for all roots

LIVES = [("job7", 0, 1, 100), ("job7", 1, 1, 200), ("job7", 2, 1, 300), ("new", 0, 1, 400)]


@st.composite
def roots(draw: st.DrawFn) -> list[Entry]:
    """Any mixture of checkpoints, in any state."""
    found = {}
    seldom = st.integers(0, 9).map(lambda number: number == 9)
    for _ in range(draw(st.integers(1, 14))):
        life = draw(st.sampled_from(LIVES))
        step = draw(st.integers(1, 20)) * 50
        later = LIVES[LIVES.index(life) + 1 :]
        abandoning = frozenset(draw(st.sets(st.sampled_from(later), max_size=2))) if later else frozenset()
        committed = not draw(seldom)
        problem = "bit" if committed and draw(seldom) else None
        item = entry(
            step,
            run=life[0],
            cycle=life[1],
            age_h=draw(st.integers(-2, 2000)),
            committed=committed,
            problem=problem,
            life=life if committed and problem is None else None,
            abandoning=abandoning,
            abandoned_by="x" if abandoning else None,
            scope=life[0] if committed and problem is None and draw(seldom) else None,
            quarantined_ns=NOW_NS - 40 * DAY_NS if draw(seldom) else None,
            released=draw(st.booleans()),
            proven="restored" if draw(seldom) else None,
            pins=("why",) if draw(seldom) else (),
            tombstoned=draw(seldom),
            complete=draw(st.booleans()) and not committed,
            metrics={"loss": float(step)},
        )
        found[item.name] = item
    return list(found.values())


policies = st.one_of(
    st.just(parse_policy("last:1")), st.lists(rules, min_size=1, max_size=3).map(lambda chosen: Policy(tuple(chosen)))
)


def witnessed(remaining: list[Entry]) -> list[Entry]:
    """`remaining` as a listing would show it: an abandonment is known only while a manifest of its life is there."""
    lives = {item.life for item in remaining}
    shown = []
    for item in remaining:
        known = item.abandoning & lives
        shown.append(msgspec.structs.replace(item, abandoning=known, abandoned_by="x" if known else None))
    return shown


@settings(max_examples=60, deadline=None)
@given(roots().map(witnessed), policies)
def test_no_policy_lifts_the_limits(entries: list[Entry], policy: Policy) -> None:
    limits = Limits(now_ns=NOW_NS)
    lines = decide(entries, policy, limits)
    keep = {line.checkpoint for line in lines if line.keep}
    assert len(lines) == len(entries)
    assert all(line.reasons for line in lines)
    for scope in {item.scope for item in entries}:
        lineage = [item for item in entries if item.scope == scope and item.state == "committed"]
        if lineage:
            assert max(lineage, key=lambda item: item.name).name.text in keep
            proven = [item for item in lineage if item.proven]
            assert not proven or max(proven, key=lambda item: item.name).name.text in keep
    if current(entries) is None:
        assert keep >= {item.name.text for item in entries if item.committed and not item.tombstoned}
    for item in entries:
        if item.pins and not (item.tombstoned and not item.committed):
            assert item.name.text in keep
        if item.complete and not item.tombstoned:
            assert item.name.text in keep


@settings(max_examples=60, deadline=None)
@given(roots().map(witnessed), policies)
def test_a_prune_that_stops_anywhere_brings_no_dead_lineage_back(entries: list[Entry], policy: Policy) -> None:
    lines = decide(entries, policy, Limits(now_ns=NOW_NS))
    restorable = {item.name for item in entries if item.state == "committed"}
    remaining = list(entries)
    for line in deletion_order(entries, lines):
        remaining = [item for item in remaining if item.name.text != line.checkpoint]
        left = {item.name for item in witnessed(remaining) if item.state == "committed"}
        assert left <= restorable
        assert not restorable or left


@settings(max_examples=50, deadline=None)
@given(roots().map(witnessed), policies)
def test_a_second_prune_finds_nothing_more(entries: list[Entry], policy: Policy) -> None:
    limits = Limits(now_ns=NOW_NS)
    keep = {line.checkpoint for line in decide(entries, policy, limits) if line.keep}
    left = witnessed([item for item in entries if item.name.text in keep])
    again = {line.checkpoint for line in decide(left, policy, limits) if line.keep}
    assert current(left) == current(entries)
    assert again == keep
