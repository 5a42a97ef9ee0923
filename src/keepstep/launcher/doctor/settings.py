"""Rules about a run's own settings and the host it runs on."""

from __future__ import annotations

import math

from keepstep.launcher.doctor.facts import Facts
from keepstep.launcher.doctor.findings import (
    MARGIN,
    NEEDS_RUN,
    NEEDS_SCRIPT,
    OWN_DOCS,
    Outcome,
    cost,
    found,
    group_timeout,
)

MEMORY_SHARE = 0.8
"""A save should need no more of the free memory than this."""
LOOPBACK = ("", "localhost", "127.0.0.1", "::1", "[::1]")
LOCAL_FILE_SYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "squashfs"})
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})
THREAT_DOCS = "keepstep: docs/threat-model.md"


def join_timeout(facts: Facts) -> Outcome:
    if facts.config is None:
        return NEEDS_RUN
    if facts.image_pull_s is None:
        return "needs --image-pull-s, the time a cold node takes to fetch the image"
    restore_s = (facts.measured.restore_s or 0.0) if facts.measured else 0.0
    if facts.config.join_timeout_s >= facts.image_pull_s + restore_s:
        return None
    return found(
        "error",
        "nodes are given up before they can have joined",
        (f"{facts.config.join_timeout_s:g} s", f"{facts.config_where}: join_timeout_s"),
        why=f"A cold node needs {facts.image_pull_s:g} s for the image and {restore_s:.1f} s to restore.",
        fix=f"--rdzv-conf join_timeout={math.ceil(MARGIN * (facts.image_pull_s + restore_s))}",
        source=OWN_DOCS,
    )


def shrinking(facts: Facts) -> Outcome:
    if facts.config is None:
        return NEEDS_RUN
    low, high = facts.config.min_nodes, facts.config.nnodes
    if low >= high:
        return None
    return found(
        "warning",
        "the job may go on with fewer nodes",
        (f"{low}:{high}", f"{facts.config_where}: --nnodes"),
        why="With fewer nodes the global batch or the accumulation changes, and with it a pretraining run's result; "
        "the missing nodes may stay away unnoticed.",
        fix=f"--nnodes {high} --spares N; to shrink on purpose take the steps from ks.batch_plan",
        source=OWN_DOCS,
    )


def save_memory(facts: Facts) -> Outcome:
    if facts.shard_bytes is None:
        return "needs --checkpoints, the root of a checkpoint to size the next by"
    if facts.available_bytes is None:
        return "the memory limit of this host is not readable"
    if facts.shard_bytes <= MEMORY_SHARE * facts.available_bytes:
        return None
    fits = facts.shard_bytes <= facts.available_bytes
    gib = 2**30
    return found(
        "warning" if fits else "error",
        "a save in flight hardly fits into host memory" if fits else "a save in flight does not fit into host memory",
        (f"{facts.available_bytes / gib:.2f} GiB free", facts.available_where),
        why=f"One save stages {facts.shard_bytes / gib:.2f} GiB on this node ({facts.shard_where}) until it is durable; "
        "the out-of-memory killer ends the rank otherwise.",
        fix=f"raise the memory limit by {max(0.0, facts.shard_bytes / MEMORY_SHARE - facts.available_bytes) / gib:.2f} GiB, "
        "or spread the ranks over more nodes",
        source=OWN_DOCS,
    )


def open_files(facts: Facts) -> Outcome:
    if facts.config is None:
        return NEEDS_RUN
    if facts.open_files is None:
        return "the limit of open files is not known"
    nodes, ranks = facts.config.nnodes + facts.config.spares, facts.config.nnodes * facts.config.nproc
    # The coordinator holds two connections a node; rank 0's store two a rank; an agent pipes and memory of its ranks.
    need = max(2 * nodes, 2 * ranks) + 8 * facts.config.nproc + 256
    soft, hard = (math.inf if limit < 0 else limit for limit in facts.open_files)
    if soft >= need:
        return None
    return found(
        "warning" if hard >= need else "error",
        "limit of open files is too low for this many ranks",
        (f"soft {soft:g}, hard {hard:g}", "RLIMIT_NOFILE of this process"),
        why=f"About {need:,} are open at once where the coordinator and rank 0's store run "
        f"({nodes:,} nodes, {ranks:,} ranks); further connections are refused.",
        fix=f"ulimit -n {need} before keepstep run"
        + ("" if hard >= need else f" (as root: nofile {need} in limits.conf, LimitNOFILE={need} for slurmd)"),
        source="getrlimit(2)",
    )


