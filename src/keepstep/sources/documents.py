"""What was given, taken apart into documents: a file, a section `==> name <==` of one, the output of a `$ command` in a transcript.

A document is small enough to be looked at as a whole by a parser; large logs are streamed instead (sources/streaming.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from keepstep.records.event import TimeQuality
from keepstep.sources import facts
from keepstep.sources.clocks import Clock, Said, Timed, boot_times, first_clock, first_full, near_time, zone_offset_ns
from keepstep.sources.names import Hints, is_node, of_path, of_prompt, of_title
from keepstep.sources.prefixes import Habits, Prefixed, Stream, habits_of, strip
from keepstep.sources.terminal import clean
from keepstep.sources.transports import Record, export_records, is_export, json_time, open_record

MAX_SECTIONS = 5000
"""Sections of one text; what comes after belongs to the last one."""
SAMPLE_LINES = 400
"""Lines from which the habits of a text are taken."""


class Line(NamedTuple):
    """A line with its prefixes taken off. `number` counts from 1 in the file as it was given; `raw` is the line there.

    A line that was overwritten by carriage returns is several with one number. `time_ns`: UTC. `boot_ns`: since the boot of its
    machine. `rank` is the rank that wrote it; where only a local rank is known, the one that this makes on a single node.
    `tag`: which of several writers that share a stream it is from. `device`: the local GPU index that NCCL puts first.
    """

    number: int
    text: str
    raw: str
    rank: int | None = None
    node: str | None = None
    time_ns: int | None = None
    time_quality: TimeQuality = "none"
    boot_ns: int | None = None
    boot_id: str | None = None
    seq: int | None = None
    local_rank: int | None = None
    pod: str | None = None
    stream: Stream | None = None
    device: int | None = None
    tag: str = ""


class Document(NamedTuple):
    """`path`: the file as it was given. `title`: name of the section, or the command; "" for a whole file.

    `node`, `rank`: whose it is, as far as its name tells; its lines may be of others.
    """

    path: str
    title: str
    lines: tuple[Line, ...]
    node: str | None = None
    rank: int | None = None

    @property
    def text(self) -> str:
        return "\n".join(line.text for line in self.lines)


class _Section(NamedTuple):
    title: str
    hints: Hints
    numbers: list[int]
    raws: list[str]


class _Stripped(NamedTuple):
    """A section whose prefixes are off: (number, raw, prefixed) of each line."""

    section: _Section
    lines: list[tuple[int, str, Prefixed]]

    def said(self) -> list[Said]:
        return [p.said for _, _, p in self.lines]


class Origin(NamedTuple):
    """Where a text comes from. `outer`: what its name or its folder tell; None: the file's own name is asked.

    `latest_ns`: when the file was last written, which gives times without a year theirs where nothing else does.
    `near_ns`: a time that is near to its first line. `first_number`: of that line.
    """

    outer: Hints | None = None
    latest_ns: int | None = None
    near_ns: int | None = None
    first_number: int = 1


_NOWHERE = Origin()


def split(path: str, text: str, origin: Origin = _NOWHERE) -> list[Document]:
    """The documents of a file. Lines before the first section or command are a document of their own."""
    outer = of_path(path.rpartition("/")[2]) if origin.outer is None else origin.outer
    stripped = [_strip_section(s, starts_launchers(text)) for s in _sections(text, outer, origin.first_number)]
    boots = facts.boots([(s.section.title, s.section.hints.node, [p.text for _, _, p in s.lines]) for s in stripped])
    near = _near_times(stripped, origin)
    return [_document(path, s, near[i], boots, origin) for i, s in enumerate(stripped)]


def starts_launchers(text: str) -> bool:
    """Whether a text tells of torchrun, so that what srun starts are launchers and no ranks."""
    return "torchrun" in text or "torch.distributed.run" in text or "torch.distributed.launch" in text


_SECTION = re.compile(r"==> (?P<name>.{1,500}?) <==\s*$")
_BANNER = re.compile(r"(?:={3,}+|#{3,}+|-{5,}+) *+\[?(?P<name>[^=#\s][^=#]{0,200}?)\]? *(?:={3,}|#{3,}|-{5,})\s*$")
_PROMPT = re.compile(
    r"(?:\((?P<env>[\w.-]{1,40})\) )?(?P<prompt>\[[\w.-]+@[^\]]{1,200}\]|[\w.-]{1,64}@[\w.-]{1,253}(?::[^\s$#]{0,200})?)? ?"
    r"(?P<sign>[$#]) (?P<name>[A-Za-z./~_][^\n]{0,500})$"
)
_BARE_PROMPT = re.compile(r"(?P<node>[A-Za-z][\w.-]{0,60}) \$ (?P<name>[A-Za-z./~_][^\n]{0,500})$")
"""A machine's name alone before the sign: `worker-17 $ cat /proc/mdstat`."""
_PLACES = frozenset({"container", "pod", "docker", "host"})
"""What people write in brackets before a prompt to say where they are; else it is a Python environment."""
_FILE_LIKE = re.compile(r"[\w./:@-]+\.(?:log|txt|out|err|json|jsonl|yaml|yml|csv|conf|dmesg)(?:\.\d+|\.gz)?$|/")
_COMMAND_NAMES = """
dmesg journalctl nvidia-smi dcgmi ibstat ibstatus iblinkinfo ibdiagnet ibqueryerrors perfquery mlxlink mlxconfig
mlxfwmanager mst lspci lsmod modinfo modprobe lscpu numactl numastat sinfo squeue sacct scontrol srun sbatch sstat
sdiag kubectl helm crictl docker podman cat ls ll grep egrep zgrep rg tail head less awk sed cut sort uniq wc find
stat df du mount lsblk smartctl nvme ps top free vmstat iostat uptime uname hostname date who last id env printenv
echo export ip ethtool ss netstat ping traceroute systemctl service ipmitool dmidecode mcelog ras-mc-ctl edac-util
rocm-smi amd-smi gdb py-spy strace torchrun python python3 pip mpirun ulimit sysctl lctl lfs mmlsfs mmdiag showmount
nfsstat rpcinfo keepstep
"""
COMMANDS = frozenset(_COMMAND_NAMES.split())
"""What may follow `# ` in the transcript of a root shell; anything else after it is a comment."""
_ALSO_WORDS = "ls cat head less cut sort find top free date who last id export service ping stat watch"
_WORDS = frozenset(_ALSO_WORDS.split())
"""Commands that a comment may begin with too: after them an option, a path or nothing must stand."""


