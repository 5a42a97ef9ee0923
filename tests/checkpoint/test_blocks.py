"""Digests of a file's blocks: where they lie, what they catch, and how a manifest names them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import blake3
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from keepstep.checkpoint.format import blocks
from keepstep.checkpoint.format.blocks import BLOCK_BYTES, DIGEST_BYTES
from keepstep.checkpoint.format.layout import MARKER_SIGNED, MARKER_UNSIGNED, FolderName
from keepstep.checkpoint.save.commit import commit, writer_facts
from keepstep.checkpoint.storage.posix import PosixRoot
from keepstep.checkpoint.storage.writer import FileFact, write_file
from keepstep.checkpoint.trust.keys import public_key_path, signing_key
from keepstep.checkpoint.trust.manifest import build_statement, parse_manifest
from keepstep.records.errors import ConfigError, VerificationError

NAME = FolderName(12, 3, 1, 0, "job7")
FIELD = "blake3:" + "5a" * 32


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The base install: neither blake3 nor xxhash."""
    monkeypatch.setitem(sys.modules, "blake3", None)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    blocks._has.cache_clear()
    yield
    monkeypatch.undo()
    blocks._has.cache_clear()


@given(
    st.integers(0, 1 << 45)
    | st.integers(0, 1 << 21).flatmap(lambda n: st.integers(max(0, (n << 24) - 40), (n << 24) + 40))
)
def test_the_place_of_the_digests_follows_from_the_size(body: int) -> None:
    size = blocks.file_bytes_for(body)
    assert blocks.body_bytes(size) == body
    assert blocks.blocks_count(size) == blocks.count_for_body(body) == -(-body // BLOCK_BYTES)
    assert size == body + DIGEST_BYTES * blocks.count_for_body(body)


@given(st.integers(0, 1 << 20), st.integers(1, DIGEST_BYTES))
def test_sizes_that_no_file_can_have_are_refused(whole: int, rest: int) -> None:
    size = whole * (BLOCK_BYTES + DIGEST_BYTES) + rest
    with pytest.raises(VerificationError, match=f"{size} bytes cannot end in digests"):
        blocks.body_bytes(size)


@given(st.integers(0, 1 << 40))
def test_every_other_size_has_exactly_one_body(size: int) -> None:
    if 1 <= size % (BLOCK_BYTES + DIGEST_BYTES) <= DIGEST_BYTES:
        return
    assert blocks.file_bytes_for(blocks.body_bytes(size)) == size


def test_digests_are_the_plain_hashes_of_the_blocks() -> None:
    data = os.urandom(BLOCK_BYTES) + os.urandom(12345)
    view = memoryview(data)
    parts = [data[:BLOCK_BYTES], data[BLOCK_BYTES:]]
    assert blocks.digest_blocks(view, "blake3") == b"".join(blake3.blake3(part).digest() for part in parts)
    assert blocks.digest_blocks(view, "sha256") == b"".join(hashlib.sha256(part).digest() for part in parts)
    expected = b"".join(xxhash.xxh3_128(part).digest() for part in parts)
    assert blocks.fingerprint_blocks(view) == ("xxh3-128", expected)
    assert blocks.digest_blocks(memoryview(b""), "blake3") == b""


def test_a_changed_bit_is_found_in_its_block_and_nowhere_else() -> None:
    data = bytearray(os.urandom(BLOCK_BYTES + 4096))
    digests = blocks.digest_blocks(memoryview(data), "blake3")
    data[BLOCK_BYTES + 7] ^= 1
    first, second = blocks.split_blocks(memoryview(data))
    blocks.check_block(first, 0, digests, "blake3", "f")
    with pytest.raises(
        VerificationError, match=rf"f: block 1 \[{BLOCK_BYTES}, {len(data)}\) does not match its blake3 digest"
    ):
        blocks.check_block(second, 1, digests, "blake3", "f")
    with pytest.raises(VerificationError, match="no digest for block 2"):
        blocks.check_block(second, 2, digests, "blake3", "f")
    field = blocks.parse_blocks_field(blocks.format_blocks_field("blake3", digests))
    blocks.check_digests(digests, field, "f")
    with pytest.raises(VerificationError, match="f: the digests of its blocks"):
        blocks.check_digests(digests[:-1] + b"\0", field, "f")


def test_without_the_packages_sha256_takes_their_place(bare: None) -> None:
    assert (blocks.digest_algorithm(), blocks.fingerprint_algorithm()) == ("sha256", "sha256")
    with pytest.raises(ConfigError, match=r"needs the package blake3.*pip install 'keepstep\[checkpoint\]'"):
        blocks.check_block(memoryview(b"x"), 0, bytes(32), "blake3", "f")
    with pytest.raises(ConfigError, match="needs the package xxhash"):
        blocks.new_hash("xxh3-128")


def test_unknown_algorithm_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown algorithm 'md5'"):
        blocks.digest_blocks(memoryview(b"x"), "md5")


@given(st.text(max_size=80))
def test_other_text_is_no_blocks_field(text: str) -> None:
    with pytest.raises(VerificationError, match="is not ALGORITHM:SHA-256"):
        blocks.parse_blocks_field(text)


def _statement(file: FileFact) -> dict[str, Any]:
    facts = writer_facts(NAME, world=1, parent=None, restored_step=0, restored_from=None, scope=None, life_started_ns=5)
    statement: dict[str, Any] = json.loads(build_statement(NAME.text, [file], facts, marker=MARKER_UNSIGNED))
    return statement


def _read(statement: dict[str, Any]) -> FileFact:
    data = json.dumps(statement).encode()
    (file,) = parse_manifest(data, MARKER_UNSIGNED, trusted_key=None, allow_unsigned=True).files
    return file


@pytest.mark.parametrize("field", [None, FIELD])
def test_manifest_carries_the_field(field: str | None) -> None:
    file = FileFact(name="f", size_bytes=5000, sha256="ab" * 32, blocks=field)
    statement = _statement(file)
    assert statement["predicate"]["resources"][0].get("blocks") == field
    assert _read(statement) == file


@pytest.mark.parametrize(
    "field", ["", "md5:" + "5a" * 32, FIELD.upper(), FIELD + "0", FIELD + "\n", 7, {"blake3": "5a"}]
)
def test_manifest_with_another_shape_is_refused(field: object) -> None:
    statement = _statement(FileFact(name="f", size_bytes=5000, sha256="ab" * 32, blocks=FIELD))
    statement["predicate"]["resources"][0]["blocks"] = field
    with pytest.raises(VerificationError):
        _read(statement)


def test_manifest_with_an_impossible_size_is_refused() -> None:
    with pytest.raises(VerificationError, match="20 bytes cannot end in digests"):
        _read(_statement(FileFact(name="f", size_bytes=20, sha256="ab" * 32, blocks=FIELD)))


@pytest.mark.slow
def test_reference_tool_passes_over_the_field(root: Path) -> None:
    folder = root / PosixRoot(root).make_folder(NAME)
    file = write_file(folder / "f.bin", [bytes(5000)])
    facts = writer_facts(NAME, world=1, parent=None, restored_step=0, restored_from=None, scope=None, life_started_ns=5)
    named = FileFact(name=file.name, size_bytes=file.size_bytes, sha256=file.sha256, blocks=FIELD)
    commit(PosixRoot(root), folder.name, [named], facts, signing_key())
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(folder)]
    command += ["--signature", str(folder / MARKER_SIGNED), "--public_key", str(public_key_path())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
