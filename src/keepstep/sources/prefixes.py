"""What launchers, collectors and loggers put before a line: taken off, and used.

Taken off is what somebody else than the program put there (rank tags, pod and host names, syslog headers) and a time that
stands first. A header that the program itself wrote (glog, NCCL) stays, because it names the place in the code; its time, host
and device are used all the same.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from keepstep.sources.clocks import Said
from keepstep.sources.timestamps import SECOND_NS, Stamp, stamp_at, stamp_in

MAX_LAYERS = 8
HEAD = 400
"""Characters of a line in which a rank or a host is looked for."""

Stream = Literal["kernel", "job"]


class Habits(NamedTuple):
    """Prefixes that only look like prefixes when most lines of a text have them."""

    labels: bool = False
    """`12: text`: srun --label."""
    bars: bool = False
    """`trainer-3  | text`: docker compose."""
    hosts: bool = False
    """`gpu-17: text`: pdsh, clush."""
    tasks_are_nodes: bool = False
    """srun started one launcher a node: its label is not a rank."""


class Prefixed(NamedTuple):
    """A line without its prefixes, and what they said. `tag`: which of several interleaved writers it is from."""

    text: str
    said: Said = Said()
    rank: int | None = None
    local_rank: int | None = None
    node: str | None = None
    pod: str | None = None
    stream: Stream | None = None
    boot_id: str | None = None
    seq: int | None = None
    device: int | None = None
    tag: str = ""


class _Found:
    """Collects what the layers of one line say. The outermost that says something is believed, except for times."""

    __slots__ = (
        "boot_ns", "delta_ns", "device", "local_rank", "node", "pod", "rank", "seq", "stamp", "stream", "tag", "task",
    )  # fmt: skip

    def __init__(self) -> None:
        self.stamp: Stamp | None = None
        self.boot_ns: int | None = None
        self.delta_ns: int | None = None
        self.rank: int | None = None
        self.local_rank: int | None = None
        self.task: int | None = None
        self.node: str | None = None
        self.pod: str | None = None
        self.stream: Stream | None = None
        self.seq: int | None = None
        self.device: int | None = None
        self.tag = ""

    def time(self, stamp: Stamp) -> None:
        """A zone is worth most; after that the innermost time, which is the program's own."""
        if self.stamp is None or self.stamp.kind != "utc":
            self.stamp = stamp