_RULER = re.compile(r"(?:-{8,}|:{8,})\s*$")


def _sections(text: str, outer: Hints, first_number: int) -> list[_Section]:
    found: list[_Section] = []
    current = _Section("", outer, [], [])
    lines = _lines(text)
    for index, raw in enumerate(lines):
        number = first_number + index
        title = section_title(raw) if len(found) < MAX_SECTIONS and raw[:1] else None
        if title is None and raw and 0 < index < len(lines) - 1 and len(found) < MAX_SECTIONS:
            title = _between_rulers(lines[index - 1], raw, lines[index + 1])
        if title is None:
            current.numbers.append(number)
            current.raws.append(raw)
            continue
        if current.raws or current.title:
            found.append(current)
        current = _Section(title[0], title[1].over(outer), [], [])
    if current.raws or current.title or not found:
        found.append(current)
    return found


def _between_rulers(before: str, raw: str, after: str) -> tuple[str, Hints] | None:
    """A host or a file between two rulers, as dshbak and more(1) set apart what they print."""
    if before != after or len(raw) > 500 or _RULER.match(before) is None:
        return None
    name = raw.strip()
    hints = of_title(name)
    return (name, hints) if hints.node == name or _FILE_LIKE.search(name) else None


def _lines(text: str) -> list[str]:
    """Lines as tools count them: by line feeds alone."""
    lines = text.split("\n")
    if lines and not lines[-1]:
        lines.pop()
    return lines


def section_title(raw: str) -> tuple[str, Hints] | None:
    """The title of the section that a line begins, and what it tells. None for an ordinary line."""
    first = raw[0]
    if first in {"=", "#", "-"}:
        match = _SECTION.match(raw)
        if match is not None:
            return match["name"], of_title(match["name"])
        match = _BANNER.match(raw)
        if match is not None and _names_something(match["name"]):
            return match["name"], of_title(match["name"])
    if "$ " not in raw[:300] and "# " not in raw[:300]:
        return None
    match = _PROMPT.match(raw)
    if match is None:
        return _bare_prompt(raw)
    command = match["name"].strip()
    if match["env"] in _PLACES:
        command = f"{command}  # in the {match['env']}"
    if not match["prompt"] and match["sign"] == "#" and not _is_command(command):
        return None
    hints = of_title(command)
    node = of_prompt(match["prompt"]) if match["prompt"] else None
    return command, hints._replace(node=hints.node or node, pod=None, rank=None)


def _bare_prompt(raw: str) -> tuple[str, Hints] | None:
    match = _BARE_PROMPT.match(raw)
    if match is None or not is_node(match["node"]) or not _is_command(match["name"]):
        return None
    hints = of_title(match["name"].strip())
    return match["name"].strip(), hints._replace(node=hints.node or match["node"], pod=None, rank=None)


def _is_command(text: str) -> bool:
    words = text.split()
    words = words[1:] if words and words[0] in ("sudo", "time", "watch") else words
    if not words or words[0].rpartition("/")[2] not in COMMANDS:
        return False
    return words[0] not in _WORDS or len(words) == 1 or words[1][0] in "-/|~."


def _names_something(name: str) -> bool:
    hints = of_title(name)
    return bool(_FILE_LIKE.search(name)) or _is_command(name) or hints.rank is not None or hints.node is not None


