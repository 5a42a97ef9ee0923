"""Dumps are files of strangers: whatever is in them, reading ends soon, in little memory, and without running any of it."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from bench._dumps import torch_pickle
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.attribution.hang import find_culprits
from keepstep.records.codec import to_json
from keepstep.sources.flightrecorder import dump as dump_module
from keepstep.sources.flightrecorder.dump import DumpError, parse_dump
from keepstep.sources.flightrecorder.files import find_dumps
from keepstep.sources.flightrecorder.reading import read_snapshot
from keepstep.sources.flightrecorder.summary import Tables, summarise
from tests.hang.jobs import as_json, dump, megatron, play

GROUPS, PROGRAMS = megatron(2, 2, 2)
CAME = play(GROUPS, PROGRAMS, stop={3: 9})
DUMPS = {rank: dump(GROUPS, PROGRAMS[rank], rank, CAME[rank]) for rank in PROGRAMS}
BYTES = [torch_pickle(DUMPS[rank]) for rank in (0, 3, 5)]
BYTES += [pickle.dumps(DUMPS[rank], protocol=protocol) for rank in (0, 3) for protocol in (2, 4)]
BYTES += [as_json(DUMPS[0]), as_json(DUMPS[3])]


def read(data: bytes) -> None:
    """Through all of reading and deciding; only what is promised may be raised."""
    tables = Tables()
    try:
        made = parse_dump(data)
    except DumpError:
        return
    summarise(made, 0, "x", tables)


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=400),
    st.sampled_from([b"", b"\x80\x02", b"\x80\x04\x95", b"{", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"]),
)
def test_any_bytes(data: bytes, begin: bytes) -> None:
    read(begin + data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_dumps(data: Any) -> None:
    stream = bytearray(data.draw(st.sampled_from(BYTES)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(stream) - 1))
        how = data.draw(st.sampled_from(["set", "cut", "copy"]))
        if how == "set":
            stream[at] = data.draw(st.integers(0, 255))
        elif how == "copy":
            stream[at:at] = stream[at : at + data.draw(st.integers(1, 60))]
        else:
            del stream[at : at + data.draw(st.integers(1, 30))]
        if not stream:
            break
    read(bytes(stream))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
ODD = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_dumps_with_values_of_other_types(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """Every field may hold anything; an answer comes, and it can be written as JSON."""
    folder = tmp_path_factory.mktemp("odd")
    for rank in (0, 1, 3):
        made = json.loads(json.dumps(DUMPS[rank]))
        for _ in range(data.draw(st.integers(0, 8))):
            where: Any = made
            key: Any = data.draw(st.sampled_from(sorted(where)))
            while isinstance(where[key], dict | list) and where[key] and data.draw(st.integers(0, 3)):
                where = where[key]
                key = data.draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
            where[key] = data.draw(ODD)
        (folder / f"_dump_{rank}").write_bytes(pickle.dumps(made, protocol=4))
    to_json(find_culprits(read_snapshot(find_dumps([str(folder)]).sources, jobs=1)))


def measured(data: bytes) -> tuple[float, int]:
    """Processor seconds and peak bytes of reading."""
    tracemalloc.start()
    begin = time.process_time()
    read(data)
    took = time.process_time() - begin
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return took, peak


def shared_rows(count: int) -> bytes:
    """One entry, referred to many times, each time for three bytes."""
    first = pickle.dumps(DUMPS[0]["entries"][0], protocol=2)[2:-1]
    key = b"X\x07\x00\x00\x00entries"
    version = b"X\x07\x00\x00\x00versionX\x04\x00\x00\x002.10"
    return b"\x80\x02}(" + version + key + b"](" + first + b"r\xff\xff\x00\x00" + b"j\xff\xff\x00\x00" * count + b"eu."


def entry_with(**fields: Any) -> bytes:
    made = dict(DUMPS[0])
    made["entries"] = [made["entries"][0] | fields]
    return pickle.dumps(made, protocol=4)


shape = [1] * 1000
BOMBS = {
    "a million lists": b'{"version": "2.10", "entries": '
    + b"[" * 1000
    + b"]" * 1000
    + b', "x": ['
    + b"[],{}," * 100_000
    + b"1]}",
    "deep JSON": b'{"version": "2.10", "entries": ' + b"[" * 300_000,
    "deep pickle": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "one entry 150,000 times": shared_rows(150_000),
    "one entry more often than is read": shared_rows(210_000),
    "one shape a million times": entry_with(input_sizes=[shape] * 100_000, output_sizes=[shape] * 100_000),
    "sizes beyond counting": entry_with(input_sizes=[[1 << 500_000] * 60] * 4000),
    "sizes whose product is huge": entry_with(input_sizes=[[2**47] * 60] * 4000),
    "a frame a million times": entry_with(frames=[{"filename": "/x/torch/y.py", "line": 1, "name": "f"}] * 100_000),
    "itself": b"\x80\x02}q\x00(X\x07\x00\x00\x00versionX\x04\x00\x00\x002.10X\x07\x00\x00\x00entries](h\x00h\x00eu.",
    "many ranks": pickle.dumps(DUMPS[0] | {"pg_config": {"0": {"name": "0", "desc": "d", "ranks": "1," * 2_000_000}}}),
    "many groups": pickle.dumps(DUMPS[0] | {"pg_config": {str(i): {"ranks": ""} for i in range(20_001)}}),
    "a long name": entry_with(
        profiling_name="nccl:" + "x" * 1_000_000, process_group=("y" * 1_000_000, "z" * 1_000_000)
    ),
    "a long number": json.dumps(
        {"version": "2.10", "pg_status": {"0": {"last_enqueued_collective": "9" * 1_000_000}}}
    ).encode(),
    "numbers beyond printing": pickle.dumps({"version": 1 << 90_000, "entries": []}),
    "a line beyond printing": entry_with(frames=[{"filename": "/x.py", "line": 1 << 90_000}], pg_id=1 << 90_000),
    "a huge version": json.dumps({"version": "2." + "9" * 1_000_000}).encode(),
    "gzip of zeros": gzip.compress(bytes(8 << 20)),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name: str) -> None:
    data = BOMBS[name]
    took, peak = measured(data)
    assert took < 10
    assert peak < 60 * len(data) + 8_000_000


def test_a_dump_that_unpacks_to_more_than_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_module, "MAX_DUMP_BYTES", 1 << 20)
    monkeypatch.setattr("keepstep.sources.flightrecorder.files.MAX_DUMP_BYTES", 1 << 20)
    (tmp_path / "_dump_0").write_bytes(gzip.compress(bytes(64 << 20)))
    (tmp_path / "_dump_1").write_bytes(bytes(2 << 20))
    tracemalloc.start()
    found = read_snapshot(find_dumps([str(tmp_path)]).sources, jobs=1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not found.ranks and all("larger than 1 MiB" in line for line in found.unreadable)
    assert peak < 8 << 20


def test_texts_cannot_drive_a_terminal_or_break_the_answer(tmp_path: Path) -> None:
    evil = "\x1b[2J\ud800\n"
    for rank in range(8):
        made = json.loads(json.dumps(DUMPS[rank]))
        for group in made["pg_config"].values():
            group["desc"] = evil
        for entry in made["entries"]:
            entry.update(profiling_name=f"nccl:all_{evil}", process_group=[entry["process_group"][0], evil])
            entry["frames"] = [{"filename": evil, "line": 1, "name": evil}]
        (tmp_path / f"_dump_{rank}").write_bytes(pickle.dumps(made, protocol=4))
    (tmp_path / os.fsdecode(b"_dump_\xff_9")).write_bytes(b"\x80damaged")
    answer = to_json(find_culprits(read_snapshot(find_dumps([str(tmp_path)]).sources, jobs=1)))
    assert b"culprits" in answer and b"\\u001b" not in answer and b"\x1b" not in answer


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("pwned"),)


def test_nothing_in_a_dump_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "_dump_0").write_bytes(pickle.dumps(DUMPS[0] | {"nccl_comm_state": Evil()}))
    found = read_snapshot(find_dumps([str(tmp_path)]).sources, jobs=1)
    assert "refers to" in found.unreadable[0] and "nothing was loaded" in found.unreadable[0]
    assert not (tmp_path / "pwned").exists()
