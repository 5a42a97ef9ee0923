"""The split over ranks covers every byte once, and files are plain safetensors that survive no damage unnoticed."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from keepstep.checkpoint.format import plan as plan_rules
from keepstep.checkpoint.format.boxes import Mesh, whole
from keepstep.checkpoint.format.dtypes import ITEM_BYTES
from keepstep.checkpoint.format.index import Index, parse_index
from keepstep.checkpoint.format.plan import EVEN_SPLIT, Piece, Plan, StoredTensor, TensorMeta, plan_digest, stored
from keepstep.checkpoint.format.shard import build_header, file_order, parse_header
from keepstep.records.errors import VerificationError


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of a few bytes are split as large ones are."""
    monkeypatch.setattr(plan_rules, "MIN_SHARE_BYTES", 1)


def pieces_by_rank(tensors: dict[str, TensorMeta], world_size: int) -> list[list[Piece]]:
    plan = Plan(tensors, (), world_size)
    return [plan.pieces(rank) for rank in range(world_size)]


metas = st.builds(
    TensorMeta,
    dtype=st.sampled_from(sorted(ITEM_BYTES)),
    shape=st.lists(st.integers(0, 6), max_size=3).map(tuple),
    owner=st.sampled_from([None, None, 0]),
)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=4), metas, max_size=8), st.integers(1, 9))
def test_split_covers_every_byte_once_at_element_bounds(tensors: dict[str, TensorMeta], world_size: int) -> None:
    covered: dict[str, list[tuple[int, int]]] = {name: [] for name in tensors}
    plan = pieces_by_rank(tensors, world_size)
    assert len(plan) == world_size
    for pieces in plan:
        assert len({piece.name for piece in pieces}) == len(pieces)
        for piece in pieces:
            assert piece.begin % ITEM_BYTES[tensors[piece.name].dtype] == 0
            covered[piece.name].append((piece.begin, piece.end))
    for name, spans in covered.items():
        at = 0
        for begin, end in spans:
            assert begin == at < end
            at = end
        assert at == tensors[name].size_bytes


def test_split_is_even() -> None:
    tensors = {f"t{i}": TensorMeta(dtype="F32", shape=(1000,)) for i in range(7)}
    sizes = [sum(p.end - p.begin for p in pieces) for pieces in pieces_by_rank(tensors, 4)]
    assert max(sizes) - min(sizes) <= 4


def test_little_is_written_by_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of thousands of ranks would read a block of each one's file for the step counts of an optimizer."""
    monkeypatch.setattr(plan_rules, "MIN_SHARE_BYTES", 16 << 20)
    ranks = 16_384
    steps = {f"optim/{number}/step": TensorMeta(dtype="F32", shape=()) for number in range(1000)}
    sharded = {"w": TensorMeta(dtype="F32", shape=(ranks, 8), mesh=0, placements=("shard:0",))}
    plan = Plan({**steps, **sharded, "b": TensorMeta(dtype="F32", shape=(10 << 20,))}, (Mesh((ranks,)),), ranks)
    assert len(plan.pieces(0)) > 1 and [piece.name for piece in plan.pieces(5)] == ["w"]
    for name, meta in plan.tensors.items():
        if name != "w":
            (need,) = plan.needs(name, whole(meta.shape))
            assert {rank for rank, _ in need.pieces} <= {0, 1} and sum(
                p.end - p.begin for _, p in need.pieces
            ) == meta.size_bytes


def test_plan_digest_tells_states_apart() -> None:
    one = {"a": TensorMeta(dtype="F32", shape=(2,))}
    assert plan_digest(one, {}) != plan_digest({"a": TensorMeta(dtype="F32", shape=(3,))}, {})
    assert plan_digest(one, {}) != plan_digest(one, {"b": "a"})


def test_reference_library_reads_our_files(tmp_path: Path) -> None:
    values = {
        "w": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "b": torch.tensor([True, False]),
        "h": torch.randn(5).to(torch.bfloat16),
        "e": torch.empty(0, 3),
    }
    codes = {"w": "F64", "b": "BOOL", "h": "BF16", "e": "F32"}
    entries = {
        name: StoredTensor(codes[name], tuple(value.shape), value.numel() * value.element_size())
        for name, value in values.items()
    }
    header = build_header({name: entries[name] for name in file_order(entries)}, {"format": "pt"})
    assert len(header) % 4096 == 0
    body = b"".join(bytes(values[name].reshape(-1).view(torch.uint8).tolist()) for name in file_order(entries))
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + body)
    with safe_open(path, framework="pt") as file:
        for name, value in values.items():
            assert torch.equal(file.get_tensor(name), value)
            assert file.get_tensor(name).dtype == value.dtype
    spans = parse_header(path.read_bytes(), path.stat().st_size, path.name)
    assert {name: span.shape for name, span in spans.items()} == {n: tuple(v.shape) for n, v in values.items()}