def _strip_section(section: _Section, launched: bool) -> _Stripped:
    cleaned = [clean(raw) for raw in section.raws]
    habits = habits_of([texts[-1] for texts in cleaned[:SAMPLE_LINES]])._replace(tasks_are_nodes=launched)
    entries = export_records(section.raws) if is_export(section.raws) else {}
    lines = []
    for index, (number, raw, texts) in enumerate(zip(section.numbers, section.raws, cleaned, strict=True)):
        if index in entries:
            lines.append((number, raw, _opened(entries[index], habits)))
        else:
            lines += [(number, raw, strip_line(text, habits)) for text in texts]
    return _Stripped(section, lines)


def strip_line(text: str, habits: Habits) -> Prefixed:
    """A cleaned line without its prefixes; a record of a log transport is opened."""
    prefixed = strip(text, habits)
    if not prefixed.text.startswith("{"):
        return prefixed
    record = open_record(prefixed.text)
    if record is None:
        if prefixed.said.stamp is None:
            prefixed = prefixed._replace(said=prefixed.said._replace(stamp=json_time(prefixed.text)))
        return prefixed
    inner = _opened(record, habits)
    said = inner.said if inner.said.stamp is not None or inner.said.boot_ns is not None else prefixed.said
    return inner._replace(
        said=said,
        rank=inner.rank if prefixed.rank is None else prefixed.rank,
        node=prefixed.node or inner.node,
        tag=prefixed.tag + inner.tag,
    )


def _opened(record: Record, habits: Habits) -> Prefixed:
    inner = strip(clean(record.message.replace("\n", "\r"))[-1], habits)
    stamp = record.stamp or inner.said.stamp
    boot_ns = inner.said.boot_ns if record.boot_ns is None else record.boot_ns
    return inner._replace(
        said=Said(stamp, boot_ns, None),
        node=record.node or inner.node,
        pod=record.pod or inner.pod,
        stream="kernel" if record.kernel else inner.stream,
        boot_id=record.boot_id,
        seq=record.seq if inner.seq is None else inner.seq,
    )


def _near_times(stripped: Sequence[_Stripped], origin: Origin) -> list[int | None]:
    """For each section a time that is near to it: its title's, its own first one, else that of the section before or after."""
    titled = [s.section.hints.stamp for s in stripped]
    full = [t.ns for t in titled if t is not None and t.kind in ("utc", "local")]
    around = next(iter(full), origin.near_ns)
    if around is None:
        around = next((f for f in (first_full(s.said()) for s in stripped) if f is not None), None)
    near: list[int | None] = []
    for one, stamp in zip(stripped, titled, strict=True):
        own = near_time(one.said(), around, origin.latest_ns)
        near.append(stamp.ns if own is None and stamp is not None and stamp.kind in ("utc", "local") else own)
    if all(n is None for n in near):
        told = (said for one in stripped for said in one.said())
        return [first_clock(told, origin.near_ns, origin.latest_ns)] * len(near)
    for i in range(1, len(near)):
        near[i] = near[i - 1] if near[i] is None else near[i]
    for i in range(len(near) - 2, -1, -1):
        near[i] = near[i + 1] if near[i] is None else near[i]
    return near


def _document(path: str, one: _Stripped, near_ns: int | None, boots: dict[str | None, int], origin: Origin) -> Document:
    said = one.said()
    hints = one.section.hints
    boot_at = boot_times(said)
    if boot_at is None:
        boot_at = boots.get(hints.node, boots.get(None))
    near_ns = origin.near_ns if near_ns is None else near_ns
    clock = Clock(near_ns, origin.latest_ns, boot_at, zone_offset_ns(said))
    if hints.stamp is not None:
        clock.start(hints.stamp)
    offset = _local_offset(one.lines)
    lines = tuple(make_line(number, raw, p, clock.resolve(p.said), hints, offset) for number, raw, p in one.lines)
    return Document(path, one.section.title, lines, hints.node, hints.rank)


def _local_offset(lines: Sequence[tuple[int, str, Prefixed]]) -> int:
    """What ranks are more than local ranks, where lines carry both and agree; 0 else: a single node."""
    pairs = {p.rank - p.local_rank for _, _, p in lines if p.rank is not None and p.local_rank is not None}
    return pairs.pop() if len(pairs) == 1 else 0


def make_line(number: int, raw: str, p: Prefixed, timed: Timed, hints: Hints, offset: int = 0) -> Line:
    """A line of a document. `offset`: what ranks are more than local ranks."""
    local = hints.local_rank if p.local_rank is None else p.local_rank
    rank = hints.rank if p.rank is None else p.rank
    if rank is None and local is not None and local + offset >= 0:
        rank = local + offset
    return Line(
        number=number,
        text=p.text,
        raw=raw,
        rank=rank,
        node=p.node or hints.node,
        time_ns=timed.time_ns,
        time_quality=timed.quality,
        boot_ns=timed.boot_ns,
        boot_id=p.boot_id,
        seq=p.seq,
        local_rank=local,
        pod=p.pod or hints.pod,
        stream=p.stream or ("kernel" if hints.kernel else None),
        device=p.device,
        tag=p.tag,
    )
