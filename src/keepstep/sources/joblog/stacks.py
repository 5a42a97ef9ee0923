"""What a rank was doing when its stack was taken: faulthandler's and py-spy's dumps, and torch's stack of a failed collective.

Formats: CPython faulthandler.c ("Thread 0x... (most recent call first):"), py-spy dump ("Thread 7 (idle): "MainThread""), torch
ProcessGroupNCCL ("Stack trace of the failed collective:" with "#0 name from file:line").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from keepstep.catalog.exceptions import whose
from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.sources.documents import Document, Line
from keepstep.sources.joblog.making import event_at

_SECTION = re.compile(r"(?i)^\W{0,4}(?:host )?rank[ =_]?(?P<rank>\d{1,7})\b[^\n]{0,20}\b(?:stack|py-spy|backtrace)\b")

TRIGGERS = ('  File "', "most recent call first", "(idle)", "(active", "Stack trace of the failed collective", "py-spy")
MAX_STACKS = 5000
MAX_FRAMES = 200

_FAULT = re.compile(r"(?P<current>Current thread|Thread) 0x[0-9a-fA-F]+(?: \[[^\]]*\])? \(most recent call first\):")
_PYSPY = re.compile(r'Thread (?P<id>\S+) \((?P<state>idle|active)(?:\+gil)?\)(?:: "(?P<name>[^"]*)")?')
_TORCH = re.compile(r"Stack trace of the failed collective:")
_PROCESS = re.compile(r"Process (?P<pid>\d+): ")
_SHORT = re.compile(r"py-spy: (?P<calls>[\w.:<>]+(?: *(?:->|>|/) *[\w.:<>]+)*)(?: \((?P<state>[^)]*)\))?")
_FRAMES = (
    re.compile(r'\s+File "(?P<path>[^"]+)", line (?P<line>\d+),? in (?P<name>\S+)'),
    re.compile(r"\s+(?P<name>[^\s(][^(]*?) \((?P<path>[^()\s]+):(?P<line>\d+)\)\s*$"),
    re.compile(r"#\d+ (?P<name>\S+) from (?P<path>\S+):(?P<line>\d+)"),
)

_COLLECTIVE_NAMES = re.compile(
    r"^(?:all_?reduce|all_?gather|reduce_?scatter|broadcast|barrier|monitored_barrier|all_?to_?all|gather|scatter|reduce|send|recv|"
    r"isend|irecv|batch_isend_irecv|wait|synchronize|wait_tensor|_?all_?gather_\w+|_?reduce_scatter_\w+|\w*_object|\w*_object_list)$"
)
_COLLECTIVE_FILES = (
    "torch/distributed/",
    "torch/nn/parallel/",
    "torch/_C/_distributed",
    "deepspeed/comm/",
    "megatron/core/parallel_state",
)
_WORK: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "download",
        re.compile(
            r"\bssl\.py|urllib3/|requests/|http/client\.py|botocore/|boto3/|gcsfs/|aiohttp/|huggingface_hub/|fsspec/"
        ),
    ),
    (
        "teardown",
        re.compile(r"destroy_process_group|\bshutdown\b|::shutdown|_abort|atexit|__del__|finalize_model_parallel"),
    ),
    ("saving", re.compile(r"save|checkpoint|ckpt|torch/serialization|safetensors|_write|upload|fsync", re.IGNORECASE)),
    ("evaluating", re.compile(r"eval|validat|infer|generate|predict|metric|plot|sample", re.IGNORECASE)),
    (
        "data",
        re.compile(
            r"dataloader|dataset|data_loader|tokeniz|preprocess|collate|datasets/|fetch|webdataset|streaming",
            re.IGNORECASE,
        ),
    ),
    ("compiling", re.compile(r"_dynamo|_inductor|triton|compile|autotune|cpp_extension|cudagraph", re.IGNORECASE)),
    ("loading", re.compile(r"load|restore|from_pretrained|download|hub", re.IGNORECASE)),
)


class StackFrame(NamedTuple):
    name: str
    path: str
    line: str


def read_stacks(document: Document, catalog: Catalog) -> Iterator[Event]:
    """An event for the main thread of each dump: "stack.collective" when it waits for others, else "stack.outside"."""
    found = 0
    for begun, frames, note in _stacks(document):
        event = _event(begun, frames, note, document, catalog)
        if event is not None:
            yield event
            found += 1
            if found >= MAX_STACKS:
                return


def _stacks(document: Document) -> Iterator[tuple[Line, list[StackFrame], str]]:
    """Stacks of main threads, innermost frame first. Of a dump without a named main thread the last thread is the main one."""
    titled = bool(document.lines) and _SECTION.match(document.title) is not None
    begun: Line | None = _owned(document.lines[0], document.title) if titled else None
    frames: list[StackFrame] = []
    note = "main" if titled else ""
    if begun is not None and (frame := _frame(begun.text)) is not None:
        frames.append(frame)
    for line in document.lines[1 if titled else 0 :]:
        text = line.text
        header = _header(text)
        if header is not None:
            if begun is not None:
                yield begun, frames, note
            begun, frames, note = _owned(line, text), [], header
            continue
        if begun is None:
            short = _SHORT.search(text) if "py-spy: " in text else None
            if short is not None:
                calls = re.split(r" *(?:->|>|/) *", short["calls"])
                yield line, [StackFrame(name, "", "0") for name in reversed(calls)], "main"
            continue
        frame = _frame(text)
        if frame is not None:
            if len(frames) < MAX_FRAMES:
                frames.append(frame)
        elif frames or line.number - begun.number > 3:
            yield begun, frames, note
            begun, frames = None, []
    if begun is not None:
        yield begun, frames, note


def _owned(line: Line, header: str) -> Line:
    """The line as one of the rank that a heading names."""
    match = _SECTION.match(header)
    return line._replace(rank=int(match["rank"])) if match is not None else line


def _header(text: str) -> str | None:
    """Which thread begins here: "main", "other", or "torch" for the stack of a collective. None: no header."""
    if "Thread" in text or "thread 0x" in text:
        match = _FAULT.search(text)
        if match is not None:
            return "last" if match["current"] == "Thread" else "main"
        match = _PYSPY.search(text)
        if match is not None:
            return "main" if match["name"] in (None, "MainThread") else "other"
    if "stack" in text and _SECTION.match(text) is not None:
        return "main"
    return "torch" if "Stack trace of the failed" in text and _TORCH.search(text) else None


def _frame(text: str) -> StackFrame | None:
    for pattern in _FRAMES:
        match = pattern.match(text)
        if match is not None:
            return StackFrame(match["name"].strip(), match["path"], match["line"])
    return None


def waits_in_collective(frames: list[StackFrame]) -> str | None:
    """The collective that a stack, innermost frame first, waits in; None when it is somewhere else.

    Frames of torch.distributed alone do not make a wait: saving a sharded checkpoint passes through them too.
    """
    for frame in frames[:6]:
        if any(part in frame.path for part in _COLLECTIVE_FILES) and _COLLECTIVE_NAMES.match(frame.name):
            return frame.name
    return None


def doing(frames: list[StackFrame]) -> str:
    """What a thread outside collectives is busy with, by the names of functions and files; "code" when nothing tells."""
    for what, pattern in _WORK:
        if any(pattern.search(f"{f.path} {f.name}") for f in frames[:12]):
            return what
    return "code"


def _event(begun: Line, frames: list[StackFrame], note: str, document: Document, catalog: Catalog) -> Event | None:
    if not frames or note == "other":
        return None
    collective = waits_in_collective(frames)
    if note == "torch":
        collective = collective or frames[0].name
    own = next((f for f in frames if f.path and whose(f.path) == "user"), frames[0])
    shown = f"{own.path.rpartition('/')[2]}:{own.line} {own.name}" if own.path else own.name
    if collective is not None:
        attrs = {"collective": collective, "frame": shown}
        return event_at(
            "stack.collective", begun, document, catalog, attrs, text=f"waits in {collective}, from {shown}"
        )
    what = doing(frames)
    attrs = {"doing": what, "frame": shown, "innermost": frames[0].name}
    return event_at(
        "stack.outside", begun, document, catalog, attrs, text=f"in {frames[0].name} ({what}), from {shown}"
    )
