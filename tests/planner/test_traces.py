"""Failure traces: what is read and what is refused."""

from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.planner.traces import (
    DAY_S,
    Fault,
    detect_format,
    parse_faults,
    parse_infinitehbd,
    parse_lanl,
    parse_traces,
    read_traces,
)
from keepstep.records.errors import ConfigError, StorageError

# ---- formats

HEADER = {"schema": "keepstep.faults/1", "nodes": 4, "name": "prod", "days": 2, "hardware": "8 H100"}


def lines(*records: dict[str, Any] | str) -> str:
    return "\n".join(record if isinstance(record, str) else json.dumps(record) for record in records) + "\n"


class TestFaultLines:
    def test_seconds(self) -> None:
        text = lines(
            HEADER,
            {"node": 2, "begin_s": 500, "end_s": 700.5},
            "",
            {"node": "n1", "begin_s": 100, "cause": "gpu", "level": "hardware", "detail": "DBE"},
            {"node": "n1", "begin_s": 172_000, "end_s": 999_999},
        )
        trace = parse_faults(text)
        assert (trace.name, trace.nodes, trace.days, trace.hardware) == ("prod", 4, 2.0, "8 H100")
        first, second, third = trace.faults
        assert first == Fault(
            node="n1", begin_s=100, end_s=2 * DAY_S, cause="gpu", level="hardware", detail="DBE", returned=False
        )
        assert second == Fault(node="2", begin_s=500, end_s=700.5)
        assert (third.end_s, third.returned) == (2 * DAY_S, False)  # it came back when nobody watched any more

    def test_dates_count_from_the_begin_given_or_the_first_fault(self) -> None:
        faults = (
            {"node": "a", "begin": "2026-03-01T02:00:00+02:00", "end": "2026-03-01T00:10:00Z"},
            {"node": "b", "begin": "2026-03-01T01:00:00Z"},
        )
        trace = parse_faults(lines(HEADER | {"begin": "2026-02-28T23:00:00Z"}, *faults))
        assert [(f.begin_s, f.end_s) for f in trace.faults] == [(3600, 4200), (7200, 2 * DAY_S)]
        bare = {"schema": "keepstep.faults/1", "nodes": 4}
        trace = parse_faults(lines(bare, *faults), "there")
        assert [(f.begin_s, f.end_s) for f in trace.faults] == [(0, 600), (3600, 3600)]
        assert trace.name == "there"
        assert trace.days == pytest.approx(1 / 24)

    @pytest.mark.parametrize(
        ("records", "message"),
        [
            ((), "empty"),
            (("{",), "line 1"),
            ((HEADER | {"schema": "keepstep.faults/2"},), "line 1: schema 'keepstep.faults/2'"),
            ((HEADER | {"node": 3},), r"line 1: .*`node`"),
            ((HEADER | {"nodes": 0},), "nodes 0"),
            ((HEADER | {"days": 0},), "lasts 0 s"),
            ((HEADER | {"begin": "yesterday"},), "line 1: begin 'yesterday'"),
            ((HEADER, {"node": "a"}), "line 2: give begin_s or begin"),
            ((HEADER, {"begin_s": 1}), "line 2: .*`node`"),
            ((HEADER, {"node": "a", "begin_s": "1"}), r"line 2: .*begin_s"),
            ((HEADER, {"node": "a", "begin_s": 1, "begin": "2026-03-01T00:00:00Z"}), "line 2: give begin_s or begin"),
            ((HEADER, {"node": "a", "begin_s": 1, "end": "2026-03-01T00:00:00Z"}), "line 2: seconds and dates"),
            (
                (HEADER, {"node": "a", "begin_s": 1}, {"node": "a", "begin": "2026-03-01T00:00:00Z"}),
                "line 3: seconds and dates",
            ),
            ((HEADER, {"node": "a", "begin_s": -1}), r"line 2: begin_s -1"),
            ((HEADER, {"node": "a", "begin_s": 9, "end_s": 8}), "line 2: node a: ends 1 s before"),
            ((HEADER, {"node": "a", "begin_s": 200_000}), "line 2: begins 200000 s .* outside"),
            ((HEADER, {"node": "a", "begin": "2026-03-01T00:00:00"}), "line 2: begin '2026-03-01T00:00:00'"),
            ((HEADER | {"nodes": 1}, {"node": "a", "begin_s": 1}, {"node": "b", "begin_s": 1}), "nodes 1: 2 different"),
        ],
    )
    def test_refusals_name_the_line_and_value(self, records: tuple[dict[str, Any] | str, ...], message: str) -> None:
        with pytest.raises(ConfigError, match=f"^my file: .*{message}"):
            parse_faults(lines(*records), "my file")


