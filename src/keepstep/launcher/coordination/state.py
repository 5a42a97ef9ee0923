"""The coordinator's state of a run as a function of its journal: every record type, and what it changes.

`JobState.apply` is used live and in replay alike, so that a coordinator that died goes on from its journal. The decisions that
make records are in `job`. All of it stays cheap at thousands of nodes: nothing here walks over all ranks for one message.
"""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from typing import Any, Literal

import msgspec

from keepstep.goodput.history import HistoryFold
from keepstep.goodput.settings import Source
from keepstep.launcher import messages as m
from keepstep.launcher.coordination.incidents import incident_id, is_incident
from keepstep.launcher.coordination.noprogress import Progress
from keepstep.records.codec import to_json
from keepstep.records.cycle import DURABLE, FailureHistory, RankPlace, VerdictFile
from keepstep.records.exits import exit_status_name
from keepstep.records.timeline import Mark

Record = dict[str, Any]
CONCERN_NO_OTHER = frozenset({"mark", "kv", "grant", "reported", "lease", "node", "started", "stopped", "high_water"})
"""Records that change nothing in what other nodes than their own should do."""
Phase = Literal["forming", "running", "stopping", "done"]


class NodeState(msgspec.Struct, kw_only=True):
    """A node that joined. Known from the journal; whether it is connected is the coordinator's business."""

    node: str
    host: str
    nproc: int
    next_addr: str
    next_port: int
    pid: int
    hosts_store: bool = False
    levels: list[str] = []
    node_rank: int | None = None
    boot_id: str = ""
    joined: int = 0
    """Place in the order of joining."""


class JobShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the job is made of; fields as in RunConfig."""

    run_id: str
    nnodes: int = 1
    min_nodes: int = 1
    spares: int = 0
    replica_size: int = 1
    max_restarts: int = 10
    master_addr: str | None = None
    master_port: int | None = None
    max_no_progress_cycles: int = 3
    min_progress_iterations: int = 1
    stop_on_attribution: bool = False
    no_restart_exit_code: int = 93
    gang_check: str = "off"
    marker_file: bool = False
    """A progress marker is configured: then nothing else is taken for it."""
    topology: dict[str, list[str]] = {}
    advice: Source | None = None
    """What settings that follow the failure rate start from; None: they are as they were given."""

    @property
    def movable(self) -> bool:
        """Whether ranks of a lost node may be given to another while that node's own might still run."""
        return self.nnodes > 1 or self.spares > 0


class Beats:
    """How far the slowest node is, kept up to date message by message."""

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._step: dict[str, int] = {}
        self._at: Counter[int] = Counter()
        self._reached_ns: dict[int, int] = {}

    def put(self, node: str, step: int, at_ns: int) -> None:
        """`node` completed `step`, at `at_ns` (UTC)."""
        before = self._step.get(node)
        if before is not None:
            self._at[before] -= 1
            if not self._at[before]:
                del self._at[before]
                self._reached_ns.pop(before, None)
        self._step[node] = step
        self._at[step] += 1
        self._reached_ns[step] = max(at_ns, self._reached_ns.get(step, 0))

    def slowest(self) -> tuple[int, int] | None:
        """(step, UTC ns) of the slowest node once all have reported."""
        if len(self._step) < self._nodes:
            return None
        step = min(self._at)
        return step, self._reached_ns[step]


