"""What other monitors say: states, health events, conditions over time, counts; and what none of it may become."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher
from keepstep.sources.documents import split
from keepstep.sources.monitors.lines import MonitorReading, monitor_events
from keepstep.sources.monitors.states import states_in
from keepstep.sources.monitors.words import part_of
from keepstep.sources.reading import read_text

CATALOG = shipped()
MATCHER = Matcher(CATALOG)


def look(text: str) -> MonitorReading:
    (document,) = split("monitor.log", text)
    return monitor_events(document, CATALOG)


def signatures(text: str) -> list[str]:
    return [e.signature for e in look(text).events]


def test_a_state_without_a_time_is_claimed_and_what_it_quotes_is_no_event() -> None:
    state = {"time": None, "health": "Unhealthy", "reason": "XID 48 detected on GPU PCI:0000:2d:00"}
    text = json.dumps({"component": "accelerator-nvidia-error-xid", "states": [state]})
    assert signatures(text) == ["monitor.state_gpu"]
    assert look(text).claimed == {1}
    assert [e.signature for e in read_text("a.log", text, CATALOG, MATCHER).events] == ["monitor.state_gpu"]


def test_a_state_with_a_time_leaves_its_xid_to_be_weighed() -> None:
    state = {"time": "2031-05-01T00:00:00Z", "health": "Unhealthy", "reason": "XID 79 detected on GPU PCI:0000:2d:00"}
    text = json.dumps({"component": "accelerator-nvidia-error-xid", "states": [state]})
    assert signatures(text) == [] and not look(text).claimed
    reading = look(text.replace("XID 79 detected on", "memory errors of"))
    assert [e.signature for e in reading.events] == ["monitor.event_gpu"] and not reading.claimed
    assert reading.events[0].time_ns == 1_935_360_000_000_000_000


def test_a_health_event_names_node_and_gpu() -> None:
    event = {
        "checkName": "GpuMemWatch",
        "isFatal": True,
        "isHealthy": False,
        "message": "uncorrectable errors",
        "entitiesImpacted": [{"entityType": "GPU", "entityValue": "3"}],
        "nodeName": "n-4",
        "generatedTimestamp": "2031-04-02T11:00:00Z",
    }
    (state,) = states_in(json.dumps(event))
    assert (state.part, state.healthy, state.fatal, state.node) == ("gpu", False, True, "n-4")
    assert state.gpu is not None and state.gpu.index == 3
    healthy = states_in(json.dumps(event | {"isHealthy": True, "isFatal": False}))
    assert healthy[0].healthy


@pytest.mark.parametrize(
    "text",
    ["{", '{"component": 3}', '{"component": "x", "states": [1, null]}', '{"checkName": []}', "{" * 5000, "null"],
)
def test_what_is_no_state(text: str) -> None:
    assert states_in(text) == []


def test_a_good_word_at_a_start_is_no_recovery() -> None:
    bad = "GpuOk=False reason=RowRemapPending"
    started = 'GpuOk=True reason=Fine message="started"'
    assert signatures(f"{bad}\n{started}\n{bad}") == ["condition.remap"]
    assert signatures(f"{bad}\n{started}") == ["condition.remap"]
    assert signatures(f"{bad}\nGpuOk=True reason=Fine") == ["condition.remap", "condition.good"]


def test_conditions_are_kept_apart_by_node_and_name() -> None:
    text = "node a1: DiskBad=True reason=ReadOnly\nnode b2: DiskBad=False reason=Fine\nnode a1: NetOk=False reason=PortDown"
    assert sorted(signatures(text)) == ["condition.fabric", "condition.good", "condition.storage"]


@pytest.mark.parametrize(
    ("text", "failed", "total"),
    [("nodes failing: 31/32", 31, 32), ("12 of 12 hosts failed the check", 12, 12), ("nodes failed 5 out of 6", 5, 6)],
)
def test_counts_of_failing_nodes(text: str, failed: int, total: int) -> None:
    (event,) = look(f"check_ib_bw: low\n{text}").events
    assert event.signature == "check.count"
    assert (event.attrs["nodes_failed"], event.attrs["nodes_total"]) == (failed, total)
    assert event.attrs["check"] == "check_ib_bw"


def test_an_event_handled_days_later_is_a_replay() -> None:
    late = "2031-03-09T08:00:03Z handling event generatedTimestamp=2031-03-05T02:11:40Z node=g-1"
    assert signatures(late) == ["monitor.replayed"]
    assert signatures(late.replace("03-05T02:11:40Z", "03-09T07:59:58Z")) == []


def test_a_repair_tried_again_and_again() -> None:
    lines = [f"remediation: reset GPU node=c3 attempt={n}" for n in (1, 2, 3, 4)]
    assert signatures("\n".join(lines[:2])) == []
    assert signatures("\n".join(lines)) == ["monitor.action_loop"]
    mixed = [f"reboot node n{n} attempt=1" for n in range(5)]
    assert signatures("\n".join(mixed)) == [], "different machines are no loop"


def test_rates_of_memory_errors() -> None:
    (event,) = look("gpu3 DCGM_FI_DEV_ECC_SBE_VOL_TOTAL rate 912.5/s under load; rate 0/s idle").events
    assert event.gpu is not None and (event.gpu.index, event.attrs["rate_per_s"]) == (3, 912.5)
    assert look("ECC_SBE rate 0/s").events == []


def test_words() -> None:
    assert part_of("RowRemapPending", "GpuOk") == "remap"
    assert part_of("", "DCGMError connection refused", "GpuOk") == "own"
    assert part_of("nothing", "known") == "other"


@given(st.text(max_size=400) | st.binary(max_size=400).map(lambda b: b.decode("latin-1")))
def test_any_text_is_read(text: str) -> None:
    for document in split("x", text):
        reading = monitor_events(document, CATALOG)
        assert all(e.signature in CATALOG for e in reading.events)