def event(node: str, days: float, kind: str, desc: str = "Link Down") -> dict[str, Any]:
    fault_type = {"Level": "Hardware Failure", "Class": "NIC", "Desc": desc}
    return {"node_id": node, "event_time": days, "event_type": kind, "fault_type": fault_type}


class TestInfiniteHBD:
    def test_begins_and_ends_are_paired_by_node_and_fault(self) -> None:
        events = [
            event("a", 1.0, "fault_start"),
            event("a", 1.5, "fault_start", "NIC Lost"),
            event("b", 1.5, "fault_end"),  # in the file before its begin, at the same time
            event("b", 1.5, "fault_start"),
            event("a", 2.0, "fault_end"),
            event("a", 3.0, "fault_end", "NIC Lost"),
            event("c", 3.5, "fault_start"),
            event("d", 4.0, "fault_start"),
            event("d", 5.0, "fault_end"),
        ]
        trace = parse_infinitehbd(json.dumps(events), nodes=5)
        assert (trace.nodes, trace.days) == (5, 4.0)
        told = [(f.node, f.begin_s / DAY_S, f.end_s / DAY_S, f.detail, f.returned) for f in trace.faults]
        assert told == [
            ("a", 0.0, 1.0, "Link Down", True),
            ("b", 0.5, 0.5, "Link Down", True),
            ("a", 0.5, 2.0, "NIC Lost", True),
            ("c", 2.5, 4.0, "Link Down", False),
            ("d", 3.0, 4.0, "Link Down", True),
        ]
        assert {(f.level, f.cause) for f in trace.faults} == {("hardware", "NIC")}

    @pytest.mark.parametrize(
        ("events", "message"),
        [
            ([], "no events"),
            ([event("a", 1.0, "fault_begin")], r"\$\[0\]\.event_type"),
            ([event("a", -1.0, "fault_start")], r"\$\[0\]\.event_time -1"),
            ([event("a", 1.0, "fault_start"), event("b", 2.0, "fault_end")], r"\$\[1\]: fault_end of node b at day 2"),
            ([event("a", 1.0, "fault_start"), {"node_id": "b"}], r"event_time.*\$\[1\]"),
            ([event("a", 1.0, "fault_start")], "lasts 0 s"),
            ([event("a", 1.0, "fault_start"), event("b", 2.0, "fault_start")], "nodes 1: 2 different nodes"),
        ],
    )
    def test_refusals_name_the_key_and_value(self, events: list[dict[str, Any]], message: str) -> None:
        with pytest.raises(ConfigError, match=f"^my file: .*{message}"):
            parse_infinitehbd(json.dumps(events), "my file", nodes=1)


LANL_HEADER = (
    "System,machine type,nodes,procstot,procsinnode,nodenum,Prob Started,Prob Fixed,Down Time,"
    "Facilities,Hardware,Human Error,Network,Undetermined,Software,Same Event"
)


def lanl_text(*rows: str) -> str:
    return "\n".join([LANL_HEADER, *rows]) + "\n"


class TestLanl:
    def test_each_system_is_a_trace(self) -> None:
        text = lanl_text(
            "19,cluster,8,32,4,7,6/21/2005 10:54,6/21/2005 11:00,6,,CPU,,,,,No",
            "3,cluster,2,8,4,1,12/31/2004 23:00,1/1/2005 1:00,120,,,,,,DST,No",
            "17,,,,,0,1/1/2000 0:00,1/1/2000 0:10,10,,,,,,,No",
            '19,cluster,8,32,4,0,6/20/2005 10:54,6/20/2005 10:54,0,,,,,,"Network, too",No',
            "19,cluster,8,32,2,0,6/20/2005 12:54,6/20/2005 12:55,1,,,,,,,No",
        )
        three, nineteen = parse_lanl(text)
        assert (three.name, three.nodes, three.hardware) == ("lanl-3", 2, "cluster, 4 processors a node")
        assert three.faults == (Fault(node="1", begin_s=0.0, end_s=7200.0, cause="DST", level="software"),)
        assert (nineteen.name, nineteen.nodes) == ("lanl-19", 8)
        assert [(f.begin_s, f.down_s, f.level, f.cause) for f in nineteen.faults] == [
            (0.0, 0.0, "software", "Network, too"),
            (7200.0, 60.0, "unstated", "unstated"),
            (DAY_S, 360.0, "hardware", "CPU"),
        ]
        assert nineteen.days == pytest.approx(1 + 360 / DAY_S)
        assert parse_lanl(text.splitlines(keepends=True)) == [three, nineteen]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "line 1: no column 'System'"),
            (LANL_HEADER.replace("Prob Fixed", "Fixed"), "line 1: no column 'Prob Fixed'"),
            (LANL_HEADER, "no record"),
            (lanl_text("19,cluster,8"), "line 2: 3 of 16 columns"),
            (lanl_text("x,c,8,32,4,7,6/21/2005 10:54,6/21/2005 11:00,6,,,,,,,No"), "line 2: System 'x'"),
            (lanl_text("9,c,0,32,4,7,6/21/2005 10:54,6/21/2005 11:00,6,,,,,,,No"), "line 2: nodes '0'"),
            (lanl_text("9,c,8,32,4,7,21.6.2005 10:54,6/21/2005 11:00,6,,,,,,,No"), "Prob Started '21.6.2005 10:54'"),
            (lanl_text("9,c,8,32,4,7,6/31/2005 10:54,7/21/2005 11:00,6,,,,,,,No"), "Prob Started '6/31/2005 10:54'"),
            (lanl_text("9,c,8,32,4,7,6/21/2005 10:54,6/21/2005 9:00,6,,,,,,,No"), "'6/21/2005 9:00' is before"),
            (
                lanl_text(
                    "9,c,8,32,4,7,6/21/2005 10:54,6/21/2005 11:00,6,,,,,,,No",
                    "9,c,9,32,4,7,6/21/2005 10:54,6/21/2005 11:00,6,,,,,,,No",
                ),
                "line 3: nodes 9: system 9 had 8",
            ),
            (
                lanl_text(
                    "9,c,1,32,4,7,6/21/2005 10:54,6/21/2005 11:00,6,,,,,,,No",
                    "9,c,1,32,4,8,6/21/2005 10:54,6/21/2005 11:00,6,,,,,,,No",
                ),
                "system 9: nodes 1: 2 different",
            ),
        ],
    )
    def test_refusals_name_the_line_and_value(self, text: str, message: str) -> None:
        with pytest.raises(ConfigError, match=f"^my file: .*{message}"):
            parse_lanl(text, "my file")


