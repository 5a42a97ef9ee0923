"""Failure blocks and error files of torch elastic."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from keepstep.catalog.load import shipped
from keepstep.records.event import Event
from keepstep.sources.documents import split
from keepstep.sources.joblog.elastic import read_failures


def found(text: str, path: str = "job.log") -> list[Event]:
    return [e for d in split(path, text) for e in read_failures(d, shipped())]


def failure(index: int, rank: int, code: int, time: str = "2031-02-14_11:00:01", host: str = "n1") -> str:
    return (
        f"[{index}]:\n  time      : {time}\n  host      : {host}\n  rank      : {rank} (local_rank: {rank % 8})\n"
        f"  exitcode  : {code} (pid: {4000 + rank})\n  error_file: <N/A>\n  traceback : To enable traceback see: https://x"
    )


def block(root: str, *others: str) -> str:
    return "\n".join(
        [
            "train.py FAILED",
            "-" * 60,
            "Failures:",
            *(others or ["  <NO_OTHER_FAILURES>"]),
            "-" * 60,
            "Root Cause (first observed failure):",
            root,
            "=" * 60,
        ]
    )


def test_each_failed_rank_is_an_event_with_its_code_host_and_time() -> None:
    events = found(block(failure(0, 3, -9), failure(1, 11, 1, "2031-02-14_11:00:05", "n2")))
    by_rank = {e.rank: e for e in events}
    assert by_rank[3].attrs["how"] == "SIGKILL"
    assert by_rank[3].attrs["root"] is True
    assert by_rank[11].node == "n2"
    assert by_rank[11].attrs["root"] is False
    assert (by_rank[11].time_ns or 0) - (by_rank[3].time_ns or 0) == 4_000_000_000
    assert by_rank[3].time_quality == "zone_assumed"


def test_a_block_behind_prefixes_is_read() -> None:
    text = "\n".join(f"[rank0]: {line}" for line in block(failure(0, 5, 1)).splitlines())
    assert [e.rank for e in found(text)] == [5]


def test_a_block_that_lacks_fields_gives_nothing() -> None:
    assert found(block("[0]:\n  time      : 2031-02-14_11:00:01\n  traceback : x")) == []


def test_an_error_file_gives_failure_and_exception_at_its_own_time() -> None:
    stack = 'Traceback (most recent call last):\n  File "/job/t.py", line 71, in main\nIndexError: list index out of range\n'
    data = {
        "message": {
            "message": "IndexError: list index out of range",
            "extraInfo": {"py_callstack": stack, "timestamp": "1928919011"},
        }
    }
    events = found(json.dumps(data), "/logs/attempt_0/5/error.json")
    assert [e.signature for e in events] == ["elastic.rank_failed", "python.user_exception"]
    assert {e.time_ns for e in events} == {1928919011 * 10**9}
    assert events[0].attrs["local_rank"] == 5


def test_an_error_file_of_the_old_form() -> None:
    (event,) = found(json.dumps({"message": "worker died", "timestamp": 1928919011}))
    assert event.attrs["message"] == "worker died"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=20),
        lambda c: (
            st.lists(c, max_size=4)
            | st.dictionaries(
                st.sampled_from(["message", "extraInfo", "timestamp", "py_callstack", "x"]), c, max_size=4
            )
        ),
        max_leaves=20,
    )
)
def test_any_json_is_read_without_an_error(value: object) -> None:
    found(json.dumps({"message": value}))
    found(json.dumps({"message": {"message": value, "extraInfo": value, "timestamp": value}}))
