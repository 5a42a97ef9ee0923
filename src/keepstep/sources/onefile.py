"""One file -> events: small ones are looked at as a whole by every parser, large ones are streamed."""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from keepstep.catalog.load import Catalog
from keepstep.catalog.matcher import Matcher
from keepstep.catalog.words import words_of
from keepstep.records.event import Event
from keepstep.sources import runfolder
from keepstep.sources.decoding import is_flight_recorder, is_record, open_stream, to_text, what_binary, wide_encoding
from keepstep.sources.documents import Document, Line, Origin, split
from keepstep.sources.facts import Facts, facts_of
from keepstep.sources.folders import Found, Skipped
from keepstep.sources.joblog.blocks import block_events
from keepstep.sources.joblog.exceptions import TOOL
from keepstep.sources.monitors.ledgers import ledger_events
from keepstep.sources.monitors.lines import monitor_events
from keepstep.sources.names import of_path
from keepstep.sources.ownrecords import OWN_RECORD
from keepstep.sources.parsers import PARSERS
from keepstep.sources.progress import progress_events
from keepstep.sources.storms import Collapser
from keepstep.sources.streaming import LINE_BYTES, Scanner
from keepstep.sources.textlines import fits, line_events, make_event
from keepstep.sources.windows import Cutter

WHOLE_BYTES = 4 << 20
"""Logs up to this size are looked at as a whole, by every parser; larger ones are streamed."""
WHOLE_LINES = 60_000
RECORD_BYTES = 32 << 20
"""The same for one JSON or YAML document, or one table of accounting: it means something only as a whole."""
CHUNK_BYTES = 4 << 20
TAIL_BYTES = 1 << 20
"""The end of a large log is looked at as a document too: there a job says why it died."""
TEXT_LIMIT_BYTES = 64 << 30
"""Of one file, unpacked."""
WORDS_LIMIT = 4_000
"""Characters of all texts together up to which their words are looked at: 99 in 100 texts that they were learned from have half
of it. The words of longer ones, whatever they are, add up to something."""


class Used(NamedTuple):
    """A document that was read, as what, how many lines it has and how many events it gave."""

    path: str
    title: str
    read_as: str
    events: int
    lines: int = 0


class Told(NamedTuple):
    """What was gathered, as plain data; see Gathered."""

    events: list[Event]
    used: list[Used]
    unreadable: list[str]
    skipped: list[Skipped]
    dumps: list[str]
    facts: list[Facts]
    size_bytes: int
    words: set[str]
    characters: int


class Gathered:
    """What files gave so far. `words`: of all documents together, as far as they are short; `characters`: of all documents."""

    def __init__(self, catalog: Catalog, matcher: Matcher, deep: bool) -> None:
        self.catalog = catalog
        self.matcher = matcher
        self.deep = deep
        self.events: list[Event] = []
        self.used: list[Used] = []
        self.unreadable: list[str] = []
        self.skipped: list[Skipped] = []
        self.dumps: list[str] = []
        self.facts: list[Facts] = []
        self.size_bytes = 0
        self.words: set[str] = set()
        self.characters = 0

    def take(self, told: Told) -> None:
        """Add what was gathered elsewhere, after what is here."""
        self.events += told.events
        self.used += told.used
        self.unreadable += told.unreadable
        self.skipped += told.skipped
        self.dumps += told.dumps
        self.facts += told.facts
        self.size_bytes += told.size_bytes
        self.characters += told.characters
        if self.characters <= WORDS_LIMIT:
            self.words |= told.words

    def told(self) -> Told:
        """All of it, to be sent to another process."""
        return Told(
            self.events,
            self.used,
            self.unreadable,
            self.skipped,
            self.dumps,
            self.facts,
            self.size_bytes,
            self.words,
            self.characters,
        )


def read_file(found: Found, top: Path | None, catalog: Catalog, matcher: Matcher, deep: bool) -> Gathered:
    """What one file gives; one that cannot be read is named in `unreadable`. `top`: of the run folder that it is in."""
    own = Gathered(catalog, matcher, deep)
    try:
        with found.path.open("rb") as file:
            latest_ns = found.path.stat().st_mtime_ns
            outer = of_path(found.below)
            if top is not None:
                outer = runfolder.hints_of(below_top(found, top), outer)
            read_stream(own, file, str(found.path), Origin(outer, latest_ns))
    except OSError as error:
        own.unreadable.append(f"{found.path}: {error.strerror or error}")
    return own


def below_top(found: Found, top: Path) -> str:
    """Path of a file below its run folder; of one that lies elsewhere, and is only linked, as it was found."""
    path = found.path.resolve()
    return str(path.relative_to(top)) if path.is_relative_to(top) else found.below


