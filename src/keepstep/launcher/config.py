"""Effective configuration of a run: what the command line, PET_* variables and defaults came to, with the origin of each."""

from __future__ import annotations

import msgspec

from keepstep.records.inject import Injection


class RunConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a launcher needs. Written to run.json; the coordinator of a run reads it from there."""

    run_id: str
    run_dir: str
    node: str
    script: str
    args: list[str] = []
    mode: str = "script"
    """"script" (python file), "module" (-m), "exec" (--no-python: any program)."""
    nnodes: int = 1
    """Nodes that train at most."""
    min_nodes: int = 1
    """Nodes that train at least; equal to `nnodes` unless --nnodes MIN:MAX allows the job to shrink."""
    spares: int = 0
    """Further nodes that wait warm and take over the ranks of a failed one."""
    replica_size: int = 1
    """Ranks of one model-parallel replica: a job shrinks by whole replicas only."""
    levels: list[str] = []
    """This node's place, outermost level first (block, spine, leaf, NVLink domain, as far as known)."""
    topology: str | None = None
    """File that gives the levels of all nodes; it goes before what nodes say of themselves."""
    endpoints: list[str] = []
    """host:port of the coordinator; further ones may take over its journal folder, in this order. Empty: this host only."""
    token_file: str | None = None
    """Where the job token was read from; the token itself is in no configuration, environment or command line."""
    tls: bool = True
    """Off: agents speak to the coordinator in clear text (still with proof of the token); for benchmarks and loopback."""
    local_addr: str | None = None
    """Address of this node for other nodes; None: the one its coordinator sees, or the endpoint's where that is this host."""
    log_port: int | None = None
    """Port of the log funnel; None: the coordinator's plus one."""
    nproc: int = 1
    max_restarts: int = 10
    """Real failures that lead to another cycle; disruptions and address-in-use are free."""
    role: str = "default"
    master_addr: str | None = None
    master_port: int | None = None
    """Used by cycle 0 only; later cycles take fresh ports."""
    monitor_hang: str = "auto"
    """"auto" (learned from the steps), "off", or seconds without progress."""
    start_hang_s: float = 1800.0
    """Limit before the first step is complete when the hang limit is "auto"."""
    section_timeouts_s: dict[str, float] = {}
    out_of_section_s: float | None = None
    """Limit of the time outside every section, once a rank has used one; None: only the limit for no progress at all."""
    checkpoint_iteration_file: str | None = None
    """Progress marker of the no-progress stop: a file that holds one integer."""
    max_no_progress_cycles: int = 3
    """Failed cycles without progress after which the job stops with `no_restart_exit_code`; 0 switches it off."""
    min_progress_iterations: int = 1
    no_restart_exit_code: int = 93
    attribution: bool = True
    """Whether failed cycles get a verdict from their evidence (`keepstep why`)."""
    stop_on_attribution: str = "log"
    """What a verdict does that calls for fail_fast: "log", or "no-restart", which ends the job."""
    gpu_memory_reclaim_timeout_s: float = 50.0
    """How long a restart waits for GPU memory to become free; 0: not at all."""
    gpu_memory_tolerance_mb: float = 512.0
    gpu_memory_poll_interval_s: float = 2.0
    preempt_notice_s: float | None = None
    """Seconds between SIGTERM and SIGKILL that the scheduler grants; None: `stop_grace_s`."""
    node_check: int = 1
    """Level of `keepstep check node` that a node passes before it may join; 0: none."""
    gang_check: str = "off"
    """When the nodes' all-reduce bandwidth is tested in a cycle of its own: "off", "first" (before the first cycle), "swap" (after
    nodes changed) or "always" (both)."""
    memory_tier: str = "node"
    """What memory keeps of checkpoints: "off", "node" (what ranks keep survives them), "peer" (another node copies it as well)."""
    node_rank: int | None = None
    """Place of this node in rank order when all nodes give one and nothing is known of the topology; None: not given."""
    is_host: bool | None = None
    """Whether this launcher may start the coordinator; None: when the first endpoint is an address of this host."""
    start_hang_given: bool = False
    """`start_hang_s` was set by the user: it also holds before the first step when the hang limit is a number."""
    log_prefix: str | None = None
    """PREFIX_cycleN.log gets a copy of each cycle's log."""
    stop_grace_s: float = 15.0
    """SIGTERM to SIGKILL when ranks are stopped."""
    capture_s: float = 3.0
    """Bound for collecting stacks and pages before ranks are stopped."""
    preload: list[str] = []
    zygote: bool = True
    failure_prior: str | None = None
    """What is known of the failure rate from elsewhere: failures per 1000 node-days, or a keepstep.failure_prior/1 record as
    JSON."""
    advice: str = "off"
    """"auto": the floor of the hang limit and the spares that are waited for follow the failure rate (goodput/settings.py)."""
    mttr_s: float | None = None
    """Mean time to repair a node, for that; None: a day."""
    power_ramp_s: float = 0.0
    """Seconds over which the first steps of a cycle come to full speed; 0: at once."""
    inject: list[Injection] = []
    tee: str = "0"
    redirects: str = "0"
    log_dir: str | None = None
    local_ranks_filter: list[int] = []
    trust_key: list[str] = []
    """Files with the public keys whose checkpoints ranks restore; with nobody named here or below, this installation's key."""
    trust_identity: list[str] = []
    """Trusted certificate identities; the n-th is vouched for by the n-th of `trust_issuer`."""
    trust_issuer: list[str] = []
    trust_root: list[str] = []
    """Files with the root certificates that chains of those identities end in."""
    unsigned: bool = False
    """Ranks write checkpoints without signature, and accept such."""
    ckpt_signer: str | None = None
    """Program that signs checkpoints (checkpoint/trust/signers.py); None: this installation's key."""
    ckpt_signer_cert: str | None = None
    """File with its public key or certificate chain."""
    on_busy: str | None = None
    """What a save does that falls due while one is in flight and the script does not say: "wait" or "skip"."""
    store_endpoint: str | None = None
    """Address of the S3-compatible server of object roots; None, here and below: as the script or the environment says."""
    store_region: str | None = None
    store_allow_http: bool = False
    """An endpoint without TLS is accepted."""
    kms_key: str | None = None
    """Key of SSE-KMS that objects are encrypted with."""
    fresh_start: bool = False
    virtual_local_rank: bool = False
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    """Signals to the launcher that ask the job to stop."""
    lease_s: float = 5.0
    """How long a node may be out of touch before it stops its ranks; see docs/architecture.md, leases."""
    join_timeout_s: float = 600.0
    last_call_s: float = 30.0
    """How long the first cycle waits for spares once the nodes that train are there."""
    origins: dict[str, str] = {}
    """Field -> "flag", "PET_X" or "default"."""
