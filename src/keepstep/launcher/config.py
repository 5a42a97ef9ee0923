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
    stop_grace_s: float = 15.0
    """SIGTERM to SIGKILL when ranks are stopped."""
    capture_s: float = 3.0
    """Bound for collecting stacks and pages before ranks are stopped."""
    preload: list[str] = []
    zygote: bool = True
    inject: list[Injection] = []
    tee: str = "0"
    redirects: str = "0"
    log_dir: str | None = None
    local_ranks_filter: list[int] = []
    fresh_start: bool = False
    virtual_local_rank: bool = False
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    """Signals to the launcher that ask the job to stop."""
    lease_s: float = 5.0
    join_timeout_s: float = 600.0
    origins: dict[str, str] = {}
    """Field -> "flag", "PET_X" or "default"."""