def read_stream(whole: Gathered, stream: BinaryIO, path: str, origin: Origin) -> None:
    """Add what a file gives that is open."""
    opened = open_stream(stream)
    blocks = opened.blocks
    held: list[bytes] = []
    size = 0
    limit = WHOLE_BYTES
    for block in blocks:
        if not held and is_record(block):
            limit = max(limit, RECORD_BYTES)
        held.append(block)
        size += len(block)
        if size > limit:
            break
    data = b"".join(held)
    del held
    if is_flight_recorder(data):
        whole.dumps.append(path)
        return
    # A crash leaves blocks of NUL in a log, also at its begin.
    binary = what_binary(data.lstrip(b"\0")[:4096] or data[:4096])
    if binary is not None:
        whole.unreadable.append(f"{path}: {binary}")
    elif size > limit or (limit == WHOLE_BYTES and data.count(b"\n") > WHOLE_LINES):
        _read_large(whole, data, blocks, path, origin)
    else:
        whole.size_bytes += len(data)
        read_documents(whole, split(path, to_text(data), origin))
    whole.unreadable.extend(f"{path}: {note}" for note in opened.notes)


# ---- whole documents


def read_documents(whole: Gathered, documents: Sequence[Document], chosen: bool = True) -> None:
    """`chosen`: somebody chose to show them, so that their words say something. Keys of our own records do not."""
    near_ns = next((n.time_ns for d in documents for n in d.lines if n.time_ns is not None), None)
    for document in documents:
        found = Collapser()
        monitors = monitor_events(document, whole.catalog)
        for event in line_events(document, whole.matcher, ordinary=whole.deep):
            if event.evidence.line not in monitors.claimed:
                found.add(event)
        read_as, parsed = _parsed(document, whole.catalog)
        told = {(e.evidence.line, e.signature) for e in parsed}
        lines = [e for e in found.events() if (e.evidence.line, e.signature) not in told]
        lines = _not_of_tools(lines, parsed, whole.catalog)
        seen = completed([*monitors.events, *ledger_events(document, whole.catalog)], document)
        events = [*parsed, *lines, *seen, *progress_events(document, whole.catalog)]
        if read_as == OWN_RECORD:
            # Other texts that it quotes lie beside it.
            events = parsed
        whole.events += events
        # The words of a tool's own traceback are about the tool.
        if chosen and read_as != OWN_RECORD and all(e.signature != TOOL for e in parsed):
            _add_words(whole, document, {e.evidence.line for e in events})
        whole.facts.append(facts_of(document, near_ns))
        whole.used.append(Used(document.path, document.title, read_as, len(events), len(document.lines)))


def _not_of_tools(lines: list[Event], parsed: Sequence[Event], catalog: Catalog) -> list[Event]:
    """Without what the lines of a tool's own traceback would say of a job. What they say of a device or a machine stays."""
    parts = [(e.evidence.line or 0, number) for e in parsed if isinstance(number := e.attrs.get("until"), int)]
    if not parts:
        return lines
    return [
        e
        for e in lines
        if catalog[e.signature].scope not in ("job", "rank")
        or not any(first <= (e.evidence.line or 0) <= last for first, last in parts)
    ]


def _add_words(whole: Gathered, document: Document, known: Collection[int]) -> None:
    """The words of what was given, while all of it is short: what somebody chose to show. A long log holds every word.

    `known`: numbers of lines in which a sign was seen: what they say has its entry.
    """
    whole.characters += sum(len(line.raw) for line in document.lines)
    if whole.characters <= WORDS_LIMIT:
        whole.words |= words_of(
            "\n".join([document.title, *(line.raw for line in document.lines if line.number not in known)])
        )


def _parsed(document: Document, catalog: Catalog) -> tuple[str, list[Event]]:
    """What the parsers make of a document, and of blocks of lines in it.

    All are asked: a paste without marks between its parts holds several outputs.
    """
    read_as, found = [], list[Event]()
    for name, parse in PARSERS:
        events = parse(document, catalog)
        if events is not None and name == OWN_RECORD:
            return name, completed(events, document)
        if events is not None:
            read_as.append(name)
            found += events
    found += block_events(document, catalog)
    return ", ".join(read_as) or "log lines", completed(found, document)


def completed(events: Iterable[Event], document: Document) -> list[Event]:
    """Events of a parser with what their lines tell beside: time, node, an id."""
    by_number: dict[int, Line] = {}
    for one in document.lines:
        by_number.setdefault(one.number, one)
    done = []
    for index, event in enumerate(events):
        line = by_number.get(event.evidence.line)
        changes: dict[str, object] = {}
        if event.time_ns is None and line is not None and line.time_ns is not None:
            changes = {"time_ns": line.time_ns, "time_quality": line.time_quality}
        if event.node is None and event.rank is None:
            changes["node"] = line.node if line is not None and line.node else document.node
        if not event.id:
            key = f"{document.path}/{document.title}/{event.signature}/{event.evidence.line}/{index}"
            changes["id"] = "ev-" + hashlib.blake2b(key.encode(errors="replace"), digest_size=8).hexdigest()
        done.append(msgspec.structs.replace(event, **changes) if changes else event)
    return done


