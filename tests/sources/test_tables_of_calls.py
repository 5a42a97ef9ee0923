"""Tables and rows that people make of flight records, counters and checks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.attribution.jobtexts import events_of, lines, signatures_of, verdict_of


def test_a_table_of_calls_gives_the_open_call_of_each_rank() -> None:
    text = lines(
        "rank pg          seq  name             numel    state      top user frame",
        "0    default_pg  4400 nccl:all_reduce  1        completed  step engine.py:1188 (clip)",
        "0    default_pg  4401 nccl:all_reduce  8388608  started    sync train.py:402",
        "1    default_pg  4401 nccl:all_reduce  1        started    step engine.py:1188 (clip)",
        "train.py:400:",
    )
    calls = [e for e in events_of(text) if e.signature == "fr.call"]
    assert [(e.rank, e.attrs["seq"], e.attrs["numel_in"]) for e in calls] == [(0, "4401", "8388608"), (1, "4401", "1")]
    assert verdict_of(text).action == "fail_fast"


@pytest.mark.parametrize(
    "text",
    [
        "rank  loss  state\n0  2.1  started",
        "rank seq op state\na b c d",
        "rank seq op state\n0 12 all_reduce completed",
        "rank seq op state",
    ],
)
def test_other_tables_with_ranks_give_no_calls(text: str) -> None:
    assert "fr.call" not in signatures_of(text)


def test_ranks_that_call_the_same_give_no_mismatch() -> None:
    text = lines("rank seq op numel state", "0 12 all_reduce 4096 started", "1 12 all_reduce 4096 started")
    assert verdict_of(text).fault_class != "user_code" or verdict_of(text).action == "ask_human"


def table(*values: int) -> str:
    rows = [f"10:{10 * i:02d}  ACTIVE/LinkUp           {value:<3}         False" for i, value in enumerate(values)]
    return lines("time   port mlx5_2/1 state     link_downed  condition NicDown", *rows)


def test_a_counter_that_rises_in_a_table_over_time_is_a_flapping_link() -> None:
    verdict = verdict_of(table(3, 6, 11, 15))
    assert (verdict.fault_class, verdict.action) == ("fabric", "drain_at_checkpoint")
    assert verdict.entity.nic == "mlx5_2"


def test_a_counter_that_stands_still_is_none() -> None:
    assert "derived.link.rising" not in {w.event.signature for w in verdict_of(table(36, 36, 36, 36)).evidence}


def test_numbers_under_other_columns_are_no_counters() -> None:
    text = lines("time   device    state   users", "10:00  mlx5_2/1  ACTIVE  3", "10:10  mlx5_2/1  ACTIVE  9")
    assert "counter.total" not in signatures_of(text)


def test_late_heartbeats_are_read_once_a_rank_with_the_limit_of_their_phase() -> None:
    beat = '{"alert_type":"heartbeat_stale","rank":%d,"silent_s":%d,"step_limit_s":60,"stage":"saving","saving_limit_s":1200}'
    found = [
        e
        for e in events_of(lines(beat % (3, 70), beat % (3, 95), beat % (4, 71)))
        if e.signature == "monitor.beat_late"
    ]
    assert [(e.rank, e.attrs["age"], e.attrs["phase_limit"]) for e in found] == [(3, 95.0, 1200.0), (4, 71.0, 1200.0)]


@pytest.mark.parametrize(
    "text",
    [
        '{"event":"heartbeat","rank":3,"age_s":70}',
        '{"event":"heartbeat_timeout"',
        "rank 3 heartbeat ok",
        '["heartbeat_timeout"]',
        "no heartbeat",
    ],
)
def test_heartbeats_that_came_are_not_late(text: str) -> None:
    assert "monitor.beat_late" not in signatures_of(text)


@given(st.text(alphabet='rank seqopstate012²٣ |/{}":.\nGB<limit again:heartbeat_timeout,age_s9eE+', max_size=300))
def test_any_text_is_read(text: str) -> None:
    for head in (
        "rank seq op state\n",
        "time link_downed mlx5_0/1 x\n",
        "check 1.0 GB/s < 2.0 GB/s\n",
        '{"event":"heartbeat_timeout"',
    ):
        events_of(head + text)


def test_numbers_that_are_no_seconds_are_not_taken() -> None:
    for value in ("1e999", "9" * 400, "-1", "NaN", "true", '"x"'):
        found = events_of(f'{{"event":"heartbeat_timeout","rank":3,"age_s":{value}}}')
        assert all(e.attrs.get("age") is None for e in found if e.signature == "monitor.beat_late")