class TestFiles:
    def test_formats_are_told_apart(self) -> None:
        hbd = json.dumps([event("a", 1.0, "fault_start"), event("a", 2.0, "fault_end")])
        lanl = lanl_text("9,c,1,32,4,7,6/21/2005 10:54,6/21/2005 11:00,6,,,,,,,No")
        own = lines(HEADER)
        assert [detect_format(text) for text in (hbd, "\n" + lanl, own)] == ["infinitehbd", "lanl", "keepstep"]
        assert [parse_traces(text)[0].name for text in (hbd, lanl, own)] == ["infinitehbd", "lanl-9", "prod"]
        assert [parse_traces(hbd, nodes=n)[0].nodes for n in (None, 7)] == [400, 7]
        for other in ("", "{}", "System,other\n", "node,begin"):
            with pytest.raises(ConfigError, match=r"^here: not a failure trace"):
                detect_format(other, "here")

    def test_files_plain_and_compressed(self, tmp_path: Path) -> None:
        text = lines(HEADER, {"node": "ä", "begin_s": 5, "end_s": 9})
        raw = text.encode()
        path = tmp_path / "faults"
        for data in (raw, b"\xef\xbb\xbf" + raw, gzip.compress(raw), lzma.compress(raw)):
            path.write_bytes(data)
            assert read_traces(path) == [parse_faults(text)]
        path.write_bytes(lzma.compress(lanl_text("9,c,1,32,4,7,6/21/2005 10:54,6/21/2005 11:00,6,,,,,,,No").encode()))
        assert read_traces(path)[0].name == "lanl-9"

    def test_what_cannot_be_read(self, tmp_path: Path) -> None:
        path = tmp_path / "faults"
        with pytest.raises(StorageError, match=r"faults: cannot read .*No such file"):
            read_traces(path)
        raw = lines(HEADER).encode()
        for data in (gzip.compress(raw)[:-9], gzip.compress(raw)[:12] + b"\xff" * 30, lzma.compress(raw)[:-9]):
            path.write_bytes(data)
            with pytest.raises(ConfigError, match=r"faults: damaged compressed file"):
                read_traces(path)
        path.write_bytes(b'{"schema"\xff')
        with pytest.raises(ConfigError, match=r"faults: not UTF-8 text: byte 9 is 0xff"):
            read_traces(path)
        path.write_bytes(lines(HEADER, "[]").encode())
        with pytest.raises(ConfigError, match=r"faults: line 2"):
            read_traces(path)


SOME_FAULTS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.floats(0.0, 1e6), st.floats(0.0, 1e5)), min_size=2, max_size=40
)


@given(SOME_FAULTS)
def test_a_text_gives_back_its_trace(faults: list[tuple[str, float, float]]) -> None:
    records = [{"node": node, "begin_s": t, "end_s": t + down} for node, t, down in faults]
    trace = parse_faults(lines(HEADER | {"days": 1.2e6 / DAY_S}, *records))
    assert sorted((f.node, f.begin_s, f.end_s) for f in trace.faults) == sorted((n, t, t + d) for n, t, d in faults)
    assert trace.begins_s == sorted(trace.begins_s)
    assert all(fault.returned for fault in trace.faults)
