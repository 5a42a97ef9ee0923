"""The coordinator's state of a run, without any input or output.

`handle` turns a message into journal records and a reply; `apply` changes the state by a record, live and in replay alike, so
that a coordinator that died goes on from its journal. What agents should be doing follows from the state alone (`commands`),
so nothing is lost when a message was not sent: the next coordinator sends it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from keepstep.launcher import messages as m
from keepstep.launcher.closing import closing_marks, end_records, ended_cycle, never_started
from keepstep.launcher.rules import Outcome, decide, fingerprint, first_failure
from keepstep.records.cycle import VerdictFile
from keepstep.records.exits import exit_status_name
from keepstep.records.timeline import Mark

Record = dict[str, Any]
Phase = Literal["forming", "running", "stopping", "done"]
RANK_MARKS_ALL = ("attached",)
"""Marks that count when the last rank reports them."""
NOTES = frozenset(
    {*RANK_MARKS_ALL, "restored", "first_step", "ckpt_block", "committed", "ckpt_failed", "quarantined", "drain"}
)
"""Marks that may come from a rank; all others are the coordinator's own."""


class NodeState(msgspec.Struct, kw_only=True):
    """A node that joined. Known from the journal; whether it is connected is the coordinator's business."""

    node: str
    host: str
    nproc: int
    next_addr: str
    next_port: int
    pid: int
    hosts_store: bool = False


class CycleState(msgspec.Struct, kw_only=True):
    """The current cycle."""

    number: int
    nodes: list[str]
    ranks: list[dict[str, Any]]
    master_addr: str
    master_port: int
    agent_store: bool = False
    started: dict[str, dict[str, Any]] = {}
    stopped: dict[str, m.Stopped] = {}
    lost: list[str] = []
    fault: m.Fault | None = None
    reported: dict[str, dict[int, int]] = {}
    kv: dict[str, Any] = {}
    beats: dict[str, tuple[int, int]] = {}
    last_step: int | None = None
    first_step_count: int | None = None
    restored_step: int | None = None
    restored_from: str = "none"
    restored_checkpoint: str | None = None
    drained: bool = False
    marked: list[str] = []
    lost_ns: int = 0


