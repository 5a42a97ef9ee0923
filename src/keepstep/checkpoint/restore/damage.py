"""Where a damaged file is damaged: by the digests of its blocks, once its whole digest has shown that something differs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec

from keepstep.checkpoint.format.blocks import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    body_bytes,
    check_block,
    check_digests,
    count_for_body,
    parse_blocks_field,
    span_of,
)
from keepstep.checkpoint.storage.readahead import room
from keepstep.checkpoint.storage.source import Opened
from keepstep.records.errors import ConfigError, VerificationError

_NAMED = 4  # ranges that a message lists


class Damage(msgspec.Struct, frozen=True):
    """What is known of the place: numbers of the blocks that differ, and the same in words."""

    blocks: list[int]
    text: str


def find_damage(opened: Opened, blocks: str, name: str, *, jobs: int) -> Damage:
    """Compare every block of file `name` with its digest, `jobs` at a time; `blocks` is the manifest's word on them.

    Raises StorageError, and VerificationError when the file ends early.
    """
    try:
        body, field = body_bytes(opened.size_bytes), parse_blocks_field(blocks, name)
        count = count_for_body(body)
        digests = room(DIGEST_BYTES * count)
        opened.read_into(digests, body)
        check_digests(digests, field, name)
    except VerificationError:
        return Damage([], "the digests of its blocks are damaged themselves: which blocks are cannot be told")

    def differs(number: int) -> bool:
        begin, end = span_of(number, body)
        block = room(end - begin)
        opened.read_into(block, begin)
        try:
            check_block(block, number, digests, field.algorithm, name)
        except VerificationError:
            return True
        return False

    try:
        with ThreadPoolExecutor(max(1, min(jobs, count)), thread_name_prefix="keepstep-blocks") as pool:
            found = [number for number, bad in enumerate(pool.map(differs, range(count))) if bad]
    except ConfigError as error:
        return Damage([], f"which blocks cannot be told: {error}")
    return Damage(found, _say(found, body))


def _say(found: list[int], body: int) -> str:
    if not found:
        return "yet every block has its digest: the manifest contradicts itself"
    runs: list[list[int]] = []
    for number in found:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = []
    for first, last in runs[:_NAMED]:
        label = f"block {first}" if first == last else f"blocks {first}-{last}"
        words.append(f"{label} (bytes {first * BLOCK_BYTES} to {span_of(last, body)[1] - 1})")
    more = len(runs) - len(words)
    return f"damaged: {', '.join(words)}" + (f" and {more} more places" if more else "")