class CycleState:
    """The current cycle. `layout`: (node, host, ranks) in rank order."""

    def __init__(self, record: Record) -> None:
        self.number: int = record["cycle"]
        self.layout: list[tuple[str, str, int]] = [(n, h, k) for n, h, k in record["layout"]]
        self.nodes = [n for n, _, _ in self.layout]
        self.index = {n: i for i, n in enumerate(self.nodes)}
        self.first_ranks: list[int] = []
        self.world = 0
        for _, _, count in self.layout:
            self.first_ranks.append(self.world)
            self.world += count
        self.master_addr: str = record["master_addr"]
        self.master_port: int = record["master_port"]
        self.agent_store: bool = record["agent_store"]
        self.spares: list[str] = record.get("spares", [])
        self.probe: bool = record.get("probe", False)
        """Tests the nodes' bandwidth instead of training."""
        self.path: str = record.get("path", "respawn")
        self.substituted: list[list[str]] = record.get("substituted", [])
        self.scatter: dict[str, Any] | None = record.get("scatter")
        self.history: FailureHistory | None = None
        """Of the run up to this cycle."""
        self.started: dict[str, Record] = {}
        self.stopped: dict[str, m.Stopped] = {}
        self.lost: list[str] = []
        self.lost_ns = 0
        self.lost_seen_ns = 0
        """When the first lost node was last heard of."""
        self.fault: m.Fault | None = None
        self.fault_node: str | None = None
        self.workload: Record | None = None
        self.reported: dict[str, dict[int, int]] = {}
        """Kind of mark -> rank that reported it -> UTC ns."""
        self.reported_ranks: Counter[str] = Counter()
        """How many ranks that was for: a node reports for all of its own."""
        self.kv: dict[str, Any] = {}
        self.beats = Beats(len(self.nodes))
        self.last_step: int | None = None
        self.last_step_ns = 0
        self.began_ns = 0
        self.first_step_count: int | None = None
        self.restored_step: int | None = None
        self.restored_from = "none"
        self.restored_checkpoint: str | None = None
        self.drained = False
        self.rolled_back = False
        self.marked: set[str] = set()
        self.pids: dict[int, int] = {}
        self.exits: dict[int, str] = {}

    @functools.cached_property
    def rank_map(self) -> msgspec.Raw:
        """Who runs which rank, as JSON: every node of a large job asks for it."""
        return msgspec.Raw(to_json({"node_spans": self.layout, "spare_nodes": self.spares, "scatter": self.scatter}))

    def node_of(self, rank: int | None) -> str | None:
        """Node that a rank runs on, None for no such rank."""
        if rank is None or not 0 <= rank < self.world:
            return None
        return self.nodes[bisect.bisect_right(self.first_ranks, rank) - 1]

    def places(self) -> list[RankPlace]:
        """All ranks with node, host, pid and exit, for the cycle record."""
        return [
            RankPlace(
                rank=first + local,
                local_rank=local,
                node=node,
                host=host,
                pid=self.pids.get(first + local),
                exit=self.exits.get(first + local),
            )
            for (node, host, count), first in zip(self.layout, self.first_ranks, strict=True)
            for local in range(count)
        ]

    @property
    def over(self) -> bool:
        """Whether no node has a process of this cycle any more."""
        gone = len(self.stopped) + sum(n not in self.stopped for n in self.lost)
        return gone >= len(self.nodes)


