"""Entry point of the coordinator process: sockets, TLS, routes. What it does is in `coordinator`.

    python -m keepstep.launcher.coordination.coordinatormain --run-dir DIR --socket PATH [--listen HOST:PORT] [--token-fd N] ...

On the Unix socket it serves launchers and people of this host in clear text; on HOST:PORT everybody else, with TLS by a key that
follows from the job token. The token comes through a descriptor, never through a command line or an environment.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import gc
import json
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket
from uvicorn.protocols.http.h11_impl import H11Protocol

from keepstep.launcher import messages as m
from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination.admission import Admission
from keepstep.launcher.coordination.coordinator import Coordinator
from keepstep.launcher.output.slimtls import SlimTls
from keepstep.launcher.trust import fence_key, fence_proven, server_context
from keepstep.records.codec import from_json
from keepstep.records.errors import ConfigError, KeepstepError

BACKLOG = 4096
MAX_FENCE_BYTES = 4096
HANDOVER_S = 5.0
"""How long the port may still be held by the coordinator before; it looks for a newer epoch every second at least."""


def application(coordinator: Coordinator, fence: bytes, network: bool) -> Starlette:
    """Routes of one listening socket. `network`: clients must prove the token."""

    async def agent(websocket: WebSocket) -> None:
        await coordinator.serve_agent(websocket, network)

    async def operator(websocket: WebSocket) -> None:
        await coordinator.serve_operator(websocket, network)

    async def fenced(request: Request) -> JSONResponse:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_FENCE_BYTES:
                coordinator.admission.count("oversized")
                return JSONResponse({"ok": False}, 413)
        try:
            word = json.loads(body)
            node, pid, boot, proof = str(word["node"]), int(word["pid"]), str(word["boot_id"]), str(word["proof"])
        except (ValueError, KeyError, TypeError):
            coordinator.admission.count("malformed")
            return JSONResponse({"ok": False}, 400)
        if not fence_proven(fence, node, pid, boot, proof):
            coordinator.admission.count("no_token")
            return JSONResponse({"ok": False}, 403)
        return JSONResponse({"ok": coordinator.fenced(node, pid, boot)})

    return Starlette(
        routes=[
            WebSocketRoute("/agent", agent),
            WebSocketRoute("/operator", operator),
            Route("/fenced", fenced, methods=["POST"]),
        ]
    )


def _server(app: Starlette, **more: Any) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        ws="websockets-sansio",
        ws_max_size=m.MAX_MESSAGE_BYTES,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        lifespan="off",
        log_level="warning",
        backlog=BACKLOG,
        timeout_graceful_shutdown=1,
        **more,
    )
    config.load()
    return uvicorn.Server(config)


def _over_tls(context: ssl.SSLContext, admission: Admission) -> Callable[..., asyncio.Protocol]:
    """HTTP over TLS, made by hand: asyncio's own takes 400 KB a connection, this a third of it."""

    def refused() -> None:
        admission.count("no_tls")

    return lambda **fields: SlimTls(H11Protocol(**fields), context, server_side=True, on_failure=refused)


def listen(endpoint: str) -> socket.socket:
    """A listening socket on host:port, usable at once after a predecessor died. Raises ConfigError."""
    host, _, port = endpoint.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, int(port)))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {endpoint}: {error.strerror}; name a free port of this host with --rdzv-endpoint"
        ) from error
    sock.listen(BACKLOG)
    return sock


async def listen_in_turn(endpoint: str) -> socket.socket:
    """The same, also when a coordinator whose launcher died has the port: it leaves as soon as it sees the newer epoch."""
    deadline = time.monotonic() + HANDOVER_S
    while True:
        try:
            return listen(endpoint)
        except ConfigError as error:
            taken = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if not taken or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.05)


async def serve(args: argparse.Namespace, token: bytes | None) -> None:
    """Run until the job is over and everybody knows."""
    run_dir = Path(args.run_dir)
    config = from_json((run_dir / "run.json").read_bytes(), RunConfig)
    folder_id = (run_dir / "id").read_text().strip()
    admission = Admission(config.run_id, token, args.log_addr, folder_id)
    fence = fence_key(token, config.run_id)
    coordinator = Coordinator(run_dir, args.launch, args.started_ns, admission, args.stays, args.takes_over)
    tcp = await listen_in_turn(args.listen) if args.listen else None
    Path(args.socket).unlink(missing_ok=True)
    local = _server(application(coordinator, fence, network=False), uds=args.socket)
    coordinator.servers.append(local)
    tasks = [local.serve(), coordinator.serve()]
    if tcp is not None:
        if config.tls and token is None:
            raise ConfigError("TLS needs the job token: --token-file or KEEPSTEP_JOB_TOKEN")
        http = H11Protocol if token is None or not config.tls else _over_tls(server_context(token), admission)
        remote = _server(application(coordinator, fence, network=True), http=http)
        coordinator.servers.append(remote)
        tasks.append(remote.serve(sockets=[tcp]))
    await asyncio.gather(*tasks)


def read_token(fd: int | None) -> bytes | None:
    """The token from an inherited descriptor, which is closed."""
    if fd is None:
        return None
    with os.fdopen(fd, "rb") as pipe:
        return pipe.read() or None


def main() -> None:
    """Parse arguments and serve; the exit code says only whether the process could work."""
    parser = argparse.ArgumentParser(prog="keepstep-coordinator")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--started-ns", type=int, required=True, help="CLOCK_BOOTTIME when the launcher started")
    parser.add_argument(
        "--launch", required=True, help="id of the launcher's life; the same one goes on with its attempt"
    )
    parser.add_argument("--listen", default="", help="HOST:PORT for launchers on other hosts")
    parser.add_argument("--log-addr", default="", help="HOST:PORT of the log funnel")
    parser.add_argument("--token-fd", type=int, default=None)
    parser.add_argument("--stays", action="store_true", help="wait for agents even when none is there")
    parser.add_argument("--takes-over", action="store_true", help="go on with the attempt of a coordinator elsewhere")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    raise_file_limit()
    collect_seldom()
    try:
        asyncio.run(serve(args, read_token(args.token_fd)))
    except KeepstepError as error:
        print(f"coordinator: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def collect_seldom() -> None:
    """Look for cycles of garbage seldom: at 2,048 nodes half a million objects stay, and going through them again and again
    while they came was a quarter of the processor time of a start (bench/coordinator_scale.py).
    """
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)


def raise_file_limit() -> None:
    """As many open files as this user may have: one a node, and some."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < BACKLOG:
        print(
            f"coordinator: at most {hard} open files (was {soft}): a job of more nodes needs ulimit -n", file=sys.stderr
        )


if __name__ == "__main__":
    main()