_HOST = r"[A-Za-z0-9](?:[\w.-]{0,252}[A-Za-z0-9])?"
_DAEMONS = (
    r"kernel|systemd(?:-[\w-]+)?|slurmd|slurmctld|slurmstepd|slurmdbd|nv-fabricmanager|nvidia-persistenced|nv-hostengine|dcgm\w*|"
    r"kubelet|containerd|dockerd|crio|chronyd|ntpd|sshd|sudo|cron|CRON|rsyslogd|smartd|mcelog|rasdaemon|opensm|NetworkManager|"
    r"dhclient|audit|auditd|multipathd|nvme|node-problem-detector|gpud|nhc"
)
_TAG = re.compile(
    rf"(?P<host>{_HOST}) (?:(?P<daemon>{_DAEMONS})|(?P<other>[\w./@-]{{1,64}}(?=\[\d+\])))(?:\[(?P<pid>\d+)\])?: ?",
    re.ASCII,
)
_LOOSE_TAG = re.compile(rf"(?P<host>{_HOST}) (?P<other>[A-Za-z_][\w./@-]{{0,63}})(?:\[(?P<pid>\d+)\])?: ?", re.ASCII)
_LEVELS = frozenset(
    [
        "TRACE",
        "DEBUG",
        "INFO",
        "NOTICE",
        "WARN",
        "WARNING",
        "ERROR",
        "ERR",
        "CRITICAL",
        "CRIT",
        "FATAL",
        "SEVERE",
        "PANIC",
    ]
)
_RANK_TAG = re.compile(r"\[[Rr](?:ank|ANK)[ _:=-]?(?P<rank>\d{1,7})(?:/\d+)?\]:? ?")
_ROLE_TAG = re.compile(r"\[(?P<role>[A-Za-z_][A-Za-z_-]*?)(?P<local>\d{1,4})\]:(?: (?! ))?")
_MPI_TAG = re.compile(r"\[(?:[^\]\s@]{1,200}@)?\d+,(?P<rank>\d{1,7})\](?:<std(?:err|out|diag)>:?|:) ?")
_POD_TAG = re.compile(r"\[pod/(?P<pod>[^/\]\s]{1,253})(?:/[^\]\s]{1,253})?\] ?")
_BOOT = re.compile(r"\[ *(?P<s>\d{1,9})\.(?P<f>\d{1,9})(?: <[ \d.]+>)?\](?:\[ *[TC]\d+\])* ?")
_DELTA = re.compile(r"\[ *[+<] *(?P<s>\d{1,7})\.(?P<f>\d{1,9})>?\] ?")
_HOST_PID = re.compile(rf"\[(?P<host>{_HOST}):(?P<pid>\d{{2,8}})\] ?")
_SOURCE_FILE = re.compile(r"\.(?:py|pyx|c|cc|cpp|cu|cuh|h|hpp|go|rs|java|ts|js)$")
_KMSG = re.compile(r"(?P<pri>\d{1,4}),(?P<seq>\d{1,20}),(?P<us>\d{1,18}),[^;\n]{1,64};")
_PRIORITY = re.compile(r"<(?P<pri>\d{1,3})>(?P<version>1 )?")
_RFC5424 = re.compile(
    r"(?P<host>\S{1,255}) (?P<app>\S{1,48}) (?P<pid>\S{1,128}) \S{1,32} (?:-|(?:\[[^\]]{0,2000}\])+) ?(?:\ufeff)?"
)
_CRI = re.compile(r" std(?:out|err) [FP] ?")
_DECODED = re.compile(
    r"(?P<facility>kern|user|mail|daemon|auth|syslog|lpr|news|local\d) *:(?:emerg|alert|crit|err|warn|notice|info|debug) *: ?"
)
_FILE = re.compile(
    r"(?P<path>(?:/[\w.@+-]{1,255}){1,32}|[\w-]{1,200}\.(?:log|txt|out|err)(?:\.\d+)?):(?:\d{1,9}:)?(?=\S)"
)
_RAY = re.compile(r"\((?:(?P<actor>[^()\s]{1,100}) )?(?:pid|rank)=(?P<pid>\d+)(?:, ip=(?P<ip>[\da-fA-F.:]+))?\) ?")
_LABEL = re.compile(r" {0,6}(?P<task>\d{1,6}): ?")
_BAR = re.compile(r"(?P<name>[\w.-]{1,100}\d) *\| ?")
_HOST_COLON = re.compile(rf"(?P<host>{_HOST}): ")
_KERNEL = re.compile(r"kernel: ?")
_RANK_WORD = re.compile(
    r"(?:(?:INFO|WARN(?:ING)?|ERROR|DEBUG|CRITICAL)[: ] ?)?[Rr]ank[ =_]?(?P<rank>\d{1,7})(?=[:,\])]| [-|])"
)
_RANK_INSIDE = re.compile(r"\[(?:PG(?: ID)? 0 (?:PG GUID \S+ )?)?[Rr]ank[ =:]?(?P<rank>\d{1,7})\]")
_NCCL = re.compile(rf"(?P<host>{_HOST}):\d+:\d+ \[(?P<dev>-?\d{{1,3}})\] ")
_GLOG_BRACKET = re.compile(r"\[[IWEF](?=\d{3,4} \d\d:)")
_LEVEL_DATE = re.compile(
    r"(?:\([^()]{1,80}\) )?\[?(?:TRACE|DEBUG|INFO|NOTICE|WARN(?:ING)?|ERROR|CRITICAL|FATAL|SEVERE)\]?[: ]\s{0,8}\[?(?=\d\d)"
    r"|[DIWEFC] (?=\d\d-\d\d \d\d:|\d{4}-\d\d-\d\d )"
)
_KEY_TIME = re.compile(r"\b(?:time|ts|t|timestamp)=\"?(?=\d{4}-|\d{10})")
_PHRASE_TIME = re.compile(r"CANCELLED AT (?=\d{4}-)|^ *time *: (?=\d{4}-)")
_AFTER_TIME = frozenset(" \t]|,:-")


