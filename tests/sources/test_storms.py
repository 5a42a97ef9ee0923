"""Many sightings become few events; what is stale is marked and kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.records.event import Event
from keepstep.sources import storms
from keepstep.sources.facts import Boot, Repair
from keepstep.sources.staleness import before_repairs, from_previous_boots, replayed, too_old
from keepstep.sources.storms import BURST_NS, Collapser, dedupe, drop_copies
from tests.sources.making import NOON, SECOND, event


def collapse(events: Iterable[Event]) -> list[Event]:
    held = Collapser()
    for one in events:
        held.add(one)
    return held.events()


class TestCollapse:
    def test_a_storm_is_one_event(self) -> None:
        sightings = (
            event(line=n, time_ns=NOON + n * SECOND, pci="0000:1a:00.0", attrs={"pid": str(n)}) for n in range(1, 5000)
        )
        (one,) = collapse(sightings)
        assert (one.count, one.order, one.attrs["last_order"]) == (4999, 1, 4999)
        assert (one.time_ns, one.last_ns) == (NOON + SECOND, NOON + 4999 * SECOND)

    def test_a_single_sighting_stays_as_it_is(self) -> None:
        one = event(line=3, time_ns=NOON)
        assert collapse([one]) == [one]

    @pytest.mark.parametrize(
        ("name", "value"),
        [("node", "h2"), ("rank", 3), ("nic", "mlx5_1"), ("signature", "xid.48"), ("pci", "0000:1b:00.0"), ("path", "y.log"),
         ("source", "dmesg"), ("cycle", 4), ("job", "7"), ("boot_id", "b"), ("attrs", {"cause_xid": "149"}), ("stale", "replay")],
    )  # fmt: skip
    def test_what_is_told_apart(self, name: str, value: Any) -> None:
        assert len(collapse([event(line=1), event(line=2, **{name: value}), event(line=3)])) == 2

    def test_a_fault_that_comes_back_is_another_one(self) -> None:
        times = [0, 10, 20, 20 + BURST_NS // SECOND + 1, 20 + BURST_NS // SECOND + 2]
        events = collapse(event(line=n, time_ns=NOON + t * SECOND) for n, t in enumerate(times))
        assert [e.count for e in events] == [3, 2]

    def test_an_id_counts_once(self) -> None:
        assert [e.count for e in collapse([event(id="a", line=1), event(id="a", line=1), event(id="b", line=2)])] == [2]

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10**6), st.integers(0, 40)), max_size=300))
    def test_none_is_lost_and_few_are_held(self, drawn: list[tuple[int, int, int]]) -> None:
        sightings = [
            event(line=n, rank=rank, time_ns=NOON + second * SECOND, attrs={"addr": str(variant)})
            for n, (rank, second, variant) in enumerate(drawn)
        ]
        events = collapse(sightings)
        assert sum(e.count for e in events) == len(sightings)
        assert len(events) <= 4 * (storms.MAX_VARIANTS + 1) * storms.MAX_BURSTS
        for one in events:
            assert one.time_ns is not None
            assert one.last_ns is None or one.last_ns >= one.time_ns

    def test_memory_is_bounded_whatever_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(storms, "MAX_KEYS", 50)
        held = storms.Collapser()
        for n in range(1000):
            held.add(event(line=n, node=f"h{n}"))
        assert (len(held.events()), held.lost) == (50, 950)


class TestCopies:
    def test_the_ring_buffer_and_the_journal(self) -> None:
        told = "NVRM: Xid (PCI:0000:1a:00): 79, GPU has fallen off the bus."
        ring = event(
            source="dmesg -T", time_ns=NOON, time_quality="zone_assumed", text=f"[Sun Jun 15 12:00:00 2031] {told}"
        )
        journal = event(
            source="journalctl",
            node="h1",
            time_ns=NOON + SECOND // 2,
            time_quality="exact",
            text=f"2031-06-15T12:00:00Z h1 kernel: {told}",
        )
        (kept,) = drop_copies([ring, journal])
        assert (kept.source, kept.node) == ("dmesg -T", "h1")

    @pytest.mark.parametrize(
        "change", [{"time_ns": NOON + 60 * SECOND}, {"node": "h2"}, {"text": "another"}, {"rank": 1}]
    )
    def test_what_is_none(self, change: dict[str, Any]) -> None:
        fields: dict[str, Any] = {"time_ns": NOON, "time_quality": "exact", "node": "h1", "text": "same"}
        first = event(source="a", **fields)
        assert len(drop_copies([first, event(source="b", **(fields | change))])) == 2

    def test_the_same_line_twice_in_one_document_happened_twice(self) -> None:
        assert len(drop_copies([event(line=n, time_ns=NOON, time_quality="exact", text="same") for n in range(3)])) == 3


def test_records_are_delivered_once() -> None:
    events = [event(boot_id=boot, seq=seq) for boot, seq in (("a", 1), ("a", 2), ("a", 1), ("b", 1))]
    assert dedupe(events) == [events[0], events[1], events[3]]
    two = [event("xid.79", boot_id="a", seq=1), event("xid.154", boot_id="a", seq=1)]
    assert dedupe(two) == two


class TestStale:
    def marks(self, events: list[Event]) -> list[str | None]:
        return [e.stale for e in events]

    def test_replayed(self) -> None:
        events = [event(seq=5, boot_id="a"), event(seq=6, boot_id="a"), event(seq=1, boot_id="b"), event()]
        assert self.marks(replayed(events, {"a": 5})) == ["replay", None, None, None]
        assert self.marks(replayed([event(seq=5), event(seq=6)], {None: 5})) == ["replay", None]

    def test_before_a_repair(self) -> None:
        events = [
            event(node="h1", time_ns=NOON - 1),
            event(node="h1", time_ns=NOON + 1),
            event(node="h2", time_ns=NOON - 1),
        ]
        assert self.marks(before_repairs(events, [Repair("h1", NOON)])) == ["before_repair", None, None]

    def test_before_a_repair_by_the_kernels_clock(self) -> None:
        events = [event(boot_ns=7200 * SECOND), event(boot_ns=8001 * SECOND)]
        assert self.marks(before_repairs(events, [Repair(None, None, 8000 * SECOND)])) == ["before_repair", None]

    def test_a_repaired_gpu_is_not_its_neighbour(self) -> None:
        events = [event(pci="0000:1a:00.0", time_ns=NOON - 1), event(pci="0000:1b:00.0", time_ns=NOON - 1)]
        assert self.marks(before_repairs(events, [Repair(None, NOON, None, "0000:1a:00.0")])) == ["before_repair", None]

    def test_before_a_boot_in_the_same_stream(self) -> None:
        boot = Boot("h1", None, "x.log", "text", 10, True)
        events = [
            event(line=9, source="text", node="h1"),
            event(line=11, source="text", node="h1"),
            event(line=9, path="y.log", node="h1"),
        ]
        assert self.marks(from_previous_boots(events, [boot])) == ["previous_boot", None, None]

    def test_a_crash_is_not_repaired_by_the_boot_it_makes(self) -> None:
        boot = Boot("h1", None, "x.log", "text", 10, True)
        panic = event("panic.mce", "host.mce", line=9, source="text", node="h1")
        assert self.marks(from_previous_boots([panic], [boot])) == [None]

    def test_before_a_boot_by_time(self) -> None:
        boot = Boot("h1", NOON, "z.log", "uptime -s", 1, False)
        seconds = (-3600, 60)
        events = [event(node="h1", time_ns=NOON + s * SECOND) for s in seconds]
        assert self.marks(from_previous_boots(events, [boot])) == ["previous_boot", None]

    def test_what_a_job_said_is_not_taken_back_by_a_boot(self) -> None:
        boot = Boot(None, NOON, "z.log", "uptime -s", 1, False)
        events = [
            event("nccl.timeout", "collective.timeout", time_ns=NOON - 60 * SECOND),
            event("s3.denied", "storage.error", time_ns=NOON - 60 * SECOND),
        ]
        assert self.marks(from_previous_boots(events, [boot])) == [None, None]

    def test_too_old(self) -> None:
        events = [event(time_ns=NOON - 7200 * SECOND), event(time_ns=NOON), event(), event(time_ns=1, last_ns=NOON)]
        assert self.marks(too_old(events, NOON + SECOND, 3600)) == ["too_old", None, None, None]

    @given(st.permutations(["replay", "repair", "boot"]))
    def test_the_first_reason_stays(self, order: list[str]) -> None:
        marked = [event(seq=1, node="h1", time_ns=NOON - 3600 * SECOND)]
        for step in order:
            if step == "replay":
                marked = replayed(marked, {None: 5})
            elif step == "repair":
                marked = before_repairs(marked, [Repair("h1", NOON)])
            else:
                marked = from_previous_boots(marked, [Boot("h1", NOON, "z", "z", 1, False)])
        expected = {"replay": "replay", "repair": "before_repair", "boot": "previous_boot"}[order[0]]
        assert self.marks(marked) == [expected]


def test_eight_hundred_thousand_lines_are_held_in_little_memory() -> None:
    held = storms.Collapser()
    distinct = [event("xid.95", pci="0000:1a:00.0", attrs={"detail": str(n)}, line=n) for n in range(29)]
    for one in itertools.islice(itertools.cycle(distinct), 20_000):
        held.add(one)
    (only,) = held.events()
    assert only.count == 20_000
