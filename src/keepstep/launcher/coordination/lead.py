"""Keeping a job's coordinator and log funnel up: the first launcher does it, or `keepstep coordinator` on its own host."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination.journal import epochs
from keepstep.launcher.coordination.runfolder import set_aside_verdict
from keepstep.launcher.files import write_durable
from keepstep.records.errors import KeepstepError

MAX_DEATHS = 5
DEATH_WINDOW_S = 20.0
RETRY_S = 5.0


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """host and port of an endpoint."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def is_own(endpoint: str) -> bool:
    """Whether an endpoint's host is this host: one of its addresses can be bound. Names are resolved."""
    host, _ = split_endpoint(endpoint)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, _, _, address in found:
        with socket.socket(family, kind) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
            return True
    return False


def log_address(config: RunConfig, endpoint: str) -> str:
    """host:port of the log funnel that belongs to a coordinator at `endpoint`."""
    host, port = split_endpoint(endpoint)
    shown = f"[{host}]" if ":" in host else host
    return f"{shown}:{config.log_port or port + 1}"


def make_folder_id(run_dir: Path) -> str:
    """The run folder's own id, made at first use: who reads the same one shares the folder."""
    path = run_dir / "id"
    if not path.exists():
        write_durable(path, secrets.token_hex(8).encode() + b"\n")
    return path.read_text().strip()


class Child:
    """A process of this package that is started again when it dies."""

    def __init__(
        self,
        name: str,
        module: str,
        arguments: list[str],
        log: Path,
        token: bytes | None,
        say: Callable[[str], None],
        on_hopeless: Callable[[str], bool] = lambda _message: True,
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_hopeless` is asked when it does not stay up; True: go on trying, slowly. `on_left`: it ended on purpose."""
        self.name = name
        self.process: subprocess.Popen[bytes] | None = None
        self._module = module
        self._arguments = arguments
        self._log = log
        self._token = token
        self._say = say
        self._on_hopeless = on_hopeless
        self._on_left = on_left
        self._deaths: list[float] = []
        self._ending = False
        self.exited = asyncio.Event()
        """Set when it ended and is not started again."""

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    def start(self) -> None:
        """Start it. The token goes through a pipe: it is in no environment and no command line."""
        if self._ending:
            return
        command = [sys.executable, "-m", self._module, *self._arguments]
        fds: list[int] = []
        if self._token is not None:
            read_end, write_end = os.pipe()
            os.write(write_end, self._token)
            os.close(write_end)
            command += ["--token-fd", str(read_end)]
            fds = [read_end]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, pass_fds=fds
            )
        for fd in fds:
            os.close(fd)
        pidfd = os.pidfd_open(self.process.pid)
        asyncio.get_running_loop().add_reader(pidfd, self._on_exit, pidfd)

    def _on_exit(self, pidfd: int) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(pidfd)
        os.close(pidfd)
        assert self.process is not None
        status = self.process.wait()
        if self._ending or status == 0:
            # It says itself when it is done: the job is over, or another has taken over.
            self.exited.set()
            self._on_left()
            return
        now = time.monotonic()
        self._deaths = [t for t in self._deaths if now - t < DEATH_WINDOW_S] + [now]
        if len(self._deaths) > MAX_DEATHS:
            message = f"the {self.name} ended {len(self._deaths)} times in {DEATH_WINDOW_S:g} s; see {self._log}"
            if self._on_hopeless(message):
                self._say(f"the {self.name} does not stay up (see {self._log}); next try in {RETRY_S:g} s")
                loop.call_later(RETRY_S, self.start)
            else:
                self.exited.set()
            return
        self._say(f"the {self.name} ended (status {status}); starting it again, ranks go on")
        self.start()

    async def end(self, patience_s: float, ask: bool = False) -> None:
        """It leaves by itself when its work is done, or (`ask`) on SIGTERM; one that does not is ended."""
        self._ending = True
        if self.process is None:
            return
        if ask:
            self.process.terminate()
        try:
            await asyncio.to_thread(self.process.wait, patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)


def coordinator_child(
    config: RunConfig,
    sockets: Path,
    token: bytes | None,
    started_boot_ns: int,
    endpoint: str | None,
    say: Callable[[str], None],
    on_hopeless: Callable[[str], bool],
    on_left: Callable[[], None] = lambda: None,
    stays: bool = False,
    takes_over: bool = False,
) -> Child:
    """The coordinator of this run. `endpoint`: where it listens for other hosts, None for this host only."""
    arguments = ["--run-dir", config.run_dir, "--socket", str(sockets / "coordinator.sock")]
    arguments += ["--started-ns", str(started_boot_ns), "--launch", secrets.token_hex(8)]
    if endpoint is not None:
        arguments += ["--listen", endpoint]
    if config.nnodes + config.spares > 1:
        arguments += ["--log-addr", _log_target(config, sockets, endpoint)]
    if stays:
        arguments.append("--stays")
    if takes_over:
        arguments.append("--takes-over")
    log = Path(config.run_dir) / "logs" / "launcher.log"
    return Child(
        "coordinator",
        "keepstep.launcher.coordination.coordinatormain",
        arguments,
        log,
        token if endpoint else None,
        say,
        on_hopeless,
        on_left,
    )


def _log_target(config: RunConfig, sockets: Path, endpoint: str | None) -> str:
    return log_address(config, endpoint) if endpoint is not None else f"unix:{sockets / 'logs.sock'}"


def log_child(
    config: RunConfig, sockets: Path, token: bytes | None, endpoint: str | None, say: Callable[[str], None]
) -> Child:
    """The one writer of the job's logs when several launchers send them."""
    where = _log_target(config, sockets, endpoint)
    arguments = ["--run-dir", config.run_dir, "--run-id", config.run_id, "--listen", where]
    if not config.tls:
        arguments.append("--no-tls")
    if config.log_prefix:
        arguments += ["--log-prefix", config.log_prefix]
    log = Path(config.run_dir) / "logs" / "logserver.log"
    return Child("log funnel", "keepstep.launcher.output.logserver", arguments, log, token if endpoint else None, say)


async def lead_alone(config: RunConfig, sockets: Path, token: bytes | None, started_boot_ns: int) -> int:
    """Keep coordinator and log funnel of a job up until the job is over. Returns 0, or the signal that ended it before.

    Raises KeepstepError when the coordinator does not stay up.
    """
    run_dir = Path(config.run_dir)
    make_folder_id(run_dir)
    # Without a verdict the launchers of a former life of this coordinator may live on, and their attempt with them.
    goes_on = bool(epochs(run_dir)) and not set_aside_verdict(run_dir)
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[int] = loop.create_future()

    def end(signum: int) -> None:
        if not ended.done():
            ended.set_result(signum)

    def hopeless(message: str) -> bool:
        if not ended.done():
            ended.set_exception(KeepstepError(message))
        return False

    def say(text: str) -> None:
        print(f"keepstep: {text}", file=sys.stderr, flush=True)

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(signum, end, int(signum))
    endpoint = config.endpoints[0]
    children = [
        coordinator_child(
            config,
            sockets,
            token,
            started_boot_ns,
            endpoint,
            say,
            hopeless,
            lambda: end(0),
            stays=True,
            takes_over=goes_on,
        ),
        log_child(config, sockets, token, endpoint, say),
    ]
    for child in children:
        child.start()
    try:
        return await ended
    finally:
        await children[0].end(1.0)
        await children[1].end(5.0, ask=True)
