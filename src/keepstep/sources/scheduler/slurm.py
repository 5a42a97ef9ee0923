"""Output of Slurm's commands: sacct, scontrol show job and node, squeue, sinfo, their JSON, and the environment of an epilog.

Formats: sacct(1), scontrol(1), squeue(1), sinfo(1) of Slurm 22.05 to 25.05; samples of every job state made with 22.05.8.
Exit codes of `sacct --json` of 22.05 are not read: it prints 0 for every job that ended with a code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from keepstep.catalog.load import Catalog
from keepstep.records.event import Event
from keepstep.records.hostlist import expand_hosts
from keepstep.sources.documents import Document, Line
from keepstep.sources.scheduler.making import note
from keepstep.sources.scheduler.slurmjobs import JobRow, code_of, job_events, state_of
from keepstep.sources.scheduler.tables import Row, rows

MAX_NODES = 512
"""Nodes of one record that get an event each; a longer list is one event without a node."""

MAX_EVENTS = 50_000
"""Events of the tables of one document; what comes after is more of the same."""

_ASSIGN = re.compile(r"(?:^|\s)([A-Z][\w/:]*(?:\(Reason\))?)=")
_START = re.compile(r"^(?:JobId|NodeName)=\S")
_ENVIRON = re.compile(r"^(?:export )?(SLURM\w*)=(.*)$")
_DOWN = re.compile(r"DOWN|NO_RESPOND|NOT_RESPONDING|\*$", re.IGNORECASE)
_CLOSED = re.compile(r"DRAIN|DRNG|DOWN|FAIL|MAINT|INVAL|REBOOT|NOT_RESPONDING|\*$", re.IGNORECASE)
_BUSY = re.compile(r"ALLOC|MIX|DRAINING|DRNG|COMPLETING|^COMP", re.IGNORECASE)


def table_events(document: Document, catalog: Catalog) -> list[Event]:
    """Rows of sacct, squeue and sinfo."""
    found: list[Event] = []
    sacct = False
    for row in rows(document):
        if len(found) > MAX_EVENTS:
            break
        cells = row.cells
        sacct = sacct or "exitcode" in cells
        if "jobid" in cells or "jobidraw" in cells:
            found += _job_row(row, sacct, document, catalog)
        elif ("nodelist" in cells or "hostnames" in cells) and ("reason" in cells or "state" in cells):
            found += _node_row(row, document, catalog)
    return found


def _job_row(row: Row, sacct: bool, document: Document, catalog: Catalog) -> list[Event]:
    cells = row.cells
    known = state_of(cells.get("state") or cells.get("st") or "")
    job, _, step = (cells.get("jobid") or cells.get("jobidraw", "")).partition(".")
    if known is None or not job or not job[0].isdigit():
        return []
    where = cells.get("nodelist") or cells.get("nodelist(reason)", "")
    waits = where.startswith("(")
    record = JobRow(
        job=job,
        step=step,
        state=known[0],
        exit=code_of(cells.get("exitcode")),
        derived=code_of(cells.get("derivedexitcode")),
        reason=cells.get("reason", "") or (where.strip("()") if waits else ""),
        nodes="" if waits or where in ("None assigned", "n/a") else where,
        began=cells.get("start"),
        ended=cells.get("end"),
        elapsed=cells.get("elapsed") or cells.get("time", ""),
        limit=cells.get("timelimit", ""),
        user=known[1].removeprefix("by "),
        from_sacct=sacct,
    )
    return job_events(record, row.line, document, catalog)


def _node_row(row: Row, document: Document, catalog: Catalog) -> list[Event]:
    cells = row.cells
    names = cells.get("nodelist") or cells.get("hostnames", "")
    reason = cells.get("reason", "")
    state = cells.get("state", "drained" if reason else "")
    if not re.fullmatch(r"[\w.,\[\]-]+", names) or not (state or reason):
        return []
    more = {"user": cells.get("user"), "since": cells.get("timestamp")}
    return list(node_events(names, state, reason, row.line, document, catalog, more))


def node_events(
    names: str,
    state: str,
    reason: str,
    line: Line,
    document: Document,
    catalog: Catalog,
    more: Mapping[str, Any] | None = None,
) -> Iterator[Event]:
    """Events of nodes (a host list) in a state. `more`: further attributes; `since` among them is the time of the event."""
    attrs = dict(more or {})
    closed = _CLOSED.search(state.rstrip("+")) is not None
    if not closed:
        return
    busy = _BUSY.search(state) is not None
    signature = "slurm.node_down" if _DOWN.search(state) else "slurm.node_drain"
    attrs |= {"state": state, "reason": "" if reason.lower() in ("none", "(null)", "n/a") else reason, "busy": busy}
    for node in _hosts(names):
        yield note(catalog, signature, document, line, at=attrs.get("since"), node=node, attrs=attrs)


def _hosts(names: str) -> list[str | None]:
    try:
        found = expand_hosts(names)
    except ValueError:
        return [names]
    return list(found) if len(found) <= MAX_NODES else [None]


def scontrol_events(document: Document, catalog: Catalog) -> list[Event]:
    """`scontrol show job`, `scontrol show node`, and lines of jobcomp/filetxt."""
    found: list[Event] = []
    block: list[Line] = []
    for line in document.lines:
        text = line.raw.strip()
        if _START.match(text) or not text:
            found += _assigned(block, document, catalog)
            block = [line] if text else []
        elif block:
            block.append(line)
    return found + _assigned(block, document, catalog)


def assignments(lines: Sequence[Line]) -> dict[str, str]:
    """Key=Value pairs of a record; a value goes on to the next key, since reasons and names have spaces."""
    found: dict[str, str] = {}
    for line in lines:
        marks = list(_ASSIGN.finditer(line.raw))
        ends = [m.start() for m in marks[1:]] + [len(line.raw)]
        for mark, end in zip(marks, ends, strict=False):
            value = line.raw[mark.end() : end].strip()
            found.setdefault(mark[1], value)
    return found


def _assigned(block: Sequence[Line], document: Document, catalog: Catalog) -> list[Event]:
    if not block:
        return []
    pairs = assignments(block)
    if "JobState" in pairs and "JobId" in pairs:
        known = state_of(pairs["JobState"])
        if known is None:
            return []
        record = JobRow(
            job=pairs["JobId"],
            step="",
            state=known[0],
            exit=code_of(pairs.get("ExitCode")),
            derived=code_of(pairs.get("DerivedExitCode")),
            reason=pairs.get("Reason", ""),
            nodes=_plain(pairs.get("NodeList", "")),
            began=pairs.get("StartTime"),
            ended=pairs.get("EndTime"),
            elapsed=pairs.get("RunTime", ""),
            limit=pairs.get("TimeLimit", ""),
            restarts=pairs.get("Restarts", ""),
            preempted=pairs.get("PreemptTime"),
        )
        line = next((at for at in block if "JobState=" in at.raw), block[0])
        return job_events(record, line, document, catalog)
    if "NodeName" in pairs and "State" in pairs:
        reason, _, who = pairs.get("Reason", "").partition("[")
        user, _, since = who.rstrip("] ").partition("@")
        line = next((at for at in block if "Reason=" in at.raw), block[0])
        more = {"user": user, "since": since}
        node = pairs["NodeName"]
        return list(node_events(node, pairs["State"], reason.strip(), line, document, catalog, more))
    return []


def _plain(text: str) -> str:
    return "" if text in ("(null)", "None assigned") else text


def environment_events(document: Document, catalog: Catalog) -> list[Event]:
    """The environment of an epilog: how the job ended. SLURM_JOB_EXIT_CODE is a wait state, EXIT_CODE2 is code:signal."""
    values: dict[str, tuple[str, Line]] = {}
    for line in document.lines:
        match = _ENVIRON.match(line.raw)
        if match is not None:
            values[match[1]] = match[2].strip().strip("\"'"), line
    raw = values.get("SLURM_JOB_EXIT_CODE2") or values.get("SLURM_JOB_EXIT_CODE")
    job = values.get("SLURM_JOB_ID") or values.get("SLURM_JOBID")
    if raw is None or job is None:
        return []
    text, line = raw
    code = code_of(text) if ":" in text else code_of(int(text)) if text.isdigit() and len(text) < 6 else None
    if code is None or code == (0, 0):
        return []
    restarts = values.get("SLURM_JOB_RESTART_COUNT", ("", line))[0]
    record = JobRow(job=job[0], step="", state="FAILED", exit=code, restarts=restarts)
    return job_events(record, line, document, catalog)


def json_events(record: Mapping[str, Any], line: Line, document: Document, catalog: Catalog) -> list[Event]:
    """`squeue --json`, `sacct --json`, `sinfo --json`, `scontrol show job|node --json`."""
    found: list[Event] = []
    version = str(_at(record, "meta", "plugin", "type") or "") + str(_at(record, "meta", "plugin", "data_parser") or "")
    trusted = "dbv0.0.38" not in version and "dbv0.0.37" not in version
    for job in _dicts(record.get("jobs")):
        found += _json_job(job, trusted, line, document, catalog)
    for node in _dicts(record.get("nodes")):
        states = node.get("state")
        flags = node.get("state_flags")
        state = "+".join(str(s) for s in [*_listed(states), *_listed(flags)])
        more = {"since": node.get("reason_changed_at"), "user": node.get("reason_set_by_user")}
        name, reason = str(node.get("name") or ""), str(node.get("reason") or "")
        if name:
            found += node_events(name, state, reason, line, document, catalog, more)
    return found


def _json_job(job: Mapping[str, Any], trusted: bool, line: Line, document: Document, catalog: Catalog) -> list[Event]:
    state = job.get("job_state")
    reason: object = job.get("state_reason")
    if state is None and isinstance(job.get("state"), dict):
        state, reason = job["state"].get("current"), job["state"].get("reason")
    known = state_of(state)
    if known is None or job.get("job_id") is None:
        return []
    record = JobRow(
        job=str(job["job_id"]),
        step="",
        state=known[0],
        exit=_json_code(job.get("exit_code")) if trusted else None,
        derived=_json_code(job.get("derived_exit_code")) if trusted else None,
        reason=str(reason or ""),
        nodes=_plain(str(job.get("nodes") or "")),
        began=_json_number(job.get("start_time") or _at(job, "time", "start")),
        ended=_json_number(job.get("end_time") or _at(job, "time", "end")),
        restarts=str(_json_number(job.get("restart_cnt")) or ""),
        preempted=_json_number(job.get("preempt_time")),
        user=str(job.get("kill_request_user") or ""),
    )
    return job_events(record, line, document, catalog)


def _json_code(value: object) -> tuple[int, int] | None:
    """A wait state, or an object with return_code and signal, numbers bare or as {set, infinite, number}."""
    if isinstance(value, dict):
        signal = value.get("signal")
        number = _json_number(signal.get("id") or signal.get("signal_id")) if isinstance(signal, dict) else 0
        code = _json_number(value.get("return_code"))
        return (code, number) if isinstance(code, int) and isinstance(number, int) else None
    return code_of(value)


def _json_number(value: object) -> object:
    return value.get("number") if isinstance(value, dict) else value


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value in (None, "") else [value]


def _dicts(value: object) -> Iterable[Mapping[str, Any]]:
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def _at(record: Mapping[str, Any], *path: str) -> object:
    found: object = record
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found