def test_parts_are_flat_and_foreign_types_are_bytes() -> None:
    meta = TensorMeta(dtype="C64", shape=(4, 2))
    (pieces,) = pieces_by_rank({"c": meta}, 1)
    assert stored(pieces[0], meta) == StoredTensor("U8", (64,), 64)
    halves = pieces_by_rank({"f": TensorMeta(dtype="F32", shape=(4, 2))}, 2)
    assert stored(halves[1][0], TensorMeta(dtype="F32", shape=(4, 2))) == StoredTensor("F32", (4,), 16)


def _file(table: Any, data: bytes = b"\0" * 16) -> bytes:
    body = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(body)) + body + data


def _entry(begin: Any = 0, end: Any = 16, shape: Any = (4,), dtype: Any = "F32", **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


HOSTILE = {
    "empty": b"",
    "short": b"\1\2\3",
    "huge header": struct.pack("<Q", 1 << 60) + b"{}",
    "negative as unsigned": struct.pack("<q", -1) + b"{}",
    "just beyond the file": struct.pack("<Q", 3) + b"{}",
    "not json": _file(b"\x80\x04\x95pickle"),
    "not an object": _file(b"[]"),
    "deep": _file(b"[" * 100_000),
    "not utf-8": _file(b'{"\xff": 1}'),
    "unknown dtype": _file({"a": _entry(dtype="OBJ")}),
    "negative offset": _file({"a": _entry(-16, 0)}),
    "end before begin": _file({"a": _entry(16, 0)}),
    "beyond the file": _file({"a": _entry(0, 1 << 50, shape=(1 << 48,))}),
    "offset is a float": _file({"a": _entry(0, 16.5)}),
    "three offsets": _file({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16, 32]}}),
    "overlap": _file({"a": _entry(0, 16), "b": _entry(8, 16, shape=(2,))}),
    "same bytes twice": _file({"a": _entry(0, 16), "b": _entry(0, 16)}),
    "hole in front": _file({"a": _entry(4, 16, shape=(3,))}),
    "hole at the end": _file({"a": _entry(0, 12, shape=(3,))}),
    "shape and size differ": _file({"a": _entry(0, 16, shape=(5,))}),
    "overflowing shape": _file({"a": _entry(0, 16, shape=(1 << 61, 1 << 61, 8))}),
    "negative shape": _file({"a": _entry(0, 16, shape=(-2, -2))}),
    "many dimensions": _file({"a": _entry(0, 16, shape=[1] * 65 + [4])}),
    "extra key": _file({"a": _entry(pickle="x")}),
    "key missing": _file({"a": {"dtype": "F32", "shape": [4]}}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name: str) -> None:
    with pytest.raises(VerificationError, match=r"^evil\.safetensors: "):
        parse_header(HOSTILE[name], len(HOSTILE[name]), "evil.safetensors")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 40), st.integers(0, 255))
def test_any_damage_to_a_header_parses_or_is_refused(tail: bytes, at: int, byte: int) -> None:
    data = bytearray(_file({"a": _entry()}) + tail)
    data[at] = byte
    try:
        spans = parse_header(bytes(data), len(data), "x")
    except VerificationError:
        return
    assert all(0 <= span.begin <= span.end <= len(data) for span in spans.values())


def test_files_of_the_first_rule_of_splitting_are_read_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.checkpoint.format.plan.MIN_SHARE_BYTES", 16 << 20)
    tensors = {"w": TensorMeta(dtype="F32", shape=(1000,))}
    even, large = Plan(tensors, (), 4, EVEN_SPLIT), Plan(tensors, (), 4)
    assert [len(even.pieces(rank)) for rank in range(4)] == [1, 1, 1, 1]
    assert [len(large.pieces(rank)) for rank in range(4)] == [1, 0, 0, 0]
    old = Index(world=4, tensors=tensors, aliases={}, values={})
    data = msgspec.json.encode(old).replace(b',"split":0', b"")
    assert parse_index(data, "x", data_bytes=4000).split == EVEN_SPLIT
    with pytest.raises(VerificationError, match="split 7"):
        parse_index(msgspec.json.encode(msgspec.structs.replace(old, split=7)), "x", data_bytes=4000)
