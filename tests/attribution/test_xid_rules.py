"""What Xids mean beside one another: follow-ups, programs, victims of links, repairs; and what they may never lead to."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.attribution.rules.xid import APPLICATION, degrading, distinct_gpus, known_gsp_bug, xids
from keepstep.attribution.verdict import attribute
from keepstep.catalog.load import shipped
from keepstep.catalog.xid import xid_facts
from keepstep.records.event import Event, Gpu
from keepstep.records.verdict import NODE_ACTIONS, Verdict
from tests.attribution.shipped_events import A, B, C, D, link, made, named, wants, xid

USER = "pid={}, name={}, Ch 00000008"


def ruled(*events: Event) -> list[Event]:
    return xids(list(events), shipped())


def verdict(*events: Event) -> Verdict:
    return attribute(list(events), shipped())


def test_channels_removed_after_programs_that_ended_are_no_fault_however_many() -> None:
    events = [xid(45, pci, 600.0 * i, USER.format(100 + i, "python3")) for i, pci in enumerate((A, A, B, B, A))]
    assert set(named(ruled(*events))) == {"derived.xid.teardown"}
    found = verdict(*events)
    assert (found.fault_class, found.action, found.no_current_fault) == ("user_code", "none", True)


def test_removed_channels_beside_a_failure_do_not_hide_it() -> None:
    assert "derived.xid.teardown" not in named(ruled(xid(79, A), xid(45, A, 1.0)))
    found = verdict(xid(62, A), *(xid(45, A, 1.0 + i) for i in range(20)))
    assert (found.fault_class, found.action, found.entity.gpu) == ("hardware", "reset_gpu", A)


def test_the_cause_that_a_45_names_counts_although_its_line_is_missing() -> None:
    follow = xid(45, A, detail="pid=5, name=python3, Ch 00000001 caused by previous Xid 94")
    assert named(ruled(follow, follow)) == ["xid.94"]
    assert named(ruled(follow, xid(94, A))) == []
    found = verdict(follow)
    assert (found.fault_class, found.action) == ("hardware", "restart_job")


@pytest.mark.parametrize("code", sorted(APPLICATION - {43}))
def test_codes_of_programs_on_several_gpus_are_the_program(code: int) -> None:
    events = [xid(code, pci, i, USER.format(100 + i, "python3")) for i, pci in enumerate((A, B, C))]
    assert "derived.xid.workload" in named(ruled(*events))
    found = verdict(*events)
    assert found.fault_class == "user_code" and found.action not in NODE_ACTIONS


def test_one_gpu_that_stops_the_programs_of_several_people_is_a_suspect_and_nothing_is_done_to_it() -> None:
    events = [xid(31, A, 9000.0 * i, USER.format(100 + i, n)) for i, n in enumerate(("python3", "gmx", "relion"))]
    assert named(ruled(*events)) == ["derived.xid.suspect"]
    found = verdict(*events)
    assert (found.fault_class, found.action) == ("hardware", "ask_human")


@pytest.mark.parametrize(
    "events",
    [
        [xid(31, A, i, USER.format(100 + i, "python3")) for i in range(2)],
        [xid(31, A, 9000.0 * i, USER.format(100, "python3")) for i in range(9)],
        [xid(31, A, 9000.0 * i, USER.format(100 + i, "python3")) for i in range(3)] + [xid(31, B, 1.0)],
        [xid(31, A, 9000.0 * i, USER.format(100 + i, "python3")) for i in range(3)] + [xid(79, B, 1.0)],
    ],
    ids=["one job again", "one program", "a peer too", "something else is wrong"],
)
def test_what_is_not_enough_to_suspect_a_gpu(events: list[Event]) -> None:
    assert "derived.xid.suspect" not in named(ruled(*events))


@pytest.mark.parametrize(("tpcs", "suspect"), [((5, 5, 5), True), ((5, 1, 3), False)])
def test_exceptions_count_only_in_one_corner_of_the_chip(tpcs: tuple[int, ...], suspect: bool) -> None:
    detail = "pid={}, name=p{}, Graphics SM Warp Exception on (GPC 2, TPC {}, SM 0): Illegal Instruction Encoding"
    events = [xid(13, A, 9000.0 * i, detail.format(i, i, tpc)) for i, tpc in enumerate(tpcs)]
    assert ("derived.xid.suspect" in named(ruled(*events))) is suspect


def test_the_fatal_link_error_marks_the_victim_and_its_peers_are_cascade() -> None:
    events = [
        link(149, "Fatal", D, 0.0006), link(145, "Nonfatal", A, 0.001), link(145, "Nonfatal", B, 0.0011),
        xid(45, D, 0.28), xid(45, A, 0.29), xid(45, B, 0.29), wants(1, pci=D, at_s=0.4),
    ]  # fmt: skip
    (victim,) = [e for e in ruled(*events) if e.signature == "derived.xid.link_victim"]
    assert victim.gpu is not None and victim.gpu.pci == D
    found = verdict(*events)
    assert (found.fault_class, found.action, found.entity.gpu) == ("fabric", "reset_gpu", D)
    reboot = verdict(*events[:-1], wants(2, pci=D, at_s=0.4))
    assert (reboot.fault_class, reboot.action, reboot.entity.gpu) == ("fabric", "cordon_node", D)


def test_the_drivers_nonfatal_beats_what_a_monitor_makes_of_the_code() -> None:
    monitor = made("xid.145", None, attrs={"xid": "145"})
    found = verdict(monitor, link(145, "Nonfatal", A))
    assert (found.fault_class, found.action, found.no_current_fault) == ("fabric", "none", True)
    assert "derived.xid.nonfatal" not in named(ruled(link(145, "Nonfatal", A), link(149, "Fatal", B)))
    assert "derived.xid.nonfatal" not in named(ruled(link(145, "Nonfatal", A), xid(79, B)))


@pytest.mark.parametrize(
    ("action", "wanted"), [(1, "reset_gpu"), (2, "cordon_node"), (3, "drain_at_checkpoint"), (4, "reset_gpu")]
)
def test_what_the_driver_wants_is_done_where_nothing_else_is_known(action: int, wanted: str) -> None:
    found = verdict(wants(action))
    assert found.action == wanted and not found.no_current_fault


def test_the_newest_word_of_the_driver_counts_for_each_gpu() -> None:
    over = [xid(95, A), wants(1, at_s=0.1), wants(0, was=1, at_s=900.0)]
    assert verdict(*over).no_current_fault and verdict(*over).action == "none"
    other = verdict(*over, xid(95, B, 901.0))
    assert (other.action, other.entity.gpu) == ("reset_gpu", B)
    assert verdict(wants(1), wants(2, was=1, at_s=5.0)).action == "cordon_node"


def test_memory_that_fails_again_after_a_repair_is_taken_out() -> None:
    again = xid(48, A, 7200.0)
    before = xid(48, A, 0.0, stale="previous_boot")
    assert named(degrading([again], [before], shipped())) == ["derived.xid.degrading"]
    assert named(degrading([again], [xid(48, B, stale="previous_boot")], shipped())) == []
    assert named(degrading([again], [], shipped())) == []
    assert named(degrading([xid(48, A), again], [], shipped())) == ["derived.xid.degrading"]
    found = verdict(before, again)
    assert (found.action, found.entity.gpu) == ("cordon_node", A)


def test_an_error_whose_row_cannot_be_set_aside_is_no_case_for_a_reset() -> None:
    assert verdict(xid(48, A)).action == "reset_gpu"
    assert verdict(xid(48, A), xid(64, A, 0.1)).action == "cordon_node"
    assert verdict(xid(48, A), xid(64, B, 0.1)).first_cause is not None


def test_a_pending_row_waits_for_the_checkpoint_while_steps_are_made() -> None:
    step = made("job.progress", 60.0, attrs={"last_step": 9})
    assert "derived.xid.reset_due" in named(ruled(xid(94, A), xid(63, A, 1.0))) or verdict(xid(94, A), xid(63, A, 1.0))
    found = attribute([xid(94, A), xid(63, A, 1.0), step], shipped())
    assert (found.fault_class, found.action) == ("hardware", "drain_at_checkpoint")
    assert "derived.xid.reset_due" not in named(xids([xid(95, A), xid(63, A, 1.0), step], shipped()))


@pytest.mark.parametrize(
    ("version", "known"),
    [("525.60.13", True), ("525.147.05", False), ("535.54.03", True), ("535.183.01", False), ("550.54.15", True),
     ("570.124.06", False), ("", False), ("x.y", False), ("99999999999.1", False)],
)  # fmt: skip
def test_driver_series_whose_gsp_stops(version: str, known: bool) -> None:
    assert known_gsp_bug(version) is known


def test_a_gsp_timeout_under_such_a_driver_is_the_drivers_fault() -> None:
    driver = made("driver.version", None, attrs={"version": "535.54.03", "branch": 535})
    found = verdict(xid(119, A), driver)
    assert (found.fault_class, found.action) == ("framework", "reset_gpu")
    gone = verdict(xid(79, A), xid(119, A, 6.0), driver)
    assert (gone.fault_class, gone.action) == ("hardware", "cordon_node")


def test_two_names_of_one_gpu_are_not_two_gpus() -> None:
    line = xid(31, A, 0.0, USER.format(5, "python3"))
    monitor = made("xid.31", 9.0, gpu=Gpu(index=4), attrs={"xid": "31"})
    assert "derived.xid.workload" not in named(ruled(line, monitor))
    assert distinct_gpus([line, monitor]) == 1 and distinct_gpus([line, xid(31, B), monitor]) == 2


def test_a_gauge_is_old_when_the_gpu_passed_its_diagnostic() -> None:
    gauge = made("gpu.xid_gauge", None, gpu=Gpu(index=2), attrs={"value": 79.0})
    passed = made("dcgm.diag_passed", None)
    assert verdict(gauge).action == "ask_human"
    assert verdict(gauge, passed).no_current_fault and verdict(gauge, passed).action == "none"
    assert verdict(gauge, passed, xid(79, A)).action == "cordon_node"


CODES = sorted(xid_facts())
NO_HARM = {13, 31, 43, 45}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(NO_HARM)), st.sampled_from((A, B, C)), st.integers(0, 5), st.integers(0, 10**5)
        ),
        min_size=1,
        max_size=12,
    )
)
def test_codes_of_programs_never_take_hardware_out(events: list[tuple[int, str, int, int]]) -> None:
    found = verdict(*(xid(c, pci, float(t), USER.format(p, f"job{p}")) for c, pci, p, t in events))
    assert found.action not in NODE_ACTIONS


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(CODES),
            st.sampled_from((A, B, C, "")),
            st.sampled_from(["", "pid=1, name=x", "RLW_REMAP Fatal XC0 i0 Link 03 (0x1 0x2)", "caused by previous Xid 79",
                             "GPU recovery action changed from 0x0 (a) to 0x9 (b)", "GPC 1, TPC 2", "pid=, name="]),
            st.one_of(st.none(), st.integers(0, 10**6)),
        ),
        max_size=15,
    )
)  # fmt: skip
def test_any_mix_of_xids_gives_events_of_the_catalog(events: list[tuple[int, str, str, int | None]]) -> None:
    given_events = [xid(c, pci or A, None if t is None else float(t), detail) for c, pci, detail, t in events]
    for event in [*xids(given_events, shipped()), *degrading(given_events, given_events, shipped())]:
        assert event.signature in shipped() and event.stale is None
    found = attribute(given_events, shipped())
    assert not (found.no_current_fault and found.action in NODE_ACTIONS)
