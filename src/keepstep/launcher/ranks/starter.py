"""How one node starts ranks: zygotes (and what they learn), stores, pipes, specifications; fork, or fresh interpreters."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher import messages as m
from keepstep.launcher.config import RunConfig
from keepstep.launcher.files import write_atomic
from keepstep.launcher.health.gangcheck import ENV_NODE_NAME
from keepstep.launcher.node.localcycle import LocalRank
from keepstep.launcher.node.watch import RankPages
from keepstep.launcher.output.logs import LogThread, Stream, wants
from keepstep.launcher.output.logstore import copy_path
from keepstep.launcher.procs import kill_quietly, reap
from keepstep.launcher.ranks.environment import cycle_environment
from keepstep.launcher.ranks.learn import worth_learning
from keepstep.launcher.ranks.rankmain import RankSpec
from keepstep.launcher.ranks.spawn import (
    HostedStore,
    RankFiles,
    SpawnError,
    Zygote,
    ZygoteGoneError,
    exec_rank,
    exec_store,
    free_port,
    zygote_environment,
)
from keepstep.records.codec import to_pretty_json


class PortTakenError(SpawnError):
    """Raised when the port of a cycle's store is in use."""


class RankStarter:
    """Everything a launcher keeps ready between cycles so that the next one starts at once."""

    def __init__(self, config: RunConfig, agent_socket: Path, logs: LogThread, say: Callable[[str], None]) -> None:
        self.hosts_store = config.zygote and config.mode != "exec"
        self.next_port = 0
        self._config = config
        self._run_dir = Path(config.run_dir)
        self._node_dir = self._run_dir / "nodes" / config.node
        self._socket = agent_socket
        self._logs = logs
        self._say = say
        self._rng = random.Random(os.urandom(8))
        self._zygote: Zygote | None = None
        self._next_zygote: Zygote | None = None
        self._learning: asyncio.Task[None] | None = None
        self._learned: set[str] = set()
        self._store: HostedStore | None = None
        self._next_store: HostedStore | None = None
        self.new_port()

    def start(self) -> None:
        """Begin to preload; the first cycle waits for it."""
        if self._config.zygote:
            self._zygote = self._new_zygote([])

    def close(self) -> None:
        """End zygotes and stores. Ranks belong to the agent and are not touched."""
        if self._learning is not None:
            self._learning.cancel()
        for store in (self._store, self._next_store):
            _end_store(store)
        for zygote in (self._zygote, self._next_zygote):
            if zygote is not None:
                zygote.close()

    def pids(self) -> set[int]:
        """Processes that are no leftovers of ranks."""
        helpers = (self._zygote, self._next_zygote, self._store, self._next_store)
        return {h.pid for h in helpers if h is not None}

    # ---- the store of a cycle

    def new_port(self) -> int:
        """Choose another port for the next cycle's store."""
        self.next_port = free_port(self._rng)
        return self.next_port

    async def have_store(self, port: int) -> None:
        """Have the cycle's store listening on `port` before any rank starts. Raises PortTakenError."""
        if port == self.next_port:
            # Offered once only, also when this node joins again: ranks of a cycle must not find the store of another.
            self.new_port()
        if self._store is not None and self._store.port == port:
            return
        _end_store(self._store)
        self._store = None
        for host in (self._zygote.host_store if self._zygote is not None else exec_store, exec_store):
            try:
                self._store = await host(port)
            except SpawnError as error:
                if "EADDRINUSE" in str(error):
                    raise PortTakenError(str(error)) from error
                # Without torch nobody can host it, and no rank will ask for it.
                continue
            return

    async def prepare_store(self) -> None:
        """Start the next cycle's store on a fresh port, so that it is there before it is needed."""
        try:
            self._next_store = await self._zygote.host_store(0) if self._zygote is not None else None
        except SpawnError:
            self._next_store = None

    def take_next_store(self) -> None:
        """After a cycle: its store goes, the prepared one takes its place."""
        _end_store(self._store)
        self._store, self._next_store = self._next_store, None
        if self._store is not None:
            self.next_port = self._store.port
        else:
            self.new_port()

    # ---- ranks

    def prepare(self, command: m.StartCycle) -> tuple[list[LocalRank], list[RankSpec], list[RankFiles]]:
        """Records, pages, pipes and specifications of the local ranks of a cycle. Raises OSError."""
        errors = self._node_dir / "errors"
        errors.mkdir(parents=True, exist_ok=True, mode=0o700)
        info = self.write_cycle_info(command)
        copy = copy_path(self._config.log_prefix, command.cycle) if self._config.log_prefix else None
        self._logs.start_cycle(self._run_dir / "logs" / f"cycle-{command.cycle:04d}.log", command.cycle, copy)
        ranks: list[LocalRank] = []
        specs: list[RankSpec] = []
        files: list[RankFiles] = []
        for local in range(self._config.nproc):
            number = command.first_rank + local
            stem = errors / f"cycle-{command.cycle:04d}-rank-{number:05d}"
            rank = LocalRank(
                rank=number,
                local_rank=local,
                pages=RankPages(number, command.cycle),
                failure_path=stem.with_suffix(".keepstep.json"),
                error_path=stem.with_suffix(".json"),
            )
            env = cycle_environment(self._config, command, local, self._socket, info, rank.error_path)
            ranks.append(rank)
            specs.append(self._probe_spec(rank, env, command.cycle) if command.probe else self._spec(rank, env))
            files.append(self._files(rank, command.cycle))
        return ranks, specs, files

    def write_cycle_info(self, command: m.StartCycle) -> Path:
        """This node's copy of the cycle record, which KEEPSTEP_CYCLE_INFO names."""
        info = self._node_dir / f"cycle-{command.cycle:04d}.json"
        write_atomic(info, to_pretty_json(_cycle_info(self._config.run_id, command)))
        return info

    def gang_result(self, cycle: int) -> Path:
        """Where rank 0 of a gang check leaves its result."""
        return self._node_dir / f"gang-{cycle:04d}.json"

    def _probe_spec(self, rank: LocalRank, env: dict[str, str], cycle: int) -> RankSpec:
        spec = self._spec(rank, env | {ENV_NODE_NAME: self._config.node})
        arguments = ["--result", str(self.gang_result(cycle))]
        return msgspec.structs.replace(spec, mode="module", script="keepstep.launcher.health.gangcheck", args=arguments)

    def _spec(self, rank: LocalRank, env: dict[str, str]) -> RankSpec:
        return RankSpec(
            rank=rank.rank,
            mode=self._config.mode,
            script=self._config.script,
            args=[a.replace("${local_rank}", str(rank.local_rank)) for a in self._config.args],
            env=env,
            cwd=str(Path.cwd()),
            agent_pid=os.getpid(),
            failure_path=str(rank.failure_path),
            error_path=str(rank.error_path),
        )

    def _files(self, rank: LocalRank, cycle: int) -> RankFiles:
        c = self._config
        ends = {}
        for name, console in (("stdout", 1), ("stderr", 2)):
            read_end, write_end = os.pipe2(os.O_CLOEXEC)
            ends[name] = write_end
            redirected, teed = wants(c.redirects, rank.local_rank, name), wants(c.tee, rank.local_rank, name)
            shown = not redirected and (not c.local_ranks_filter or rank.local_rank in c.local_ranks_filter)
            extra = None
            if redirected or teed:
                folder = Path(c.log_dir or self._run_dir / "logs") / f"attempt_{cycle}" / str(rank.local_rank)
                folder.mkdir(parents=True, exist_ok=True)
                extra = (folder / f"{name}.log").open("ab", buffering=0)
            self._logs.add(
                Stream(
                    fd=read_end,
                    rank=rank.rank,
                    local_rank=rank.local_rank,
                    name=name,
                    pending=bytearray(),
                    console=console if shown or teed else None,
                    console_prefix=f"[{c.role}{rank.local_rank}]:".encode() if teed else b"",
                    extra=extra,
                )
            )
        return RankFiles(stdout=ends["stdout"], stderr=ends["stderr"], pages=rank.pages)

    async def spawn(self, specs: list[RankSpec], files: list[RankFiles]) -> tuple[dict[int, int], str]:
        """Fork from the zygote, or start fresh interpreters when it may not. Returns rank -> pid and "fork" or "exec".

        Closes the launcher's ends of the ranks' output pipes. Raises SpawnError.
        """
        try:
            return await self._spawn(specs, files)
        finally:
            for f in files:
                os.close(f.stdout)
                os.close(f.stderr)

    async def _spawn(self, specs: list[RankSpec], files: list[RankFiles]) -> tuple[dict[int, int], str]:
        if self._zygote is not None:
            try:
                pids = await self._zygote.fork(specs, files)
                return dict(zip((s.rank for s in specs), pids, strict=True)), "fork"
            except SpawnError as error:
                self._say(f"not forking ranks: {error}; starting fresh interpreters instead")
                self._zygote.close()
                # One that ended may not end again; one that may not fork never will.
                self._zygote = self._new_zygote([]) if isinstance(error, ZygoteGoneError) else None
        return {s.rank: exec_rank(s, f) for s, f in zip(specs, files, strict=True)}, "exec"

    # ---- zygotes

    def _new_zygote(self, trial: list[str]) -> Zygote:
        env = zygote_environment(cycle_environment(self._config, None, 0, self._socket, None, None))
        return Zygote(env, self._config.preload, trial, self._node_dir / "zygote.log")

    def learn(self, imported: set[str]) -> None:
        """Prepare a second zygote with the library modules among `imported`; it serves from the next cycle on."""
        if self._zygote is None or self._learning is not None:
            return
        modules = worth_learning(sorted(imported - self._learned), self._config)
        if modules:
            self._learned |= set(modules)
            self._learning = asyncio.ensure_future(self._prepare_zygote(sorted(self._learned)))

    async def _prepare_zygote(self, modules: list[str]) -> None:
        new = self._next_zygote = self._new_zygote(modules)
        ready: dict[str, Any]
        try:
            ready = await new.ready
        except SpawnError as error:
            ready = {"skipped": {}, "why_not_fork": str(error)}
        usable = ready["why_not_fork"] is None
        learned = [x for x in modules if x not in ready["skipped"]] if usable else []
        report = {"learned": learned, "skipped": ready["skipped"], "why_not_fork": ready["why_not_fork"]}
        write_atomic(self._node_dir / "preload.json", to_pretty_json(report))
        unused = self._zygote if usable else new
        if usable:
            self._zygote = new
        if unused is not None:
            await unused.retire()
        self._next_zygote = self._learning = None


def _end_store(store: HostedStore | None) -> None:
    if store is not None:
        kill_quietly(store.pid, signal.SIGKILL)
        reap(store.pid)


def _cycle_info(run_id: str, command: m.StartCycle) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = []
    for node, host, count in command.node_spans:
        first = len(ranks)
        ranks += [{"rank": first + i, "local_rank": i, "node": node, "host": host} for i in range(count)]
    return {
        "schema": "keepstep.cycle/1",
        "run_id": run_id,
        "cycle": command.cycle,
        "attempt": command.attempt,
        "master_addr": command.master_addr,
        "master_port": command.master_port,
        "ranks": ranks,
        "active_nodes": [node for node, _, _ in command.node_spans],
        "history": command.history,
    }
