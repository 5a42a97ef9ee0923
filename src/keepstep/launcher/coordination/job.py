"""What the coordinator decides, without any input or output: messages and time in, journal records and commands out.

`handle` turns a message into records and a reply; `advance` makes the records of the next transition that is due. What agents
should be doing follows from the state alone (`command_for`), so nothing is lost when a message was not sent: the next
coordinator sends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from keepstep.launcher import messages as m
from keepstep.launcher.coordination.advising import advice, awaited_spares
from keepstep.launcher.coordination.closing import (
    closing_marks,
    end_records,
    ended_cycle,
    incident_of_cycle,
    never_started,
)
from keepstep.launcher.coordination.highwater import raise_high_water
from keepstep.launcher.coordination.placement import Candidate, Placement, Shape, Waiting, place
from keepstep.launcher.coordination.rules import Outcome, decide, fingerprint, first_failure
from keepstep.launcher.coordination.state import JobShape, JobState, NodeState, Record
from keepstep.records.timeline import Mark

RANK_MARKS_ALL = ("attached",)
"""Marks that count when the last rank reports them."""
NOTES = frozenset(
    {
        *RANK_MARKS_ALL,
        *(
            "restored",
            "first_step",
            "ckpt_block",
            "committed",
            "kept",
            "ckpt_failed",
            "ckpt_skipped",
            "quarantined",
            "image_refused",
            "rollback_announced",
            "tier_reached",
            "upload_failed",
            "drain",
            "advised",
        ),
    }
)
"""Marks that may come from a rank; all others are the coordinator's own."""
SPANS_INLINE = 64
"""Up to so many nodes the rank map travels with the command to start; beyond that agents ask for it when ranks run."""
MAX_STEP_GAP_NS = 60 * 10**9
SHOWN_NODES = 8
FLAPS = 3
FLAP_WINDOW_NS = 600 * 10**9


