"""Messages between agents and the coordinator, as tagged JSON.

From an agent every message has an `id` (unique in that agent's life) and is repeated after a reconnect until it is answered by
a Reply with the same id; the coordinator journals what matters before it replies, and every message may arrive twice with no
second effect. From the coordinator every message carries its epoch; agents obey only the highest epoch they have seen.
"""

from __future__ import annotations

from typing import Any

import msgspec

from keepstep.records.cycle import FailureHistory

MAX_MESSAGE_BYTES = 1 << 20


class AgentMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of what agents send. `cycle` fences: a message of another cycle than the current one is refused or ignored."""

    id: int
    cycle: int = -1


class Hello(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="hello"):
    """First message of a connection: who this agent is and what it does right now."""

    run_id: str
    node: str
    host: str
    pid: int
    nproc: int
    next_port: int
    next_addr: str
    """Address under which other nodes reach this one; "" means: as the coordinator sees it."""
    hosts_store: bool = False
    epoch: int = 0
    proof: str = ""
    """HMAC over the server's challenge by a key from the job token (launcher/trust.py); "" over a Unix socket."""
    levels: list[str] = []
    node_rank: int | None = None
    boot_id: str = ""
    fenced: bool = False
    """This launcher's ranks were stopped because its lease ran out; it comes back with none running."""
    problems: list[str] = []
    """Failed checks of this node (launcher/health/nodecheck.py): it may not join while there are any."""


class Started(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="started"):
    """All local ranks of the cycle were forked. `ranks`: [{rank, local_rank, pid}]; times in UTC ns."""

    ranks: list[dict[str, int]]
    assigned_ns: int
    started_ns: int
    path: str = "fork"
    expect_steps: bool = False
    """Whether the script is expected to attach through the trainer library."""
    notes: dict[str, Any] = {}
    """For the cycle record: GPU memory before this start."""


class Fault(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="fault"):
    """Something went wrong with a local rank. `kind`: exit, hang, spawn."""

    kind: str
    rank: int
    occurred_ns: int
    detected_ns: int
    detail: str = ""


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one rank failed: its status, and the exception when it left one."""

    rank: int
    status: int
    time_ns: int
    error_type: str | None = None
    message: str | None = None
    frame: str | None = None
    traceback: str | None = None
    cascade: bool = False
    injected: bool = False
    stopped_by_us: bool = False


class Stopped(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="stopped"):
    """No process of the cycle is left on this node. Sent also when all local ranks ended by themselves with status 0."""

    statuses: dict[str, int]
    failures: list[Failure]
    completed: dict[str, int]
    completed_ns: int
    first_step: int | None = None
    """The count of completed steps after the first step of the cycle here, and when (UTC ns)."""
    first_step_ns: int = 0
    captured_ns: int
    stopped_ns: int
    next_port: int
    culprits: list[int] = []
    leftovers: int = 0
    problems: list[str] = []
    """Failed checks of this node: it may not take part in the next cycle."""
    notes: dict[str, Any] = {}
    """For the cycle record: memory reclaimed, output lost, evidence that could not be had."""


class Note(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="note"):
    """A mark for the timeline from a rank or the agent. `rank` is -1 for the agent itself."""

    kind: str
    rank: int
    t_ns: int
    attrs: dict[str, Any] = {}


class KvSet(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="kv_set"):
    key: str
    value: Any
    only_if_absent: bool = False


class KvGet(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="kv_get"):
    key: str


class KvWait(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="kv_wait"):
    keys: list[str]
    timeout_s: float


class Grant(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="grant"):
    """May this checkpoint be published? Granted only for the current cycle while it is not being stopped."""

    checkpoint: str
    step: int


class WorkloadRequest(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="workload_request"):
    """A rank asks for something that ends the cycle. `what`: "stop" (the whole job, no restart) or "exclude" (its node)."""

    what: str
    reason: str
    rank: int
    node: str


class Operator(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="operator"):
    """A person's command through the coordinator. `what`: "status", "inject" (with `spec`), "exclude" (with `node`) or "stop"."""

    what: str
    run_id: str
    proof: str = ""
    spec: str = ""
    node: str = ""
    reason: str = ""


class StopRequest(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="stop_request"):
    """The launcher on `node` got a signal: the whole job is asked to stop."""

    signum: int
    node: str


class Beat(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="beat"):
    """Renews this node's lease, and is a progress sample: steps completed by all local ranks and when (UTC ns).

    Answered with {lease_s, now_ns} (the coordinator's clock, UTC). `rtt_s`: how long the last one took to be answered, to which
    the lease adapts.
    """

    completed: int | None = None
    at_ns: int = 0
    rtt_s: float = 0.0


class GetCycle(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="get_cycle"):
    """Ask for the rank map of the current cycle: {node_spans, spare_nodes, scatter}."""