class Job:
    """State of one run; see the module's docstring."""

    def __init__(self, run_id: str, nnodes: int, max_restarts: int, master: tuple[str | None, int | None]) -> None:
        self.run_id = run_id
        self.nnodes = nnodes
        self.max_restarts = max_restarts
        self.master = master
        self.attempt = -1
        self.epoch = 0
        self.phase: Phase = "forming"
        self.last_cycle = -1
        self.cycle: CycleState | None = None
        self.nodes: dict[str, NodeState] = {}
        self.marks: list[Mark] = []
        self.stop: dict[str, Any] | None = None
        self.verdict: VerdictFile | None = None
        self.counted = 0
        self.port_retries = 0
        self.last_fingerprint: tuple[str, int | None] | None = None
        self.last_committed: int | None = None

    # ---- replay

    def apply(self, record: Record) -> None:
        """Change the state by one journal record."""
        getattr(self, f"_apply_{record['type']}")(record)

    def _apply_open(self, r: Record) -> None:
        self.epoch = r["epoch"]
        if r["attempt"] != self.attempt:
            # A new life of the launchers: whatever ran before is dead with its agents.
            self.attempt = r["attempt"]
            self.phase, self.cycle, self.nodes = "forming", None, {}
            self.stop, self.verdict, self.counted, self.port_retries = None, None, 0, 0
            self.last_fingerprint = None

    def _apply_mark(self, r: Record) -> None:
        mark = msgspec.convert(r["mark"], Mark)
        self.marks.append(mark)
        if mark.kind == "committed":
            self.last_committed = mark.attrs.get("step")
        if self.cycle is None or mark.cycle != self.cycle.number:
            return
        if mark.kind not in self.cycle.marked:
            self.cycle.marked.append(mark.kind)
        if mark.kind == "step":
            self.cycle.last_step = mark.attrs.get("step")
        if mark.kind == "restored":
            # What was committed beyond it has been refused and is no part of this history any more.
            if mark.attrs.get("source", "none") != "none":
                self.last_committed = mark.attrs.get("step")
            self.cycle.restored_step = mark.attrs.get("step")
            self.cycle.restored_from = mark.attrs.get("source", "none")
            self.cycle.restored_checkpoint = mark.attrs.get("checkpoint")
        elif mark.kind == "first_step":
            self.cycle.first_step_count = mark.attrs.get("step")
        elif mark.kind == "drain":
            self.cycle.drained = True

    def _apply_node(self, r: Record) -> None:
        self.nodes[r["node"]] = msgspec.convert({k: v for k, v in r.items() if k not in ("type", "seq")}, NodeState)

    def _apply_cycle(self, r: Record) -> None:
        self.cycle = CycleState(
            number=r["cycle"],
            nodes=r["nodes"],
            ranks=r["ranks"],
            master_addr=r["master_addr"],
            master_port=r["master_port"],
            agent_store=r["agent_store"],
        )
        self.last_cycle = r["cycle"]
        self.phase = "running"

    def _apply_started(self, r: Record) -> None:
        if self.cycle is not None:
            self.cycle.started[r["node"]] = r
            pids = {p["rank"]: p["pid"] for p in r["ranks"]}
            self.cycle.ranks = [{**p, "pid": pids.get(p["rank"], p.get("pid"))} for p in self.cycle.ranks]

    def _apply_fault(self, r: Record) -> None:
        if self.cycle is not None and self.cycle.fault is None:
            self.cycle.fault = msgspec.convert(r["fault"], m.Fault)
            self.phase = "stopping"

    def _apply_node_lost(self, r: Record) -> None:
        self.nodes.pop(r["node"], None)
        if self.cycle is not None and r["node"] in self.cycle.nodes:
            if r["node"] not in self.cycle.lost:
                self.cycle.lost.append(r["node"])
            self.cycle.lost_ns = self.cycle.lost_ns or r["t_ns"]
            if self.phase == "running":
                self.phase = "stopping"

    def _apply_stopped(self, r: Record) -> None:
        if self.cycle is not None:
            stopped = msgspec.convert(r["stopped"], m.Stopped)
            self.cycle.stopped[r["node"]] = stopped
            if r["node"] in self.nodes:
                self.nodes[r["node"]].next_port = stopped.next_port
            exits = {int(k): exit_status_name(v) for k, v in stopped.statuses.items()}
            self.cycle.ranks = [{**p, "exit": exits.get(p["rank"], p.get("exit"))} for p in self.cycle.ranks]

    def _apply_reported(self, r: Record) -> None:
        if self.cycle is not None:
            self.cycle.reported.setdefault(r["kind"], {})[r["rank"]] = r["t_ns"]

    def _apply_kv(self, r: Record) -> None:
        if self.cycle is not None and r["cycle"] == self.cycle.number:
            self.cycle.kv[r["key"]] = r["value"]

    def _apply_grant(self, r: Record) -> None:
        """Nothing to remember: the record itself is what must exist before a marker may."""

    def _apply_stop_request(self, r: Record) -> None:
        if self.stop is None:
            self.stop = r

    def _apply_decision(self, r: Record) -> None:
        outcome = r["outcome"]
        self.counted += bool(outcome["counted"])
        self.port_retries = self.port_retries + 1 if outcome["rule"] == "address_in_use" else 0
        self.last_fingerprint = (r["fingerprint"], r["step"]) if r["fingerprint"] else None
        self.phase = "forming"

    def _apply_verdict(self, r: Record) -> None:
        self.verdict = msgspec.convert(r["verdict"], VerdictFile)
        self.phase = "done"

    # ---- messages

    def handle(self, node: str, message: m.FromAgent) -> tuple[list[Record], m.Reply]:
        """Records and reply of any message but Hello (`join`) and KvWait. The records are applied and durable before the reply."""
        if isinstance(message, m.StopRequest):
            new = self.stop is None and self.phase != "done"
            record = {"type": "stop_request", "signum": message.signum, "node": message.node}
            return [record] if new else [], self._reply(message)
        fenced = self.fenced(message)
        if fenced is not None:
            return [], self._refusal(message, fenced)
        assert self.cycle is not None
        kv = self.cycle.kv
        match message:
            case m.Started():
                return self.started(node, message), self._reply(message)
            case m.Fault():
                return self.fault(node, message), self._reply(message)
            case m.Stopped():
                return self.stopped(node, message), self._reply(message)
            case m.Note():
                if message.kind not in NOTES:
                    return [], self._refusal(message, f"no mark {message.kind!r} from a rank")
                return self.note(message), self._reply(message)
            case m.Beat():
                return self.beat(node, message), self._reply(message)
            case m.KvSet():
                if message.key in kv and (message.only_if_absent or kv[message.key] == message.value):
                    return [], self._reply(message, {"value": kv[message.key]})
                record = {"type": "kv", "cycle": message.cycle, "key": message.key, "value": message.value}
                return [record], self._reply(message, {"value": message.value})
            case m.KvGet():
                return [], self._reply(message, {"found": message.key in kv, "value": kv.get(message.key)})
            case m.Grant():
                granted = self.phase == "running"
                fields = {"cycle": message.cycle, "checkpoint": message.checkpoint, "step": message.step}
                return [{"type": "grant", **fields}] if granted else [], self._reply(message, {"granted": granted})
            case _:
                return [], self._refusal(message, "unexpected message")

    def _reply(self, message: m.AgentMessage, result: Any = None) -> m.Reply:
        return m.Reply(epoch=self.epoch, id=message.id, result=result)

    def _refusal(self, message: m.AgentMessage, why: str) -> m.Reply:
        return m.Reply(epoch=self.epoch, id=message.id, ok=False, error=why)

    def fenced(self, message: m.AgentMessage) -> str | None:
        """Why a message about a cycle is refused, or None."""
        if self.cycle is None or message.cycle != self.cycle.number:
            return f"cycle {message.cycle} is over (current: {self.last_cycle})"
        return None

    def join(self, hello: m.Hello, connected: set[str], now_ns: int) -> tuple[list[Record], str | None]:
        """A node says hello: records, or why it is refused."""
        if hello.run_id != self.run_id:
            return [], f"this is run {self.run_id!r}, not {hello.run_id!r}"
        known = self.nodes.get(hello.node)
        if known is not None and known.pid != hello.pid and hello.node in connected:
            return [], (
                f"node name {hello.node!r} is taken by host {known.host} pid {known.pid}; start this one with another --node-name"
            )
        if known is None and len(self.nodes) >= self.nnodes:
            return [], f"the job has its {self.nnodes} nodes: {', '.join(self.nodes)}"
        record = {
            "type": "node",
            "node": hello.node,
            "host": hello.host,
            "nproc": hello.nproc,
            "next_addr": hello.next_addr,
            "next_port": hello.next_port,
            "pid": hello.pid,
            "hosts_store": hello.hosts_store,
        }
        records: list[Record] = [record]
        running = self.cycle is not None and self.phase in ("running", "stopping") and hello.node in self.cycle.nodes
        if running and known is not None and known.pid != hello.pid:
            # Another life of that launcher: the ranks it had in this cycle are dead, and nobody will tell.
            records.insert(0, {"type": "node_lost", "node": hello.node, "t_ns": now_ns})
        return records, None

    def mark(self, kind: str, t_ns: int, /, **attrs: Any) -> Record:
        """A journal record holding a mark of the current cycle and attempt."""
        mark = {"t_ns": t_ns, "kind": kind, "cycle": max(self.last_cycle, 0), "attempt": self.attempt, "attrs": attrs}
        return {"type": "mark", "mark": mark}

    def note(self, message: m.Note) -> list[Record]:
        """A mark from a rank or agent. Marks every rank must report count when the last one did."""
        if message.kind not in RANK_MARKS_ALL:
            if message.kind == "drain" and self.cycle is not None and self.cycle.drained:
                return []
            record = self.mark(message.kind, message.t_ns, **message.attrs)
            return [] if msgspec.convert(record["mark"], Mark) in self.marks[-200:] else [record]
        assert self.cycle is not None
        seen = {**self.cycle.reported.get(message.kind, {}), message.rank: message.t_ns}
        records: list[Record] = [
            {"type": "reported", "kind": message.kind, "rank": message.rank, "t_ns": message.t_ns},
        ]
        if len(seen) == len(self.cycle.ranks) and message.rank not in self.cycle.reported.get(message.kind, {}):
            records.append(self.mark(message.kind, max(seen.values())))
        return records

    def started(self, node: str, message: m.Started) -> list[Record]:
        """A node's ranks were forked."""
        assert self.cycle is not None
        if node in self.cycle.started:
            return []
        record = {"type": "started", "node": node, **msgspec.to_builtins(message)}
        records = [{k: v for k, v in record.items() if k != "id"} | {"type": "started"}]
        everyone = [record, *(r for n, r in self.cycle.started.items() if n != node)]
        if len(everyone) == len(self.cycle.nodes):
            records.append(self.mark("assigned", max(r["assigned_ns"] for r in everyone)))
            if not any(r.get("expect_steps") for r in everyone):
                # A script without the trainer library runs from the moment its processes are there.
                records.append(self.mark("attached", max(r["started_ns"] for r in everyone)))
        return records

    def fault(self, node: str, message: m.Fault) -> list[Record]:
        """The first fault of a cycle stops it; later ones of the same cycle are consequences."""
        assert self.cycle is not None
        if self.cycle.fault is not None or self.phase != "running":
            return []
        return [{"type": "fault", "node": node, "fault": msgspec.to_builtins(message) | {"type": "fault"}}]

    def beat(self, node: str, message: m.Beat) -> list[Record]:
        """A progress sample: a `step` mark when the slowest node has advanced."""
        assert self.cycle is not None
        if message.completed is None:
            return []
        self.cycle.beats[node] = (message.completed, message.at_ns)
        now = self._slowest()
        if now is None or (self.cycle.last_step is not None and now[0] <= self.cycle.last_step):
            return []
        return [self.mark("step", now[1], step=now[0])]

    def _slowest(self) -> tuple[int, int] | None:
        assert self.cycle is not None
        if set(self.cycle.beats) < set(self.cycle.nodes):
            return None
        step = min(s for s, _ in self.cycle.beats.values())
        return step, max(t for s, t in self.cycle.beats.values() if s == step)

    def stopped(self, node: str, message: m.Stopped) -> list[Record]:
        """No process of the cycle is left on `node`."""
        assert self.cycle is not None
        if node in self.cycle.stopped:
            return []
        return [{"type": "stopped", "node": node, "stopped": msgspec.to_builtins(message) | {"type": "stopped"}}]

    # ---- decisions

    def advance(self, now_ns: int, connected: set[str]) -> list[Record]:
        """Records of the next transition that is due, or nothing. Call again after applying them."""
        if self.phase == "done":
            return []
        if self.phase == "forming":
            if self.stop is not None:
                return end_records(self, now_ns, decide(never_started(self)), None)
            if len(self.nodes) == self.nnodes and set(self.nodes) <= connected:
                return self._start_cycle(now_ns)
            return []
        assert self.cycle is not None
        if set(self.cycle.stopped) | set(self.cycle.lost) >= set(self.cycle.nodes):
            return self._decide(now_ns)
        return []

    def give_up_joining(self, now_ns: int, limit_s: float) -> list[Record]:
        """The nodes did not come together in time: the job ends."""
        message = (
            f"{len(self.nodes)} of {self.nnodes} nodes within {limit_s:g} s ({', '.join(sorted(self.nodes)) or 'none'}); "
            "start the others with the same --rdzv-id and --run-dir, or raise --rdzv-conf join_timeout=S"
        )
        outcome = Outcome(
            rule="join_timeout", action="end", verdict="failed", exit_code=1, cause="join_timeout", message=message
        )
        return end_records(self, now_ns, outcome, None)

    def _start_cycle(self, now_ns: int) -> list[Record]:
        number = self.last_cycle + 1
        nodes = sorted(self.nodes) if self.cycle is None else [n for n in self.cycle.nodes if n in self.nodes]
        nodes += [n for n in sorted(self.nodes) if n not in nodes]
        ranks: list[dict[str, Any]] = []
        for name in nodes:
            node = self.nodes[name]
            for local in range(node.nproc):
                ranks.append({"rank": len(ranks), "local_rank": local, "node": name, "host": node.host})
        head = self.nodes[nodes[0]]
        first = self.last_cycle < 0
        addr = self.master[0] or head.next_addr
        port = (self.master[1] if first else None) or head.next_port
        mark = self.mark("cycle_started", now_ns)
        mark["mark"]["cycle"] = number
        cycle = {
            "type": "cycle",
            "cycle": number,
            "nodes": nodes,
            "ranks": ranks,
            "master_addr": addr,
            "master_port": port,
        }
        return [cycle | {"agent_store": head.hosts_store}, mark]

    def _decide(self, now_ns: int) -> list[Record]:
        assert self.cycle is not None
        c = self.cycle
        ended = ended_cycle(self)
        outcome = decide(ended)
        records = closing_marks(self, ended, outcome)
        if outcome.action == "end":
            return records + end_records(self, now_ns, outcome, ended)
        records.append(self.mark("decided", now_ns, action="restart", counted=outcome.counted, rule=outcome.rule))
        records.append(self.mark("cycle_ended", now_ns, reason=outcome.cause))
        first = first_failure(ended)
        records.append(
            {
                "type": "decision",
                "cycle": c.number,
                "outcome": msgspec.to_builtins(outcome),
                "fingerprint": fingerprint(first, ended.fault_kind),
                "step": ended.completed_step,
            }
        )
        return records

    # ---- commands

    def command_for(self, node: str) -> m.FromCoordinator | None:
        """What `node` should be told in this state; agents ignore what they already do."""
        if self.phase == "done":
            assert self.verdict is not None
            v = self.verdict
            return m.End(
                epoch=self.epoch,
                exit_code=v.exit_code,
                outcome=v.outcome,
                cause=v.cause,
                message=v.message,
                traceback=v.traceback,
                first_failing_rank=v.first_failing_rank,
            )
        c = self.cycle
        if c is None or node not in c.nodes or node in c.stopped or self.phase == "forming":
            return None
        if self.phase == "stopping":
            return m.StopCycle(epoch=self.epoch, cycle=c.number, reason=c.fault.kind if c.fault else "node_lost")
        if self.stop is not None:
            return m.AskStop(epoch=self.epoch, cycle=c.number, signum=self.stop["signum"])
        if node in c.started:
            return None
        return m.StartCycle(
            epoch=self.epoch,
            cycle=c.number,
            attempt=self.attempt,
            first_rank=next(p["rank"] for p in c.ranks if p["node"] == node),
            node_index=c.nodes.index(node),
            nnodes=len(c.nodes),
            world_size=len(c.ranks),
            master_addr=c.master_addr,
            master_port=c.master_port,
            agent_store=c.agent_store,
            record={"ranks": c.ranks, "active_nodes": c.nodes},
        )