# ---- large logs


def _read_large(whole: Gathered, head: bytes, rest: Iterable[bytes], path: str, origin: Origin) -> None:
    cutter = Cutter() if whole.deep else None
    scanner: Scanner | None = None
    found = Collapser()
    tail = b""
    for chunk in chunks(_in_utf8(head, rest)):
        if scanner is None:
            scanner = Scanner(whole.matcher, origin, chunk, cutter)
        for hit in scanner.scan(chunk):
            document = Document(path, hit.title, ())
            for match in hit.matches:
                if fits(match, hit.line):
                    found.add(make_event(match, hit.line, document, hit.repeats))
        tail = (tail + chunk)[-TAIL_BYTES:] if whole.deep else b""
        if scanner.size_bytes > TEXT_LIMIT_BYTES:
            whole.skipped.append(Skipped(path, f"what comes after {TEXT_LIMIT_BYTES >> 30} GiB of text"))
            break
    if scanner is None:
        return
    if found.lost:
        whole.skipped.append(Skipped(path, f"{found.lost} sightings of more things than are told apart"))
    events = found.events()
    if cutter is not None:
        events += _pieces(whole, path, origin, cutter, scanner, tail)
    whole.events += events
    whole.size_bytes += scanner.size_bytes
    whole.used.append(Used(path, "", "log lines, streamed", len(events), scanner.lines))


def _ordinary(whole: Gathered, document: Document) -> list[Event]:
    """What a long log is not stopped at, in a piece of it: facts that lines have in which nothing is wrong."""
    return [e for e in line_events(document, whole.matcher) if _is_ordinary(whole.catalog, e)]


def _is_ordinary(catalog: Catalog, event: Event) -> bool:
    return event.signature in catalog and catalog[event.signature].ordinary


def _pieces(whole: Gathered, path: str, origin: Origin, cutter: Cutter, scanner: Scanner, tail: bytes) -> list[Event]:
    """What parsers make of the pieces that were cut out, and of the end; steps that were made are looked for at the end."""
    cutter.finish()
    found: list[Event] = []
    for window in cutter.done:
        near = origin._replace(first_number=window.first_number, near_ns=window.near_ns)
        for document in split(path, window.text, near):
            found += _parsed(document, whole.catalog)[1]
            found += _ordinary(whole, document)
    tail = tail[tail.find(b"\n") + 1 :]
    number = scanner.lines - tail.count(b"\n") - (not tail.endswith(b"\n")) + 1
    for document in split(path, to_text(tail), origin._replace(first_number=number, near_ns=scanner.near_ns)):
        found += _parsed(document, whole.catalog)[1]
        found += _ordinary(whole, document)
        found += progress_events(document, whole.catalog)
        whole.facts.append(facts_of(document))
    seen: set[tuple[int, str]] = set()
    kept = []
    for event in found:
        key = (event.evidence.line, event.signature)
        if not event.evidence.line or key not in seen:
            kept.append(event)
        seen.add(key)
    return kept


def _in_utf8(head: bytes, rest: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks, in UTF-8 where a byte order mark says that they are UTF-16 or UTF-32."""
    wide = wide_encoding(head)
    if wide is None:
        yield head
        yield from rest
        return
    decoder = codecs.getincrementaldecoder(wide)(errors="replace")
    yield decoder.decode(head).removeprefix("\ufeff").encode(errors="replace")
    for block in rest:
        yield decoder.decode(block).encode(errors="replace")


def chunks(blocks: Iterable[bytes], size: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Blocks of any size as chunks of about `size` that end where lines end. A line longer than that is cut to its begin."""
    held: list[bytes] = []
    total = 0
    cutting = False
    for given in blocks:
        block = given
        if cutting:
            end = block.find(b"\n")
            if end < 0:
                continue
            block, cutting = block[end:], False
        held.append(block)
        total += len(block)
        if total < size:
            continue
        data = b"".join(held)
        cut = data.rfind(b"\n") + 1
        if cut:
            for start, end in _even(data, cut, size):
                yield data[start:end]
            data = data[cut:]
        elif total >= size:
            data, cutting = data[:LINE_BYTES], True
        held, total = [data], len(data)
    data = b"".join(held)
    if data:
        yield data


def _even(data: bytes, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Parts of about `size` of the first `end` bytes, each up to a line end."""
    start = 0
    while start < end:
        cut = data.rfind(b"\n", start, min(start + 2 * size, end)) + 1 if end - start > 2 * size else end
        cut = cut if cut > start else data.find(b"\n", start) + 1
        yield start, cut
        start = cut