class HeldImage(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """One file of a checkpoint in a node's memory. `facts` is for ranks; `copy`: it was written on another node."""

    checkpoint: str
    file: str
    size_bytes: int
    facts: msgspec.Raw
    copy: bool = False


class KeepNote(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="keep_note"):
    """What this node's memory holds of checkpoints changed. Not journaled: after a reconnect the agent tells all of it again."""

    whole: bool = False
    """What was known of this node before is out of date."""
    address: str = ""
    """Where its images can be had: unix:PATH, or :PORT at the address under which others reach it."""
    added: list[HeldImage] = []
    removed: list[tuple[str, str]] = []
    """(checkpoint, file) each."""


class GetKept(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="get_kept"):
    """What do the job's nodes hold in memory? Answered with {sets}, the newest checkpoints; with `checkpoint`: {files, more}.

    A page of files begins after the name `after`. See coordination/holdings.py for the fields. Here and in the answer to Locate
    `untold` is the number of nodes of which the coordinator does not know yet what they hold.
    """

    checkpoint: str = ""
    after: str = ""


class Locate(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="locate"):
    """Who holds this image? {size_bytes, facts, holders: [[node, address], ...]}, some of them, in random order; or none."""

    checkpoint: str
    file: str


class HighWater(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The newest committed checkpoint of a root: `digest` is its manifest's, `detail` is for the ranks alone."""

    step: int
    cycle: int
    digest: str
    detail: str = ""


class MarkGet(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="mark_get"):
    """The high-water mark of a checkpoint root: {mark: HighWater or null}."""

    root_id: str


class MarkSet(AgentMessage, frozen=True, kw_only=True, omit_defaults=True, tag="mark_set"):
    """Raise it; journaled before the answer. A lower step is refused unless `rebase` says why it may go back."""

    root_id: str
    mark: HighWater
    rebase: str = ""


FromAgent = (
    Hello | Started | Fault | Stopped | Note | KvSet | KvGet | KvWait | Grant
    | StopRequest | WorkloadRequest | Operator | Beat | GetCycle
    | KeepNote | GetKept | Locate | MarkGet | MarkSet
)  # fmt: skip


class CoordinatorMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of what the coordinator sends."""

    epoch: int


class Challenge(CoordinatorMessage, frozen=True, kw_only=True, omit_defaults=True, tag="challenge"):
    """First message of a connection over a network: the client proves that it has the job token by an HMAC over `nonce`."""

    nonce: str


class Reply(CoordinatorMessage, frozen=True, kw_only=True, omit_defaults=True, tag="reply"):
    id: int
    ok: bool = True
    error: str | None = None
    result: Any = None


class Welcome(CoordinatorMessage, frozen=True, kw_only=True, omit_defaults=True, tag="welcome"):
    """Answer to Hello. The anchor maps CLOCK_BOOTTIME of the coordinator's host to UTC."""

    attempt: int
    boot_id: str
    anchor_utc_ns: int
    anchor_boot_ns: int
    lease_s: float = 5.0
    log_addr: str = ""
    """host:port of the log funnel, "" when this launcher writes the job's logs itself."""
    role: str = "active"
    """"waiting" (nothing has begun), "active" (has ranks in the newest cycle), "spare" or "excluded"."""
    reason: str = ""
    """Why this node is excluded."""
    folder_id: str = ""
    """What the coordinator's run folder is called inside: a launcher that reads the same in its own shares that folder."""


class StartCycle(CoordinatorMessage, frozen=True, kw_only=True, omit_defaults=True, tag="start_cycle"):
    """Start these ranks. `first_rank`: global rank of local rank 0 on this node."""

    cycle: int
    attempt: int
    first_rank: int
    node_index: int
    nnodes: int
    world_size: int
    master_addr: str
    master_port: int
    agent_store: bool
    probe: bool = False
    """Run the gang check (launcher/health/gangcheck.py) instead of the script."""
    history: FailureHistory | None = None
    """How often the run was interrupted before this cycle."""
    node_spans: list[list[Any]] = []
    """[[node, host, ranks], ...] in rank order, when the job is small; else the agent asks with GetCycle."""


class StopCycle(CoordinatorMessage, frozen=True, kw_only=True, omit_defaults=True, tag="stop_cycle"):
    """Stop the ranks of this cycle (a fault elsewhere, or the job ends)."""

    cycle: int
    reason: str


class DoInjection(CoordinatorMessage, frozen=True, kw_only=True, omit_defaults=True, tag="do_injection"):
    """Carry out an injection (keepstep.records.inject) that a person asked for."""

    cycle: int
    spec: str


class Tell(CoordinatorMessage, frozen=True, kw_only=True, omit_defaults=True, tag="tell"):
    """Say this to the user: the verdict on an incident."""

    incident: str
    text: str


class AskStop(CoordinatorMessage, frozen=True, kw_only=True, omit_defaults=True, tag="ask_stop"):
    """Ask the ranks of this cycle to stop at their next shared decision."""

    cycle: int
    signum: int


class CopyImages(CoordinatorMessage, frozen=True, kw_only=True, omit_defaults=True, tag="copy_images"):
    """Hold copies of these images of another node, all of one checkpoint; a later one of these replaces what was not begun."""

    node: str
    address: str
    images: list[HeldImage]


class End(CoordinatorMessage, frozen=True, kw_only=True, omit_defaults=True, tag="end"):
    """The job is over; the verdict file is durable. Exit with this code."""

    exit_code: int
    outcome: str
    cause: str
    message: str | None = None
    traceback: str | None = None
    first_failing_rank: int | None = None


FromCoordinator = Challenge | Reply | Welcome | StartCycle | StopCycle | DoInjection | Tell | AskStop | CopyImages | End