class Job(JobState):
    """State of one run and the decisions about it; see the module's docstring."""

    def __init__(self, shape: JobShape, read_marker: Callable[[], int | None] = lambda: None) -> None:
        """`read_marker`: the no-progress marker now, None when it cannot be known."""
        super().__init__(shape)
        self._read_marker = read_marker
        self.waiting: str | None = None
        """Why the next cycle has not begun yet."""

    # ---- messages

    def handle(self, node: str, message: m.FromAgent, now_ns: int) -> tuple[list[Record], m.Reply]:
        """Records and reply of a message other than Hello (`join`), KvWait and Operator.

        The records are applied and durable before the reply is sent.
        """
        if isinstance(message, m.StopRequest):
            new = self.stop is None and self.phase != "done"
            record = {"type": "stop_request", "signum": message.signum, "node": message.node}
            return [record] if new else [], self._reply(message)
        fenced = self.fenced(message)
        if fenced is not None:
            return [], self._refusal(message, fenced)
        c = self.cycle
        assert c is not None
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
            case m.KvSet():
                if message.key in c.kv and (message.only_if_absent or c.kv[message.key] == message.value):
                    return [], self._reply(message, {"value": c.kv[message.key]})
                record = {"type": "kv", "cycle": message.cycle, "key": message.key, "value": message.value}
                return [record], self._reply(message, {"value": message.value})
            case m.KvGet():
                return [], self._reply(message, {"found": message.key in c.kv, "value": c.kv.get(message.key)})
            case m.Grant():
                granted = self.phase == "running"
                fields = {"cycle": message.cycle, "checkpoint": message.checkpoint, "step": message.step}
                return [{"type": "grant", **fields}] if granted else [], self._reply(message, {"granted": granted})
            case m.WorkloadRequest():
                return self.workload(message, now_ns), self._reply(message)
            case m.GetCycle():
                return [], self._reply(message, c.rank_map)
            case m.MarkGet():
                return [], self._reply(message, {"mark": self.high_water.get(message.root_id)})
            case m.MarkSet():
                records, refused = raise_high_water(self.high_water, message, now_ns)
                return records, self._refusal(message, refused) if refused else self._reply(message)
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

    def join(self, hello: m.Hello, connected: bool, now_ns: int) -> tuple[list[Record], m.Reply | None]:
        """A node says hello: records, or the reply that refuses it. `connected`: a connection under its name is open.

        A refusal whose result says `retry` is about another launcher that may be dead: its lease will tell.
        """
        if hello.run_id != self.run_id:
            return [], self._refusal(hello, f"this is run {self.run_id!r}, not {hello.run_id!r}")
        known = self.nodes.get(hello.node)
        other = known is not None and (known.pid, known.boot_id) != (hello.pid, hello.boot_id)
        if known is not None and other and (connected or known.boot_id != hello.boot_id):
            why = (
                f"node name {hello.node!r} is taken by host {known.host} pid {known.pid}; "
                "start this one with another --node-name"
            )
            if connected:
                return [], self._refusal(hello, why)
            return [], m.Reply(epoch=self.epoch, id=hello.id, ok=False, error=why, result={"retry": True})
        if self.phase == "done":
            return [], None
        records: list[Record] = []
        c = self.cycle
        running = c is not None and self.phase in ("running", "stopping") and hello.node in c.index
        fenced = hello.fenced and c is not None and hello.cycle == c.number and hello.node not in c.lost
        if running and known is not None and (other or fenced):
            # Another life of that launcher, or its lease ran out: the ranks it had are dead, and nobody else will tell.
            why = "its launcher was started again" if other else "its lease ran out and it stopped its ranks"
            records.append({"type": "node_lost", "node": hello.node, "t_ns": now_ns, "why": why})
        records.append(_node_record(hello))
        if hello.node not in self.excluded:
            if hello.problems:
                records.append({"type": "excluded", "node": hello.node, "reason": "; ".join(hello.problems)})
            elif self._flaps(hello.node, now_ns, len(records) - 1):
                why = f"flapping: lost {FLAPS} times within {FLAP_WINDOW_NS // 10**9} s"
                records.append({"type": "excluded", "node": hello.node, "reason": why})
        return records, None

    def _flaps(self, node: str, now_ns: int, more: int) -> bool:
        return sum(now_ns - t < FLAP_WINDOW_NS for t in self.losses.get(node, [])) + more >= FLAPS

    def lose(self, node: str, now_ns: int, seen_ns: int, why: str) -> list[Record]:
        """A node is gone and none of its ranks can be alive any more."""
        if node not in self.nodes or self.phase == "done":
            return []
        return [{"type": "node_lost", "node": node, "t_ns": now_ns, "seen_ns": seen_ns, "why": why}]

    def exclude(self, node: str, reason: str) -> list[Record]:
        """Take a node out on a person's word, at once."""
        if node not in self.nodes or node in self.excluded:
            return []
        return [{"type": "excluded", "node": node, "reason": reason, "now": True}]

    def note(self, message: m.Note) -> list[Record]:
        """A mark from a rank or agent. Marks every rank must report count when the last one did."""
        c = self.cycle
        assert c is not None
        if message.kind not in RANK_MARKS_ALL:
            if message.kind == "drain" and c.drained:
                return []
            record = self.mark(message.kind, message.t_ns, **message.attrs)
            return [] if msgspec.convert(record["mark"], Mark) in self.marks[-200:] else [record]
        seen = c.reported.get(message.kind, {})
        if message.rank in seen:
            return []
        count = max(1, int(message.attrs.get("ranks", 1)))
        records: list[Record] = [
            {"type": "reported", "kind": message.kind, "rank": message.rank, "t_ns": message.t_ns, "ranks": count},
        ]
        if c.reported_ranks[message.kind] + count == c.world:
            records.append(self.mark(message.kind, max([message.t_ns, *seen.values()])))
        return records

    def started(self, node: str, message: m.Started) -> list[Record]:
        """A node's ranks were forked."""
        c = self.cycle
        assert c is not None
        if node in c.started or node not in c.index:
            return []
        fields = {k: v for k, v in msgspec.to_builtins(message).items() if k not in ("id", "type")}
        records: list[Record] = [{"type": "started", "node": node, **fields}]
        if len(c.started) + 1 == len(c.nodes):
            everyone = [records[0], *c.started.values()]
            records.append(self.mark("assigned", max(r["assigned_ns"] for r in everyone)))
            if not any(r.get("expect_steps") for r in everyone):
                # A script without the trainer library runs from the moment its processes are there.
                records.append(self.mark("attached", max(r["started_ns"] for r in everyone)))
        return records

    def fault(self, node: str, message: m.Fault) -> list[Record]:
        """The first fault of a cycle stops it; later ones of the same cycle are consequences."""
        assert self.cycle is not None
        if self.cycle.fault is not None or self.phase != "running" or node not in self.cycle.index:
            return []
        return [{"type": "fault", "node": node, "fault": msgspec.to_builtins(message) | {"type": "fault"}}]

    def workload(self, message: m.WorkloadRequest, now_ns: int) -> list[Record]:
        """A rank asks for the end of the job, or for its node to be left out; the first of a cycle counts."""
        c = self.cycle
        assert c is not None
        if c.workload is not None or self.phase != "running" or message.what not in ("stop", "exclude"):
            return []
        node = message.node if message.node in c.index else c.node_of(message.rank)
        what = {"what": message.what, "reason": message.reason, "rank": message.rank, "node": node, "t_ns": now_ns}
        records: list[Record] = [{"type": "workload", **what}]
        if message.what == "exclude":
            why = f"rank {message.rank} asked for it: {message.reason}"
            records.append({"type": "excluded", "node": node, "reason": why})
        return records

    def beat(self, node: str, message: m.Beat) -> None:
        """A progress sample; `step_mark` makes a record of what all of them say."""
        c = self.cycle
        if c is not None and message.completed is not None and message.cycle == c.number and node in c.index:
            c.beats.put(node, message.completed, message.at_ns)

    def step_mark(self, now_ns: int) -> list[Record]:
        """A `step` mark when the slowest node has advanced since the last one.

        They thin out as a cycle grows older, to one in MAX_STEP_GAP_NS: the partition takes its exact points from checkpoints
        and ends, and a journal of weeks stays readable.
        """
        c = self.cycle
        now = c.beats.slowest() if c is not None and self.phase == "running" else None
        if c is None or now is None or (c.last_step is not None and now[0] <= c.last_step):
            return []
        if c.last_step is not None and now_ns - c.last_step_ns < min(MAX_STEP_GAP_NS, (now_ns - c.began_ns) // 100):
            return []
        return [self.mark("step", now[1], step=now[0])]

    def stopped(self, node: str, message: m.Stopped) -> list[Record]:
        """No process of the cycle is left on `node`."""
        c = self.cycle
        assert c is not None
        if node in c.stopped or node not in c.index:
            return []
        records: list[Record] = [
            {"type": "stopped", "node": node, "stopped": msgspec.to_builtins(message) | {"type": "stopped"}}
        ]
        if message.problems and node not in self.excluded:
            records.append({"type": "excluded", "node": node, "reason": "; ".join(message.problems)})
        if c.probe and "gang" in message.notes:
            records += self.gang(message.notes["gang"])
        return records

    def gang(self, result: dict[str, Any]) -> list[Record]:
        """A gang check has ended: slow nodes are left out, as long as enough others are there."""
        assert self.cycle is not None
        slow = [n for n in result.get("suspects", []) if n in self.cycle.index and n not in self.excluded]
        records: list[Record] = [{"type": "gang", "cycle": self.cycle.number, "result": result}]
        if self.usable() - len(slow) < self.shape.min_nodes:
            return records
        seen, wanted = result.get("bandwidth_gb_per_s"), result.get("baseline_gb_per_s")
        why = f"gang check: with it {seen} GB/s, the baseline is {wanted}"
        return records + [{"type": "excluded", "node": n, "reason": why} for n in slow]

    # ---- decisions

    def advance(self, now_ns: int, connected: Callable[[str], bool], last_call: bool = True) -> list[Record]:
        """Records of the next transition that is due, or nothing. Call again after applying them.

        `connected`: whether a node's connection is open. `last_call`: the first cycle waits no longer for spares.
        """
        if self.phase == "done":
            return []
        if self.phase == "forming":
            if self.stop is not None or self.attribution_stop is not None:
                return end_records(self, now_ns, decide(never_started(self)), None)
            return self._form(now_ns, connected, last_call)
        assert self.cycle is not None
        return self._decide(now_ns) if self.cycle.over else []

    def give_up_joining(self, now_ns: int, limit_s: float) -> list[Record]:
        """The nodes did not come together in time: the job ends."""
        need = f"{self.shape.min_nodes} to {self.shape.nnodes}" if self.shape.min_nodes < self.shape.nnodes else ""
        out = "".join(f"; {n} left out: {why}" for n, why in sorted(self.excluded.items()))
        message = (
            f"{len(self.nodes)} of {need or self.shape.nnodes} nodes within {limit_s:g} s "
            f"({', '.join(sorted(self.nodes)) or 'none'}){out}; {self.waiting or ''}; "
            "start the others with the same --rdzv-id, or raise --rdzv-conf join_timeout=S"
        )
        outcome = Outcome(
            rule="join_timeout", action="end", verdict="failed", exit_code=1, cause="join_timeout", message=message
        )
        return end_records(self, now_ns, outcome, None)

    def usable(self) -> int:
        """Nodes that are there and not excluded."""
        return len(self.nodes) - sum(n in self.nodes for n in self.excluded)

    def _form(self, now_ns: int, connected: Callable[[str], bool], last_call: bool) -> list[Record]:
        shape = self.shape
        if self.usable() < shape.min_nodes:
            self.waiting = f"{self.usable()} usable nodes of {shape.min_nodes}"
            return []
        known = [n for n in self.nodes.values() if n.node not in self.excluded]
        placed = place(
            Shape(
                nnodes=shape.nnodes,
                min_nodes=shape.min_nodes,
                spares=awaited_spares(self),
                replica_size=shape.replica_size,
            ),
            [self._candidate(n) for n in known],
            [(n, k) for n, _, k in self.layout] or None,
            {n for n, _, _ in self.layout if n not in self.nodes or n in self.excluded},
            places={n: self.levels_of(n) for n in self.seen_levels},
            wait_for_nodes=not last_call,
            wait_for_spares=not last_call,
        )
        if isinstance(placed, Waiting):
            self.waiting = placed.reason
            return []
        away = [n.name for n in placed.nodes if not connected(n.name)]
        if away:
            # No other in its place yet: it may only be on its way back, as all are when the coordinator is a new one.
            more = f" and {len(away) - SHOWN_NODES} more" if len(away) > SHOWN_NODES else ""
            self.waiting = f"not connected: {', '.join(away[:SHOWN_NODES])}{more}"
            return []
        self.waiting = None
        return self._start_cycle(placed, now_ns)

    def _candidate(self, n: NodeState) -> Candidate:
        return Candidate(name=n.node, host=n.host, nproc=n.nproc, levels=self.levels_of(n.node), joined=n.joined)

    def levels_of(self, node: str) -> list[str]:
        """Place of a node, outermost level first; [] when nothing is known of it."""
        if self._by_node_rank():
            # A level of its own for each: the order of the groups is then the order that was asked for.
            return [f"node-rank-{self.seen_ranks.get(node) or 0:06d}"]
        return self.shape.topology.get(node) or self.seen_levels.get(node, [])

    def _by_node_rank(self) -> bool:
        """Whether all nodes were given a --node-rank and there is no topology that would say better."""
        topology = self.shape.topology or any(self.seen_levels.values())
        return not topology and all(r is not None for r in self.seen_ranks.values())

    def _start_cycle(self, placed: Placement, now_ns: int) -> list[Record]:
        head = self.nodes[placed.nodes[0].name]
        number = self.last_cycle + 1
        records: list[Record] = []
        if self.layout and placed.path != "respawn":
            records.append(self.mark("replaced", now_ns))
        mark = self.mark("cycle_started", now_ns)
        mark["mark"]["cycle"] = number
        cycle = {
            "type": "cycle",
            "cycle": number,
            "layout": [[n.name, n.host, n.nproc] for n in placed.nodes],
            "master_addr": self.shape.master_addr or head.next_addr,
            "master_port": (self.shape.master_port if self.last_cycle < 0 else None) or head.next_port,
            "agent_store": head.hosts_store,
            "spares": [n.name for n in placed.spares],
            "path": self._path(placed),
            "probe": self._wants_probe(placed),
            "substituted": [list(pair) for pair in placed.substitutes],
            "scatter": None if self._by_node_rank() else placed.scatter,
        }
        return [*records, cycle, mark, *advice(self, number, len(placed.nodes), now_ns)]

    def _path(self, placed: Placement) -> str:
        """How this cycle came about; a cycle that follows its own gang check came about as that one did."""
        if self.cycle is not None and self.cycle.probe and placed.path == "respawn":
            return self.cycle.path
        return placed.path

    def _wants_probe(self, placed: Placement) -> bool:
        """Whether this cycle tests the nodes' bandwidth first."""
        wanted = self.shape.gang_check
        if self.cycle is not None and self.cycle.probe and self.cycle.nodes == [n.name for n in placed.nodes]:
            return False
        if not self.trained:
            return wanted in ("first", "always")
        return wanted in ("swap", "always") and placed.path != "respawn"

    def _decide(self, now_ns: int) -> list[Record]:
        assert self.cycle is not None
        ended = ended_cycle(self, self._marker())
        outcome = decide(ended)
        records = closing_marks(self, ended, outcome)
        if outcome.action == "end":
            return records + end_records(self, now_ns, outcome, ended, incident_of_cycle(self, records))
        records.append(self.mark("decided", now_ns, action="restart", counted=outcome.counted, rule=outcome.rule))
        records.append(self.mark("cycle_ended", now_ns, reason=outcome.cause))
        records.append(
            {
                "type": "decision",
                "cycle": self.cycle.number,
                "outcome": msgspec.to_builtins(outcome),
                "fingerprint": None if ended.probe else fingerprint(first_failure(ended), ended.fault_kind),
                "step": ended.completed_step,
                "progress": msgspec.to_builtins(ended.progress),
            }
        )
        return records

    def _marker(self) -> int | None:
        if self.shape.marker_file:
            return self._read_marker()
        return self.safe_step if self.committed_known else None

    # ---- what nodes are told

    def role_of(self, node: str) -> str:
        """What `node` is to the job: excluded, waiting (nothing has begun), active (ranks in the newest cycle) or spare."""
        if node in self.excluded:
            return "excluded"
        if self.cycle is None:
            return "waiting"
        return "active" if node in self.cycle.index else "spare"

    def command_for(self, node: str) -> m.FromCoordinator | None:
        """What `node` should be told in this state; agents ignore what they already do."""
        if self.phase == "done":
            return self._end()
        c = self.cycle
        if c is None or node not in c.index or node in c.stopped or node in c.lost or self.phase == "forming":
            return None
        if self.phase == "stopping":
            return m.StopCycle(epoch=self.epoch, cycle=c.number, reason=self._why_stopping())
        if self.stop is not None:
            return m.AskStop(epoch=self.epoch, cycle=c.number, signum=self.stop["signum"])
        if node in c.started:
            return None
        index = c.index[node]
        return m.StartCycle(
            epoch=self.epoch,
            cycle=c.number,
            attempt=self.attempt,
            first_rank=c.first_ranks[index],
            node_index=index,
            nnodes=len(c.nodes),
            world_size=c.world,
            master_addr=c.master_addr,
            master_port=c.master_port,
            agent_store=c.agent_store,
            probe=c.probe,
            history=c.history,
            node_spans=[list(x) for x in c.layout] if len(c.layout) <= SPANS_INLINE else [],
        )

    def _why_stopping(self) -> str:
        c = self.cycle
        assert c is not None
        if c.fault is not None:
            return c.fault.kind
        if self.attribution_stop is not None:
            return self.attribution_stop
        if c.workload is not None:
            return f"{c.workload['what']} asked for by rank {c.workload['rank']}"
        return "node_lost" if c.lost else "node_excluded"

    def _end(self) -> m.End:
        v = self.verdict
        assert v is not None
        return m.End(
            epoch=self.epoch,
            exit_code=v.exit_code,
            outcome=v.outcome,
            cause=v.cause,
            message=v.message,
            traceback=v.traceback,
            first_failing_rank=v.first_failing_rank,
        )


def _node_record(hello: m.Hello) -> Record:
    return {
        "type": "node",
        "node": hello.node,
        "host": hello.host,
        "nproc": hello.nproc,
        "next_addr": hello.next_addr,
        "next_port": hello.next_port,
        "pid": hello.pid,
        "hosts_store": hello.hosts_store,
        "levels": hello.levels,
        "node_rank": hello.node_rank,
        "boot_id": hello.boot_id,
    }