class JobState:
    """State of one run; changed by `apply` only."""

    def __init__(self, shape: JobShape) -> None:
        self.shape = shape
        self.attempt = -1
        self.epoch = 0
        self.version = 0
        """Grows with every record that may change what other nodes than its own should do."""
        self.phase: Phase = "forming"
        self.last_cycle = -1
        self.cycle: CycleState | None = None
        self.layout: list[tuple[str, str, int]] = []
        """Of the newest cycle of this attempt, also when the next one is forming."""
        self.nodes: dict[str, NodeState] = {}
        self.seen_levels: dict[str, list[str]] = {}
        """Places of all nodes that ever joined: a spare is chosen by the place of the node that is gone."""
        self.seen_ranks: dict[str, int | None] = {}
        """--node-rank of all nodes that ever joined."""
        self.excluded: dict[str, str] = {}
        """Nodes that are left out of later cycles, and why."""
        self.losses: dict[str, list[int]] = {}
        self.away: set[str] = set()
        """Nodes lost in this attempt that have not come back."""
        self.marks: list[Mark] = []
        self.incidents: list[tuple[str, Mark]] = []
        """Id and mark of every incident of the run."""
        self.stop: Record | None = None
        self.attribution_stop: str | None = None
        """Summary of the verdict that ends the job."""
        self.attributed: dict[str, Mark] = {}
        """Marks of verdicts, by incident."""
        self.verdict: VerdictFile | None = None
        self.counted = 0
        self.port_retries = 0
        self.last_fingerprint: tuple[str, int | None] | None = None
        self.last_committed: int | None = None
        self.safe_step: int | None = None
        """Newest step that was committed, or that a cycle went on from, also when that was in memory only: the job's progress."""
        self.committed_known = False
        """Whether the script's checkpoints have told how far it is."""
        self.high_water: dict[str, m.HighWater] = {}
        """Newest committed checkpoint of every root, over all attempts."""
        self.progress = Progress()
        self.trained = False
        """Whether this attempt has had a cycle that ran the script."""
        self.longest_lease_s = 0.0
        """Longest lease that any coordinator of this job may have given."""
        self.failures = HistoryFold()
        """Interruptions of the whole run and its node time."""
        self.advised: dict[str, Any] = {}
        """Settings that follow the failure rate, as they are now."""
        self._joins = 0

    @property
    def run_id(self) -> str:
        return self.shape.run_id

    def mark(self, kind: str, t_ns: int, /, **attrs: Any) -> Record:
        """A journal record holding a mark of the current cycle and attempt."""
        mark = {"t_ns": t_ns, "kind": kind, "cycle": max(self.last_cycle, 0), "attempt": self.attempt, "attrs": attrs}
        return {"type": "mark", "mark": mark}

    def apply(self, record: Record) -> None:
        """Change the state by one journal record."""
        kind = record["type"]
        if kind not in CONCERN_NO_OTHER:
            self.version += 1
        getattr(self, f"_apply_{kind}")(record)

    def _apply_open(self, r: Record) -> None:
        self.epoch = r["epoch"]
        if r["attempt"] != self.attempt:
            # A new life of the launchers: whatever ran before is dead with its agents.
            self.failures.take_attempt()
            self.attempt = r["attempt"]
            self.phase, self.cycle, self.nodes, self.layout = "forming", None, {}, []
            self.excluded, self.losses, self.away, self.trained = {}, {}, set(), False
            self.stop, self.verdict, self.counted, self.port_retries = None, None, 0, 0
            self.attribution_stop = None
            self.last_fingerprint = None
            self.progress = Progress(last=r.get("marker"))

    def _apply_mark(self, r: Record) -> None:
        mark = msgspec.convert(r["mark"], Mark)
        self.marks.append(mark)
        if is_incident(mark):
            self.incidents.append((incident_id(len(self.incidents) + 1), mark))
        if mark.kind == "attributed":
            self.attributed[mark.attrs["incident"]] = mark
        self.failures.take_mark(mark.kind, mark.t_ns, mark.attrs)
        if mark.kind == "advised":
            # Some come from ranks, whose word is not checked.
            self.advised[str(mark.attrs.get("what"))] = mark.attrs.get("value")
        if mark.kind == "committed":
            self.last_committed, self.committed_known = mark.attrs.get("step"), True
            self.safe_step = self.last_committed
        c = self.cycle
        if c is None or mark.cycle != c.number:
            return
        c.marked.add(mark.kind)
        if mark.kind == "step":
            c.last_step, c.last_step_ns = mark.attrs.get("step"), mark.t_ns
        elif mark.kind == "cycle_started":
            c.began_ns = mark.t_ns
        elif mark.kind == "restored":
            self._go_on_from(mark.attrs.get("step"), mark.attrs.get("source", "none"))
            c.restored_step = mark.attrs.get("step")
            c.restored_from = mark.attrs.get("source", "none")
            c.restored_checkpoint = mark.attrs.get("checkpoint")
        elif mark.kind == "first_step":
            c.first_step_count = mark.attrs.get("step")
        elif mark.kind == "drain":
            c.drained = True
        elif mark.kind in ("quarantined", "rollback_announced"):
            c.rolled_back = True

    def _go_on_from(self, step: int | None, source: str) -> None:
        """What was committed beyond the step that a cycle went on from has been refused and is no part of this history any more."""
        if source == "none":
            return
        self.safe_step, self.committed_known = step, True
        if source in DURABLE:
            self.last_committed = step
        elif step is not None and self.last_committed is not None and self.last_committed > step:
            # Of those before it nobody said which one still counts.
            self.last_committed = None

    def _apply_high_water(self, r: Record) -> None:
        self.high_water[r["root_id"]] = m.HighWater(
            step=r["step"], cycle=r["cycle"], digest=r["digest"], detail=r.get("detail", "")
        )

    def _apply_node(self, r: Record) -> None:
        known = self.nodes.get(r["node"])
        self._joins += known is None
        fields = {k: v for k, v in r.items() if k not in ("type", "seq", "t_ns")}
        node = msgspec.convert({"joined": known.joined if known is not None else self._joins, **fields}, NodeState)
        self.nodes[node.node] = node
        self.seen_levels[node.node] = node.levels
        self.seen_ranks[node.node] = node.node_rank
        self.away.discard(node.node)

    def _apply_cycle(self, r: Record) -> None:
        self.cycle = CycleState(r)
        self.layout = self.cycle.layout
        self.last_cycle = r["cycle"]
        self.cycle.history = self.failures.history()
        self.failures.take_cycle(len(self.cycle.nodes), probe=self.cycle.probe)
        self.trained = self.trained or not self.cycle.probe
        self.phase = "running"

    def _apply_started(self, r: Record) -> None:
        if self.cycle is not None:
            self.cycle.started[r["node"]] = r
            self.cycle.pids.update((p["rank"], p["pid"]) for p in r["ranks"])

    def _apply_fault(self, r: Record) -> None:
        if self.cycle is not None and self.cycle.fault is None:
            self.cycle.fault = msgspec.convert(r["fault"], m.Fault)
            self.cycle.fault_node = r["node"]
            self.phase = "stopping"

    def _apply_workload(self, r: Record) -> None:
        """A rank asked for the end of the job, or for its node to be left out."""
        if self.cycle is not None and self.cycle.workload is None:
            self.cycle.workload = r
            if self.phase == "running":
                self.phase = "stopping"

    def _apply_attribution_stop(self, r: Record) -> None:
        """A verdict says that another try would fail alike."""
        self.attribution_stop = r["summary"]
        if self.phase == "running":
            self.phase = "stopping"

    def _apply_excluded(self, r: Record) -> None:
        self.excluded[r["node"]] = r["reason"]
        if self.cycle is not None and self.phase == "running" and r["node"] in self.cycle.index and r.get("now"):
            self.phase = "stopping"

    def _apply_node_lost(self, r: Record) -> None:
        node = r["node"]
        self.nodes.pop(node, None)
        self.away.add(node)
        self.losses.setdefault(node, []).append(r["t_ns"])
        if self.cycle is not None and node in self.cycle.index and self.phase in ("running", "stopping"):
            if node not in self.cycle.lost:
                self.cycle.lost.append(node)
            if not self.cycle.lost_ns:
                self.cycle.lost_ns = r["t_ns"]
                self.cycle.lost_seen_ns = min(r["t_ns"], r.get("seen_ns") or r["t_ns"])
            self.phase = "stopping"

    def _apply_stopped(self, r: Record) -> None:
        if self.cycle is not None:
            stopped = msgspec.convert(r["stopped"], m.Stopped)
            self.cycle.stopped[r["node"]] = stopped
            if r["node"] in self.nodes:
                self.nodes[r["node"]].next_port = stopped.next_port
            self.cycle.exits.update((int(k), exit_status_name(v)) for k, v in stopped.statuses.items())

    def _apply_reported(self, r: Record) -> None:
        if self.cycle is not None:
            self.cycle.reported.setdefault(r["kind"], {})[r["rank"]] = r["t_ns"]
            self.cycle.reported_ranks[r["kind"]] += r.get("ranks", 1)

    def _apply_kv(self, r: Record) -> None:
        if self.cycle is not None and r["cycle"] == self.cycle.number:
            self.cycle.kv[r["key"]] = r["value"]

    def _apply_grant(self, r: Record) -> None:
        """Nothing to remember: the record itself is what must exist before a marker may."""

    def _apply_lease(self, r: Record) -> None:
        self.longest_lease_s = max(self.longest_lease_s, r["longest_s"])

    def _apply_gang(self, r: Record) -> None:
        """Result of a gang check, for the record only: what follows from it are `excluded` records."""

    def _apply_injection(self, r: Record) -> None:
        """For the record only."""

    def _apply_stop_request(self, r: Record) -> None:
        if self.stop is None:
            self.stop = r

    def _apply_decision(self, r: Record) -> None:
        outcome = r["outcome"]
        self.counted += bool(outcome["counted"])
        self.port_retries = self.port_retries + 1 if outcome["rule"] == "address_in_use" else 0
        self.last_fingerprint = (r["fingerprint"], r["step"]) if r["fingerprint"] else None
        if "progress" in r:
            self.progress = msgspec.convert(r["progress"], Progress)
        self.phase = "forming"

    def _apply_verdict(self, r: Record) -> None:
        self.verdict = msgspec.convert(r["verdict"], VerdictFile)
        self.phase = "done"
