"""`keepstep replay`: histories made by hand, whatever their order; nothing looks ahead; prices; errors."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zstandard
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.catalog.load import shipped
from keepstep.catalog.matcher import Matcher
from keepstep.cli.main import main
from keepstep.launcher.eventhistory import as_of_then, count_interruptions, past_incidents
from keepstep.records.codec import to_json
from keepstep.records.event import Event, event_fields
from keepstep.sources.eventlines import in_order
from keepstep.sources.reading import read_text
from tests.attribution.shipped_events import T0, S, made, xid

HOUR = 3600.0
PRICED = (
    "--gpus",
    "128",
    "--delta",
    "10",
    "--persist-lag",
    "30",
    "--interval",
    "20m",
    "--restart",
    "225",
    "--replace",
    "2m",
)
RESTART, REPLACED, ROLLBACK = 105.0, 225.0, 630.0
"""By the flags above: 225 s with a new node, of which 120 s are for it; half of 20 min and the lag are undone."""


def line(event: Event) -> str:
    return to_json(event_fields(event)).decode()


def gone(at_s: float, node: str = "n1", **more: Any) -> Event:
    """A GPU that has fallen off its bus."""
    return xid(79, at_s=at_s, detail="GPU has fallen off the bus.", node=node, **more)


def crash(at_s: float, rank: int = 3) -> Event:
    """A rank whose program ended with an exception."""
    return made(CRASH, at_s, rank=rank, node="n2")


CRASH = next(s.id for s in shipped() if s.action == "fail_fast" and s.kind == "rank.exception" and s.role == "root")


def step(at_s: float) -> Event:
    return made("job.progress", at_s)


def replay(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, ["replay", *map(str, arguments)], input=stdin)


def done(*arguments: str | Path, stdin: bytes | None = None) -> Any:
    result = replay(*arguments, "-o", "json", stdin=stdin)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def written(path: Path, events: Sequence[Event]) -> Path:
    path.write_text("".join(line(e) + "\n" for e in events))
    return path


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_HOME", str(tmp_path / "home"))


HISTORY = (gone(0), gone(2 * HOUR), crash(5 * HOUR), gone(30 * HOUR, "n3"))


class TestPrices:
    def test_a_history_by_hand(self, tmp_path: Path) -> None:
        found = done(written(tmp_path / "e.jsonl", HISTORY), *PRICED, "--spares", "2", "--price", "2.5")
        assert found["schema"] == "keepstep.replay/1"
        assert [(i["node"], i["class"], i["interrupted"]) for i in found["incidents"]] == [
            ("n1", "hardware", True),
            ("n1", "hardware", True),
            ("n2", "user_code", True),
            ("n3", "hardware", True),
        ]
        spent = {
            p["policy"]: [i["policies"][p["policy"]]["cost_s"] for i in found["incidents"]] for p in found["policies"]
        }
        kept, out, person = RESTART + ROLLBACK, REPLACED + ROLLBACK, 1800.0
        assert spent == {
            "verdict": [out, 0.0, person + kept, out],
            "restart-always": [kept, kept, kept, kept],
            "evict-always": [out, 0.0, out, out],
            "none": [person + out, 0.0, person + kept, person + out],
        }
        by_name = {p["policy"]: p for p in found["policies"]}
        assert by_name["restart-always"]["wasted_restarts"] == 1
        assert by_name["evict-always"]["healthy_out"] == 1
        assert by_name["restart-always"]["gpu_hours"] == pytest.approx(128 * 4 * kept / 3600 + 16 * 30, abs=1e-3)
        assert by_name["restart-always"]["usd"] == pytest.approx(2.5 * by_name["restart-always"]["gpu_hours"], abs=0.01)
        for one in found["policies"]:
            assert one["cost_s"] == pytest.approx(sum(spent[one["policy"]]) + one["stall_s"], abs=0.01)
            assert one["saved_hours"] == pytest.approx((4 * kept - one["cost_s"]) / 3600, abs=1e-3)
            assert one["saved_usd"] == pytest.approx(2.5 * one["saved_gpu_hours"], abs=0.02)

    def test_no_failure_rate_is_needed(self, tmp_path: Path) -> None:
        found = done(written(tmp_path / "e.jsonl", HISTORY), "--gpus", "128", "--delta", "10", "--restart", "60")
        # Four interruptions in 30 hours of 16 nodes.
        assert found["assumptions"]["failures_per_1000_node_days"] == 200.0
        assert found["assumptions"]["failure_rate_from"] == "4 interruptions in 1.2 days of 16 nodes"
        given_rate = done(
            tmp_path / "e.jsonl", "--gpus", "128", "--delta", "10", "--restart", "60", "--failure-rate", "5"
        )
        assert given_rate["assumptions"]["failures_per_1000_node_days"] == 5.0

    def test_without_flags_of_a_job_there_are_no_prices(self, tmp_path: Path) -> None:
        path = written(tmp_path / "e.jsonl", HISTORY)
        found = done(path)
        assert found["assumptions"] is None
        assert "cost_s" not in found["policies"][0] and "cost_s" not in found["incidents"][0]["policies"]["verdict"]
        assert [p["prevented"] for p in found["policies"]] == [1, 0, 1, 1]
        shown = replay(path, "-o", "table")
        assert shown.exit_code == 0 and "cordon_node" in shown.stdout and "GPU-HOURS" not in shown.stdout

    def test_tables_say_what_was_assumed(self, tmp_path: Path) -> None:
        shown = replay(written(tmp_path / "e.jsonl", HISTORY), *PRICED, "--price", "2", "-o", "wide").stdout
        assert "a person comes in 30m 00s" in shown and "An estimate" in shown and "SAVED USD" in shown
        assert "healthy" in shown and "prevented" in shown and "again" in shown

    def test_chosen_policies_and_baseline(self, tmp_path: Path) -> None:
        rules = tmp_path / "site.toml"
        rules.write_text('[[rule]]\nclass = "hardware"\nmin_incidents = 2\naction = "cordon_node"\n')
        path = written(tmp_path / "e.jsonl", HISTORY)
        found = done(path, "--policy", rules, "--policy", "verdict", "--baseline", "none", *PRICED)
        assert [p["policy"] for p in found["policies"]] == [str(rules), "verdict", "none"]
        assert found["policies"][2]["saved_hours"] == 0.0
        # A person who was asked for the first one took the node out.
        assert found["incidents"][1]["policies"][str(rules)]["prevented_by"] == found["incidents"][0]["id"]

    def test_labels(self, tmp_path: Path) -> None:
        path = written(tmp_path / "e.jsonl", HISTORY)
        ids = [i["id"] for i in done(path)["incidents"]]
        labels = tmp_path / "labels.jsonl"
        labels.write_text(label(ids[3], "user_code") + "\n" + label("INC-0009", "fabric") + "\n")
        result = replay(path, "--labels", labels, "-o", "json")
        assert "INC-0009 is none of this history's incidents" in result.stderr
        found = json.loads(result.stdout)
        assert found["incidents"][3]["label"] == "user_code"
        assert found["incidents"][3]["policies"]["verdict"]["healthy"] is True

    def test_labels_of_a_run(self, tmp_path: Path) -> None:
        path = written(tmp_path / "e.jsonl", HISTORY)
        folder = tmp_path / "run" / "incidents" / "labels"
        folder.mkdir(parents=True)
        third = done(path)["incidents"][2]
        (folder.parent / "INC-0007.json").write_text(json.dumps({"time": third["begin"]}))
        (folder / "INC-0007.json").write_text(label("INC-0007", "hardware"))
        assert done(path, "--labels", folder)["incidents"][2]["label"] == "hardware"
        other = tmp_path / "other.json"
        other.write_text(label(third["id"], "storage"))
        refused = replay(path, "--labels", folder, "--labels", other)
        assert refused.exit_code == 2 and "keep one" in refused.stderr


def label(incident: str, fault_class: str) -> str:
    known = {"incident": incident, "run_id": "r", "class": fault_class, "said": "unknown", "reason": "seen", "by": "me"}
    return json.dumps({"schema": "keepstep.label/1", "time": "2031-01-01T00:00:00Z", **known})


class TestReading:
    def test_packed_files_and_standard_input(self, tmp_path: Path) -> None:
        first, second, third = (
            ("".join(line(e) + "\n" for e in part)).encode() for part in (HISTORY[:1], HISTORY[1:3], HISTORY[3:])
        )
        (tmp_path / "a.gz").write_bytes(gzip.compress(first))
        (tmp_path / "b.zst").write_bytes(zstandard.compress(second))
        whole = written(tmp_path / "all.jsonl", HISTORY)
        assert done("-", tmp_path / "b.zst", tmp_path / "a.gz", stdin=third) == done(whole)

    def test_what_scan_prints_is_what_replay_reads(self, tmp_path: Path) -> None:
        log = tmp_path / "kern.log"
        log.write_text(
            "2031-06-15T12:00:00Z gpu-17 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
            "2031-06-16T12:00:00Z gpu-18 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
        )
        scanned = CliRunner().invoke(main, ["scan", str(log), "-o", "jsonl"])
        found = done("-", stdin=scanned.stdout_bytes)
        assert [(i["begin"][:19], i["node"], i["action"]) for i in found["incidents"]] == [
            ("2031-06-15T12:00:00", "gpu-17", "cordon_node"),
            ("2031-06-16T12:00:00", "gpu-18", "cordon_node"),
        ]

    def test_times_of_rfc_3339_alone(self, tmp_path: Path) -> None:
        fields = event_fields(gone(0))
        path = tmp_path / "e.jsonl"
        local = {k: v for k, v in fields.items() if k != "time_ns"} | {"time": "2030-03-17T20:46:40.5+03:00"}
        path.write_text(json.dumps(local))
        assert done(path)["incidents"][0]["begin"] == "2030-03-17T17:46:40.500000000Z"

    def test_the_same_file_twice_is_one_history(self, tmp_path: Path) -> None:
        path = written(tmp_path / "e.jsonl", HISTORY)
        assert done(path, path) == done(path)

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            ({"schema": "keepstep.verdict/1"}, "schema 'keepstep.verdict/1': must be 'keepstep.event/1'"),
            ({"schema": None}, "schema None"),
            ({"severity": "bad"}, "severity 'bad': Invalid enum value"),
            ({"time": "yesterday"}, "time 'yesterday': not a time of RFC 3339"),
            ({"time": "2031-01-01T00:00:00"}, "not a time of RFC 3339 with its zone"),
            ({"time": 5}, "time 5: not a time"),
            ({"time": "2031-01-01T00:00:00Z"}, "not the same time"),
            ({"gpu": {"index": "one"}}, "gpu.index 'one': Expected `int | null`"),
            ({"count": 0}, "count 0: at least 1"),
            ({"last_ns": 5}, "last_ns 5: before time_ns"),
        ],
    )
    def test_a_line_that_is_no_event(self, tmp_path: Path, change: dict[str, Any], told: str) -> None:
        path = tmp_path / "e.jsonl"
        path.write_text(f"{line(HISTORY[0])}\n\n{json.dumps(event_fields(HISTORY[1]) | change)}\n")
        refused = replay(path)
        assert refused.exit_code == 2
        assert f"{path}:3: " in refused.stderr and told in refused.stderr, refused.stderr
        skipped = replay(path, "--skip-bad", "-o", "json")
        assert json.loads(skipped.stdout)["read"]["bad_lines"] == 1
        assert "1 lines are no events" in skipped.stderr and told in skipped.stderr

    @pytest.mark.parametrize("text", ["{", "[1]", "7", "\x00\xff", '{"schema": "keepstep.event/1"}', "[" * 100_000])
    def test_a_line_that_is_nothing(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "e.jsonl"
        path.write_text(text)
        refused = replay(path)
        assert (refused.exit_code, f"{path}:1: " in refused.stderr) == (2, True), refused.output

    def test_a_file_that_is_cut(self, tmp_path: Path) -> None:
        path = tmp_path / "e.gz"
        random.seed(5)
        path.write_bytes(
            gzip.compress("".join(line(gone(n * 7200, f"n{random.random()}")) + "\n" for n in range(50)).encode())[:-40]
        )
        assert replay(path).exit_code == 2
        assert done(path, "--skip-bad")["read"]["bad_lines"] >= 1

    def test_wrong_arguments(self, tmp_path: Path) -> None:
        path = written(tmp_path / "e.jsonl", HISTORY)
        (tmp_path / "bad.toml").write_text('[[rule]]\naction = "cordon"\n')
        for arguments, code, told in (
            ((tmp_path / "no.jsonl",), 6, "no such file"),
            ((path, "--policy", "restart-allways"), 6, "did you mean restart-always?"),
            ((path, "--policy", tmp_path / "bad.toml"), 2, "rule 1: action 'cordon'"),
            ((path, "--labels", tmp_path / "nothing"), 6, "no such file"),
            ((path, "--labels", path), 2, f"{path}:1: no keepstep.label/1"),
            ((path, "--gpus", "8"), 2, "--delta is needed"),
            ((path, "--delta", "8"), 2, "--gpus is needed"),
            ((path, "--human", "soon"), 2, "--human soon: give a time"),
            ((), 2, "Missing argument"),
        ):
            result = replay(*arguments)
            assert (result.exit_code, told in result.stderr) == (code, True), (arguments, result.output)

    def test_nothing_happened(self, tmp_path: Path) -> None:
        empty = written(tmp_path / "e.jsonl", [])
        found = done(empty, *PRICED)
        assert found["history"]["first"] is None and found["incidents"] == []
        assert all(p["cost_s"] == 0.0 for p in found["policies"])
        assert replay(empty, *PRICED, "-o", "table").exit_code == 0


class TestWhatCounts:
    def test_replays_of_a_boot_do_not(self, tmp_path: Path) -> None:
        again = [msgspec.structs.replace(gone(3 * HOUR, "n2"), stale="replay", boot_id="b", seq=7)]
        result = replay(written(tmp_path / "e.jsonl", [gone(0), *again]), "-o", "json")
        found = json.loads(result.stdout)
        assert [i["node"] for i in found["incidents"]] == ["n1"]
        assert found["read"]["stale"] == {"replay": 1}
        assert "1 events are stale (replay)" in result.stderr
        assert count_interruptions(again, shipped()).interruptions == 0
        assert as_of_then(again) == again

    def test_a_record_that_came_twice_counts_once(self) -> None:
        one = msgspec.structs.replace(gone(0), boot_id="b", seq=7)
        assert len(in_order([msgspec.structs.replace(one, source="other way"), one])) == 1

    def test_what_was_over_later_was_so_at_its_time(self, tmp_path: Path) -> None:
        path = written(
            tmp_path / "e.jsonl", [msgspec.structs.replace(gone(0), stale="previous_boot"), gone(9 * HOUR, "n2")]
        )
        assert [i["node"] for i in done(path)["incidents"]] == ["n2"]
        assert "--as-of-then" in replay(path).stderr
        assert [i["node"] for i in done(path, "--as-of-then")["incidents"]] == ["n1", "n2"]

    def test_events_without_time_or_entry_are_named(self, tmp_path: Path) -> None:
        strange = msgspec.structs.replace(gone(0), signature="no.such")
        untimed = msgspec.structs.replace(gone(0), time_ns=None)
        result = replay(written(tmp_path / "e.jsonl", [strange, untimed]), "-o", "json")
        assert json.loads(result.stdout)["incidents"] == []
        assert "1 events have no time" in result.stderr and "1 events have signatures" in result.stderr


class TestCounting:
    def test_faults_within_ten_minutes_are_one_interruption(self) -> None:
        history = [gone(0), gone(600, "n2"), gone(1201, "n3"), step(HOUR * 5), crash(HOUR * 24)]
        found = count_interruptions(history, shipped())
        assert (found.incidents, found.interruptions, found.multi_node) == (4, 3, 1)
        assert found.by_class == {"hardware": 2, "user_code": 1}
        assert found.span_days == pytest.approx(1.0)
        assert (found.first, found.nodes_seen) == ("2030-03-17T17:46:40.000000000Z", 3)

    def test_infos_and_warnings_interrupt_nothing(self) -> None:
        quiet = [step(0), step(HOUR)]
        assert count_interruptions(quiet, shipped()).interruptions == 0
        warned = msgspec.structs.replace(gone(0), severity="warning")
        assert count_interruptions([warned], shipped()).interruptions == 0

    def test_nothing(self) -> None:
        found = count_interruptions([], shipped())
        assert (found.incidents, found.first, found.last, found.span_days) == (0, None, None, 0.0)


# ---- for any history

SIGNS = (79, 48, 31, 13, 94, 119)


@st.composite
def events(draw: st.DrawFn) -> Event:
    at_s = float(draw(st.integers(0, 40)) * draw(st.sampled_from([1, 61, 601, 3599])))
    node = draw(st.sampled_from(["n1", "n2", "n3"]))
    kind = draw(st.sampled_from([*map(str, SIGNS), "step", "crash", "burst"]))
    if kind == "step":
        return step(at_s)
    if kind == "crash":
        return crash(at_s, draw(st.integers(0, 2)))
    if kind == "burst":
        end_ns = T0 + round(at_s * S) + draw(st.integers(0, 9000)) * S
        burst = draw(st.sampled_from([gone(at_s, node), step(at_s)]))
        return msgspec.structs.replace(burst, last_ns=end_ns, count=9, attrs={**burst.attrs, "last_order": 99})
    return xid(int(kind), at_s=at_s, node=node)


def spell(found: Sequence[Any]) -> list[bytes]:
    return [to_json((i.id, i.begin_ns, i.end_ns, i.nodes, i.interrupted, i.hang, i.verdict)) for i in found]


@settings(max_examples=40, deadline=None)
@given(st.lists(events(), max_size=10), st.randoms(use_true_random=False))
def test_any_order_gives_the_same(history: list[Event], chance: random.Random) -> None:
    other = list(history)
    chance.shuffle(other)
    assert spell(past_incidents(in_order(other), shipped())) == spell(past_incidents(in_order(history), shipped()))


@settings(max_examples=60, deadline=None)
@given(st.lists(events(), max_size=10))
def test_nothing_looks_ahead(history: list[Event]) -> None:
    whole = past_incidents(in_order(history), shipped())
    assert len({i.id for i in whole}) == len(whole)
    for one in whole:
        until = in_order([cut(e, one.end_ns) for e in history if (e.time_ns or 0) <= one.end_ns])
        alone = {i.id: i for i in past_incidents(until, shipped())}
        assert spell([alone[one.id]]) == spell([one])


def cut(event: Event, time_ns: int) -> Event:
    """An event as it was known at a time: a burst of faults went on, of steps the first is sure."""
    if event.last_ns is None or event.last_ns <= time_ns:
        return event
    if event.kind != "job.progress":
        return msgspec.structs.replace(event, last_ns=time_ns)
    attrs = {k: v for k, v in event.attrs.items() if k != "last_order"}
    return msgspec.structs.replace(event, count=1, last_ns=None, attrs=attrs)


def test_files_in_any_order_print_the_same_bytes(tmp_path: Path) -> None:
    one, other = written(tmp_path / "one", HISTORY[1:3]), written(tmp_path / "other", (HISTORY[3], HISTORY[0]))
    first, second = (replay(*p, *PRICED, "-o", "json").stdout_bytes for p in ((one, other), (other, one)))
    assert first == second
    mixed = written(tmp_path / "mixed", HISTORY[::-1])
    assert replay(mixed, *PRICED, "-o", "json").stdout_bytes == first


@pytest.mark.skipif("KEEPSTEP_SHARED" not in os.environ, reason="KEEPSTEP_SHARED names no folder with cases")
def test_the_case_files_replay(tmp_path: Path) -> None:
    catalog = shipped()
    matcher = Matcher(catalog)
    cases = (Path(os.environ["KEEPSTEP_SHARED"]) / "cases" / "dev.jsonl").read_text().splitlines()
    found = []
    for number, text in enumerate(cases[:20]):
        found += read_text(f"case-{number}", json.loads(text)["input"], catalog, matcher).events
    record = done(written(tmp_path / "e.jsonl", found), *PRICED)
    assert record["history"]["incidents"] > 0
    assert all(i["policies"]["verdict"]["cost_s"] >= 0 for i in record["incidents"])