def _pair_ns(seconds: str, fraction: str) -> int:
    return int(seconds) * SECOND_NS + int(fraction.ljust(9, "0"))


def _bracket(text: str, found: _Found, _habits: Habits) -> str | None:
    match = _RANK_TAG.match(text)
    if match is not None:
        found.rank = int(match["rank"]) if found.rank is None else found.rank
        found.stream = found.stream or "job"
        found.tag += f"r{match['rank']}"
        return text[match.end() :]
    match = _BOOT.match(text)
    if match is not None:
        return _boot(match, text, found)
    match = _DELTA.match(text)
    if match is not None:
        found.delta_ns = _pair_ns(match["s"], match["f"])
        found.stream = found.stream or "kernel"
        return text[match.end() :]
    stamp = stamp_at(text, 1)
    if stamp is not None and text[stamp.end : stamp.end + 1] in _AFTER_TIME and stamp.end < len(text):
        found.time(stamp.stamp)
        if text[stamp.end] != "]":
            return None
        if text[1:2].isalpha() and text[stamp.end - 4 : stamp.end].isdigit():
            found.stream = found.stream or "kernel"  # dmesg -T
        rest = text[stamp.end + 1 :]
        return rest.removeprefix(" ")
    match = _GLOG_BRACKET.match(text)
    if match is not None:
        stamp = stamp_at(text, 1)
        if stamp is not None:
            found.time(stamp.stamp)
        return None
    return _bracketed_name(text, found)


def _boot(match: re.Match[str], text: str, found: _Found) -> str:
    epoch = stamp_at(f"{match['s']}.{match['f']}")
    if epoch is not None and epoch.stamp.kind == "utc":
        found.time(epoch.stamp)
    else:
        found.boot_ns = _pair_ns(match["s"], match["f"])
        found.stream = found.stream or "kernel"
    rest = text[match.end() :]
    # journalctl -o short-monotonic goes on with host and program.
    tag = _TAG.match(rest)
    return _tagged(tag, rest, found) if tag is not None else rest


def _bracketed_name(text: str, found: _Found) -> str | None:
    match = _ROLE_TAG.match(text)
    if match is not None:
        found.local_rank = int(match["local"])
        found.stream = found.stream or "job"
        found.tag += f"{match['role']}{match['local']}"
        return text[match.end() :]
    match = _MPI_TAG.match(text)
    if match is not None:
        found.rank = int(match["rank"]) if found.rank is None else found.rank
        found.stream = found.stream or "job"
        found.tag += f"r{match['rank']}"
        return text[match.end() :]
    match = _POD_TAG.match(text)
    if match is not None:
        found.pod = match["pod"]
        found.tag += match["pod"]
        return text[match.end() :]
    match = _HOST_PID.match(text)
    if match is not None and any(c.isdigit() for c in match["host"]) and not _SOURCE_FILE.search(match["host"]):
        found.node = found.node or match["host"]
        return text[match.end() :]
    _after_level(text, found)
    return None


def _after_level(text: str, found: _Found) -> None:
    """A level, then a time: the program's own header, of which the time is used."""
    match = _LEVEL_DATE.match(text)
    inner = stamp_at(text, match.end()) if match is not None else None
    if inner is not None:
        found.time(inner.stamp)


def _digit(text: str, found: _Found, habits: Habits) -> str | None:
    match = _KMSG.match(text)
    if match is not None:
        found.seq = int(match["seq"])
        found.boot_ns = int(match["us"]) * 1000
        if int(match["pri"]) >> 3 == 0:
            found.stream = "kernel"
        return text[match.end() :]
    if habits.labels:
        match = _LABEL.match(text)
        if match is not None and found.task is None:
            found.task = int(match["task"])
            found.tag += f"t{match['task']}"
            found.stream = found.stream or "job"
            return text[match.end() :]
    rest = _leading_time(text, found)
    return rest if rest is not None else _named_line(text, found, habits)