def hang_limit(facts: Facts) -> Outcome:
    if facts.config is None:
        return NEEDS_RUN
    if facts.config.monitor_hang != "off":
        return None
    timeout = group_timeout(facts)
    limit_s = 1800.0 if isinstance(timeout, str) else timeout[0]
    return found(
        "warning",
        "nothing watches for hangs",
        ("off", f"{facts.config_where}: --hang-timeout"),
        why=f"A rank that stands still is noticed by the process group at best: {cost(facts, limit_s)} a time, "
        "and never when it hangs outside a collective.",
        fix="--hang-timeout auto",
        source=OWN_DOCS,
    )


def progress_marker(facts: Facts) -> Outcome:
    config = facts.config
    if config is None:
        return NEEDS_RUN
    if config.checkpoint_iteration_file or config.max_no_progress_cycles == 0:
        return None
    if facts.script is None:
        return NEEDS_SCRIPT
    if facts.script.uses_checkpointer:
        return None
    return found(
        "warning",
        "the no-progress stop has nothing to go by",
        ("none", f"{facts.config_where}: --checkpoint-iteration-file"),
        why="The script does not use ks.Checkpointer and names no progress marker: a job that fails at the same place "
        f"every time restarts {config.max_restarts} times.",
        fix="--checkpoint-iteration-file FILE, a file that holds the last saved iteration",
        source=OWN_DOCS,
    )


def clear_text(facts: Facts) -> Outcome:
    if facts.config is None:
        return NEEDS_RUN
    remote = [e for e in facts.config.endpoints if (e.rpartition(":")[0] or e) not in LOOPBACK]
    if facts.config.tls or not remote:
        return None
    return found(
        "error",
        "the coordinator is spoken to in clear text over a network",
        (", ".join(remote), f"{facts.config_where}: endpoints, tls"),
        why="Whoever is on the path reads the job's commands and logs and can change them.",
        fix="leave TLS on (no --no-tls) wherever the endpoint is not this host",
        source=THREAT_DOCS,
    )


def token(facts: Facts) -> Outcome:
    if facts.config is None:
        return NEEDS_RUN
    file = facts.token
    if file is None or (file.mode is not None and file.is_own and not file.mode & 0o077):
        return None
    if file.mode is None:
        seen, why = "missing", "Launchers that start now cannot prove that they belong to the job."
    else:
        seen = f"mode {file.mode:04o}" + ("" if file.is_own else ", another user's")
        why = "Whoever can read the token can command the job; whoever can write it can keep nodes out."
    return found(
        "error",
        "the job token is not private",
        (seen, file.path),
        why=why,
        fix=f"chmod 600 {file.path}, owned by the user that runs the job; make a new token if it was open",
        source=THREAT_DOCS,
    )


def run_folder(facts: Facts) -> Outcome:
    if facts.config is None:
        return NEEDS_RUN
    kind, several = facts.run_dir_type, len(facts.config.endpoints) > 1
    in_memory = kind in MEMORY_FILE_SYSTEMS
    if not in_memory and not (several and kind in LOCAL_FILE_SYSTEMS):
        return None
    why = (
        "A further coordinator endpoint can go on only from the same journal, and it is on another host."
        if several
        else "It is gone after a reboot: the job starts over as if it had never run."
    )
    return found(
        "error" if several else "warning",
        "the run folder is not where another host can read it" if several else "the run folder is in memory",
        (str(kind), facts.config.run_dir),
        why=why,
        fix="--run-dir on a file system that all coordinator hosts share" + ("" if several else ", or on a disk"),
        source=OWN_DOCS,
    )
