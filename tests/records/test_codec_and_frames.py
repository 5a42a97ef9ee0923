"""JSON codec, time formats and the frames of the rank's socket."""

from __future__ import annotations

import datetime
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.records.codec import from_json, from_rfc3339, rfc3339, to_pretty_json
from keepstep.records.frames import MAX_FRAME_BYTES, pack, recv_frame
from keepstep.records.timeline import Mark


def test_a_time_has_nine_digits_and_says_utc() -> None:
    assert rfc3339(1_700_000_000_000_000_001) == "2023-11-14T22:13:20.000000001Z"


@given(st.integers(0, 4_000_000_000_000_000_000))
def test_times_read_back_to_the_microsecond(time_ns: int) -> None:
    text = rfc3339(time_ns)
    moment = datetime.datetime.fromisoformat(f"{text[:26]}+00:00")
    micros = round((moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) / datetime.timedelta(microseconds=1))
    assert micros * 1000 + int(text[26:29]) == time_ns
    assert from_rfc3339(text) == time_ns


@pytest.mark.parametrize("text", ["", "yesterday", "2031-03-03T04:05:06", "2031-13-03T04:05:06Z"])
def test_what_is_no_time_or_names_no_zone_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_rfc3339(text)


def test_pretty_json_is_the_same_value() -> None:
    value = {"b": [1, {"c": None}], "a": "x"}
    assert msgspec.json.decode(to_pretty_json(value)) == value
    assert to_pretty_json(value).endswith(b"}\n")


def test_an_unknown_mark_kind_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="kind"):
        from_json(b'{"t_ns": 1, "kind": "nonsense"}', Mark)


def test_frames_travel_and_broken_ones_are_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack({"op": "get", "key": "k"}) + pack({"op": "x"}))
        assert recv_frame(theirs) == {"op": "get", "key": "k"}
        assert recv_frame(theirs) == {"op": "x"}
        ours.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(ValueError, match="over the limit"):
            recv_frame(theirs)
        ours.sendall(b"\x00\x00\x00\x02[]")
        with pytest.raises(ValueError, match="not a JSON object"):
            recv_frame(theirs)
        ours.close()
        with pytest.raises(ConnectionError):
            recv_frame(theirs)


def test_a_frame_too_large_is_not_sent() -> None:
    with pytest.raises(ValueError, match="over the limit"):
        pack({"value": "x" * MAX_FRAME_BYTES})