def _leading_time(text: str, found: _Found) -> str | None:
    stamp = stamp_at(text)
    if stamp is None:
        return None
    after = text[stamp.end : stamp.end + 1]
    if after and after not in _AFTER_TIME:
        return None
    if stamp.stamp.kind == "clock" and after not in (" ", "\t", "", "]"):
        return None
    found.time(stamp.stamp)
    rest = text[stamp.end :]
    if not rest.strip():
        return None
    cri = _CRI.match(rest)
    if cri is not None:
        return rest[cri.end() :]
    if rest[:1] == "\t":
        return rest[1:]
    if rest[:3] in (" - ", " | "):
        return rest[3:]
    rest = rest.lstrip(" ,|:") if rest[:1] != " " else rest[1:]
    tag = _TAG.match(rest)
    if tag is not None:
        return _tagged(tag, rest, found)
    if stamp.stamp.kind == "utc" and "T" in text[: stamp.end]:
        loose = _LOOSE_TAG.match(rest)
        if loose is not None and loose["host"] not in _LEVELS and any(c.isdigit() for c in loose["host"]):
            return _tagged(loose, rest, found)
    return rest


def _tagged(tag: re.Match[str], rest: str, found: _Found) -> str:
    """After `host program[pid]: `: the kernel's own name goes, that of another program is part of the message."""
    if _NCCL.match(rest, tag.end("host") + 1) is not None:
        # NCCL names the machine itself: what stands before it is a pod, or a task.
        found.pod = found.pod or tag["host"]
        return rest[tag.end("host") + 1 :]
    found.node = found.node or tag["host"]
    name = tag.groupdict().get("daemon") or tag["other"]
    if name == "kernel":
        found.stream = "kernel"
        return rest[tag.end() :]
    return rest[tag.end("host") + 1 :]


def _letter(text: str, found: _Found, habits: Habits) -> str | None:
    stamp = stamp_at(text)
    if stamp is not None:
        if text[1:2].isdigit():
            # glog, klog: the header is the program's own.
            found.time(stamp.stamp)
            return None
        rest = text[stamp.end :]
        if rest[:1] in _AFTER_TIME or not rest:
            found.time(stamp.stamp)
            if not rest.strip():
                return None
            rest = rest.lstrip(" :,-|\t") if rest[:1] != " " else rest[1:]
            tag = _TAG.match(rest)
            if tag is None and stamp.stamp.kind == "yearless":
                tag = _LOOSE_TAG.match(rest)
                if tag is not None and (
                    tag["host"] in _LEVELS or not (tag["pid"] or any(c.isdigit() for c in tag["host"]))
                ):
                    tag = None
            return _tagged(tag, rest, found) if tag is not None else rest
    match = _KERNEL.match(text)
    if match is not None:
        found.stream = "kernel"
        return text[match.end() :]
    match = _DECODED.match(text)
    if match is not None:
        if match["facility"] == "kern":
            found.stream = "kernel"
        return text[match.end() :]
    if _LEVEL_DATE.match(text) is not None:
        _after_level(text, found)
        return None
    return _named_line(text, found, habits)


def _named_line(text: str, found: _Found, habits: Habits) -> str | None:
    if habits.bars:
        match = _BAR.match(text)
        if match is not None:
            found.pod = found.pod or match["name"]
            found.tag += match["name"]
            return text[match.end() :]
    if habits.hosts:
        match = _HOST_COLON.match(text)
        if match is not None and any(c.isdigit() for c in match["host"]):
            found.node = found.node or match["host"]
            found.tag += match["host"]
            return text[match.end() :]
    return _file(text, found, habits)


def _file(text: str, _found: _Found, _habits: Habits) -> str | None:
    match = _FILE.match(text)
    # A path that goes on with a time or a kernel's line is what grep puts before what it found.
    if match is None or (stamp_at(text, match.end()) is None and not text.startswith("[", match.end())):
        return None
    return text[match.end() :]


def _angle(text: str, found: _Found, _habits: Habits) -> str | None:
    match = _PRIORITY.match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    if int(match["pri"]) >> 3 == 0:
        found.stream = "kernel"
    if match["version"]:
        stamp = stamp_at(rest)
        header = _RFC5424.match(rest, stamp.end + 1) if stamp is not None else None
        if stamp is not None and header is not None:
            found.time(stamp.stamp)
            if header["host"] != "-":
                found.node = found.node or header["host"]
            if header["app"] == "kernel":
                found.stream = "kernel"
                return rest[header.end() :]
            return f"{header['app']}: {rest[header.end() :]}"
    return rest


