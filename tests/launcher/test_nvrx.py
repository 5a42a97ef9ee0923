"""Cycle info in NVIDIA Resiliency Extension's form, read back by protobuf with the message its tools parse it as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.launcher.views.nvrx import CycleInfo, cycle_info, nodelist, write_cycle_infos
from keepstep.records.errors import StorageError
from tests.cli.story import CYCLES, FAULT, FIRST, SECOND, keepstep, places, write_run

FIELDS = {  # of message NVRxCycleInfo, in its order, with their protobuf types
    "job_id": "string",
    "attempt_index": "uint32",
    "cycle_number": "uint32",
    "cycle_start_time": "string",
    "cycle_end_time": "string",
    "cycle_log_file": "string",
    "active_nodes": "string",
    "standby_nodes": "string",
    "active_ranks": "string",
    "generation": "uint64",
}


def parse(text: str) -> Any:
    """Parse as that message; a field it does not have is an error, as for its own reader."""
    pytest.importorskip("google.protobuf", reason="protobuf reads the form as its tools do")
    from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="cycle_info.proto", package="test", syntax="proto3")
    message = file.message_type.add(name="NVRxCycleInfo")
    for number, (name, kind) in enumerate(FIELDS.items(), 1):
        kinds = descriptor_pb2.FieldDescriptorProto
        message.field.add(
            name=name, number=number, type=getattr(kinds, f"TYPE_{kind.upper()}"), label=kinds.LABEL_OPTIONAL
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return json_format.Parse(text, message_factory.GetMessageClass(pool.FindMessageTypeByName("test.NVRxCycleInfo"))())


def test_its_reader_takes_every_file(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "job-1", [*FIRST, *FAULT, *SECOND])
    result = keepstep("convert", "cycle-info", run_dir, "-o", "name")
    assert result.exit_code == 0, result.output
    first, second = (parse(Path(line).read_text()) for line in result.stdout.splitlines())
    assert (first.job_id, first.attempt_index, first.cycle_number, first.generation) == ("job-1", 0, 0, 1)
    assert (first.active_nodes, first.standby_nodes, first.active_ranks) == ("host-a,host-b", "host-c", "0-1")
    assert first.cycle_log_file == str(run_dir / "logs" / "cycle-0000.log")
    assert (first.cycle_start_time, second.cycle_end_time) == ("2023-11-15T00:00:01.000000Z", "")
    assert second.generation == 0


def test_names_and_link(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "job-1", [*FIRST, *FAULT, *SECOND])
    out = tmp_path / "out"
    for _ in range(2):  # again over what is there
        assert keepstep("convert", "cycle-info", run_dir, "--out", out).exit_code == 0
    assert sorted(p.name for p in out.iterdir()) == [
        "cycle_info.job-1.0.0", "cycle_info.job-1.0.1", "cycle_info.job-1.current",
    ]  # fmt: skip
    assert (out / "cycle_info.job-1.current").readlink() == Path("cycle_info.job-1.0.1")


def test_the_link_names_the_newest_attempt(tmp_path: Path) -> None:
    later = msgspec.structs.replace(CYCLES[1], attempt=2, cycle=5)
    written = write_cycle_infos([later, CYCLES[0]], tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "cycle_info.job-1.current").readlink().name == "cycle_info.job-1.2.5" == written[-1].name


def test_fields_are_exactly_those() -> None:
    assert CycleInfo.__struct_fields__ == tuple(FIELDS)


def test_ranks_follow_the_order_of_the_nodes() -> None:
    cycle = msgspec.structs.replace(CYCLES[0], active_nodes=["n12", "n3", "n4"], ranks=[])
    info = cycle_info(cycle, Path("/r"))
    assert (info.active_nodes, info.active_ranks) == ("n[03-04,12]", "1-2,0")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([], ""),
        (["node002", "node001"], "node[001-002]"),
        (["node003"], "node[003]"),
        (["node001.cluster.com", "node002.cluster.com", "node007"], "node[001-002,007]"),
        (["b2", "a1", "b1"], "a[1],b[1-2]"),
        (["login", "node1"], "login,node1"),
        (["nvl72-T01", "nvl72-T02"], "nvl72-T[01-02]"),
    ],
)
def test_node_lists(hosts: list[str], expected: str) -> None:
    assert nodelist(hosts) == expected


@given(st.sets(st.integers(1, 9999), min_size=1, max_size=40))
def test_a_node_list_names_every_node_once(numbers: set[int]) -> None:
    text = nodelist([f"n{number:04d}" for number in numbers])
    found: list[int] = []
    for part in text.removeprefix("n[").removesuffix("]").split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    assert found == sorted(numbers)


def test_what_is_missing_or_cannot_be_written(tmp_path: Path) -> None:
    empty = write_run(tmp_path / "job-2", FIRST, cycles=[])
    assert keepstep("convert", "cycle-info", empty).exit_code == 6
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_cycle_infos(CYCLES, tmp_path, tmp_path / "file" / "below")


def test_hosts_of_ranks_go_before_those_of_joins() -> None:
    cycle = msgspec.structs.replace(CYCLES[1], ranks=places("a", "c"))
    info = cycle_info(cycle, Path("/r"), {"a": "old", "c": "old"})
    assert info.active_nodes == "host-a,host-c"
    assert json.loads(msgspec.json.encode(info))["active_ranks"] == "0-1"
