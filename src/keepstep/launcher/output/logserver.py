"""The log writer of a job: one process that takes the output of all nodes and writes it into the run folder.

    python -m keepstep.launcher.output.logserver --run-dir D --run-id R --listen HOST:PORT|unix:PATH [--token-fd N] [--no-tls]

The wire format is in logwire.py, the files and what happens after a SIGKILL in logstore.py. It prints one JSON line
`{"listening": [...]}` when it is ready, ends on SIGTERM after it has written what it has, or when its parent is gone and no agent
was there for --idle-s. A run folder has one writer at a time; a second one waits --wait-s for the first to end.

Memory: while more than --memory-mb of output waits for the disk, no connection is read, and the sockets slow the agents down.
Beside that a connection costs what was read of an unfinished frame: SMALL_FRAME_BYTES, or a whole frame on BIG_FRAMES of them.
A full disk stops acknowledgements, so agents keep what they can; writing is tried again every second.

Refused connections are counted by reason in logs/funnel.json, with what was written and what was not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import os
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from keepstep.launcher.files import write_atomic
from keepstep.launcher.output.logstore import LogStore
from keepstep.launcher.output.logwriter import Connection, Writer, say
from keepstep.launcher.output.slimtls import SharedReads, SlimTls
from keepstep.launcher.trust import find_token, server_context
from keepstep.records.codec import to_json, to_pretty_json
from keepstep.records.errors import ConfigError, KeepstepError, StorageError

READ_BYTES = 1 << 16
SOCKET_BYTES = 1 << 18
"""What the kernel may hold of a connection. Much less, and senders on loopback (64 KiB segments) wait for window probes."""


async def _listen(writer: Writer, addresses: list[str], tls: bool) -> tuple[list[asyncio.Server], list[str]]:
    """Raises ConfigError for an address that is none, StorageError for one that cannot be listened on."""
    loop = asyncio.get_running_loop()
    context = server_context(writer.token) if writer.token is not None and tls else None
    servers, shown = [], []
    shared = memoryview(bytearray(READ_BYTES))

    def accept() -> asyncio.BaseProtocol:
        connection: asyncio.Protocol = Connection(writer)
        if context is not None:
            refuse = functools.partial(writer.refused.update, ["no TLS"])
            connection = SlimTls(connection, context, server_side=True, on_failure=refuse)
        return SharedReads(connection, shared)

    for address in addresses:
        kind, _, path = address.partition("unix:")
        try:
            if not kind and path:
                Path(path).unlink(missing_ok=True)
                servers.append(await loop.create_unix_server(lambda: Connection(writer), path, backlog=4096))
                shown.append(address)
                continue
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise ConfigError(f"--listen {address!r}: give HOST:PORT or unix:PATH")
            sock = socket.create_server(
                (host.strip("[]"), int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=4096
            )
            # Accepted connections inherit it: what the kernel holds for a connection stays small, too.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
            # An agent's host that is gone is noticed within two minutes.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
            servers.append(await loop.create_server(accept, sock=sock, backlog=4096))
            shown.append(f"{host}:{sock.getsockname()[1]}")
        except OSError as error:
            raise StorageError(f"--listen {address}: cannot listen: {error.strerror}; choose another port") from error
    return servers, shown


async def _publish(writer: Writer, path: Path, every_s: float, idle_s: float, end: asyncio.Event) -> None:
    """Keep logs/funnel.json, and notice that nobody needs this process any more."""
    loop = asyncio.get_running_loop()
    last: dict[str, Any] = {}
    seen = loop.time()
    parent = os.getppid()
    while True:
        status = writer.status()
        if status != last:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(write_atomic, path, to_pretty_json(status))
            last = status
        if writer.nodes:
            seen = loop.time()
        elif loop.time() - seen > idle_s and os.getppid() != parent:
            say("neither parent nor agent left; leaving")
            end.set()
        await asyncio.sleep(every_s)


async def serve(
    store: LogStore,
    run_dir: Path,
    run_id: str,
    *,
    token: bytes | None,
    listen: list[str],
    tls: bool,
    memory_bytes: int,
    status_s: float,
    idle_s: float,
) -> None:
    """Take output until SIGTERM or until nobody is left, then write the rest."""
    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    writer = Writer(store, run_id, token, memory_bytes)
    servers, shown = await _listen(writer, listen, tls)
    print(to_json({"listening": shown}).decode(), flush=True)
    writing = asyncio.ensure_future(writer.write_forever())
    path = run_dir / "logs" / "funnel.json"
    helpers = [
        asyncio.ensure_future(_publish(writer, path, status_s, idle_s, end)),
        asyncio.ensure_future(writer.repeat_acks()),
    ]
    await end.wait()
    for server in servers:
        server.close()
    writer.end()
    await writing
    for helper in helpers:
        helper.cancel()
    for connection in list(writer.connections):
        connection.finish()
    with contextlib.suppress(OSError):
        write_atomic(path, to_pretty_json(writer.status()))


async def _open_store(run_dir: Path, prefix: str | None, wait_s: float) -> LogStore:
    loop = asyncio.get_running_loop()
    until = loop.time() + wait_s
    while True:
        try:
            return LogStore(run_dir, prefix)
        except StorageError:
            if loop.time() > until:
                raise
        await asyncio.sleep(0.1)


async def _main(args: argparse.Namespace) -> None:
    token = find_token(None if args.token_fd is None else f"/dev/fd/{args.token_fd}")
    over_network = [a for a in args.listen if not a.startswith("unix:")]
    if over_network and token is None:
        raise ConfigError(f"--listen {over_network[0]}: an address of a network needs the job token (--token-fd)")
    run_dir = Path(args.run_dir)
    store = await _open_store(run_dir, args.log_prefix, args.wait_s)
    await serve(
        store,
        run_dir,
        args.run_id,
        token=token,
        listen=args.listen,
        tls=not args.no_tls,
        memory_bytes=int(args.memory_mb * (1 << 20)),
        status_s=args.status_s,
        idle_s=args.idle_s,
    )
    store.close()


def main() -> None:
    """Entry point of the log writer process."""
    parser = argparse.ArgumentParser(prog="keepstep-logserver")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--listen", required=True, action="append", metavar="HOST:PORT|unix:PATH")
    parser.add_argument("--token-fd", type=int, help="descriptor that the job token is read from")
    parser.add_argument("--no-tls", action="store_true", help="clear text, still with proof of the token")
    parser.add_argument("--log-prefix", metavar="P", help="each cycle's log goes to P_cycleN.log too")
    parser.add_argument("--memory-mb", type=float, default=64.0, help="output that may wait for the disk")
    parser.add_argument("--status-s", type=float, default=1.0, help="how often logs/funnel.json may change")
    parser.add_argument(
        "--idle-s", type=float, default=60.0, help="end after this long without an agent and parent process"
    )
    parser.add_argument("--wait-s", type=float, default=5.0, help="how long another writer may take to end")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        asyncio.run(_main(args))
    except KeepstepError as error:
        say(str(error))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