def _paren(text: str, found: _Found, _habits: Habits) -> str | None:
    match = _RAY.match(text)
    if match is None:
        _after_level(text, found)
        return None
    found.node = found.node or match["ip"]
    found.tag += f"p{match['pid']}"
    return text[match.end() :]


_Layer = Callable[[str, _Found, Habits], "str | None"]
_LAYERS: dict[str, _Layer] = {
    "[": _bracket,
    "<": _angle,
    "(": _paren,
    "/": _file,
    **dict.fromkeys("0123456789", _digit),
    **dict.fromkeys("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz_", _letter),
}
_NO_HABITS = Habits()


def strip(text: str, habits: Habits = _NO_HABITS) -> Prefixed:
    """Take the prefixes off a line. `text` has been cleaned (sources/terminal.py). Indentation after a prefix stays."""
    found = _Found()
    for _ in range(MAX_LAYERS):
        first = text[:1]
        if first == " " and habits.labels and found.task is None:
            rest = _digit(text, found, habits) if text.lstrip()[:1].isdigit() else None
        else:
            layer = _LAYERS.get(first)
            rest = layer(text, found, habits) if layer is not None else None
        if rest is None:
            break
        text = rest
    _inside(text, found)
    rank = found.rank
    if rank is None and found.task is not None and found.local_rank is None and not habits.tasks_are_nodes:
        rank = found.task
    return Prefixed(
        text=text,
        said=Said(found.stamp, found.boot_ns, found.delta_ns),
        rank=rank,
        local_rank=found.local_rank,
        node=found.node,
        pod=found.pod,
        stream=found.stream,
        seq=found.seq,
        device=found.device,
        tag=found.tag,
    )


def _inside(text: str, found: _Found) -> None:
    """What the rest of the line says about who wrote it: a rank in words, NCCL's host and device, a time in a phrase."""
    head = text[:HEAD]
    if found.rank is None and "ank" in head:
        match = _RANK_WORD.match(head) or _RANK_INSIDE.search(head)
        if match is not None:
            found.rank = int(match["rank"])
    if "NCCL" in head:
        match = _NCCL.match(head)
        if match is not None:
            found.node = found.node or match["host"]
            found.device = int(match["dev"]) if match["dev"][0] != "-" else None
            found.stream = found.stream or "job"
    if found.stamp is None and ("time" in head or "CANCELLED AT" in head or "ts=" in head):
        match = _PHRASE_TIME.search(head) or _KEY_TIME.search(head)
        if match is not None:
            found.stamp = stamp_in(head[match.end() :])


def habits_of(lines: list[str]) -> Habits:
    """Which of the doubtful prefixes most of the first lines of a text have. `lines` are cleaned; some hundred are enough."""
    told = [t for t in lines if t.strip() and not t.startswith(("srun:", "slurmstepd:", "==> "))]
    if not told:
        return Habits()

    def most(pattern: re.Pattern[str]) -> bool:
        return sum(1 for t in told if pattern.match(t)) * 10 >= len(told) * 7

    bars = most(_BAR) and not any(" | " in t[t.find("|") + 1 :] for t in told[:20])
    launched = any("torchrun" in t or "torch.distributed.run" in t or "torch.distributed.launch" in t for t in lines)
    return Habits(labels=most(_SPACED_LABEL), bars=bars, hosts=_have_hosts(told), tasks_are_nodes=launched)


def _have_hosts(told: list[str]) -> bool:
    """Whether most lines begin with a host that other lines begin with too: a table of things has each of them once."""
    named = [h for h in map(_host_of, told) if h is not None]
    counts = Counter(named)
    return sum(1 for h in named if counts[h] > 1) * 10 >= len(told) * 7


_SPACED_LABEL = re.compile(r" {0,6}\d{1,6}: |\s{0,6}\d{1,6}:$")


def _host_of(text: str) -> str | None:
    match = _HOST_COLON.match(text)
    if match is None or not any(c.isdigit() for c in match["host"]) or _RANK_WORD.match(text):
        return None
    return match["host"]
