"""Entry point of the coordinator process: sockets, TLS, routes. What it does is in `coordinator`.

    python -m keepstep.launcher.coordinatormain --run-dir DIR --socket PATH [--listen HOST:PORT] [--token-fd N] ...

On the Unix socket it serves launchers and people of this host in clear text; on HOST:PORT everybody else, with TLS by a key that
follows from the job token. The token comes through a descriptor, never through a command line or an environment.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from keepstep.launcher import messages as m
from keepstep.launcher.admission import Admission
from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordinator import Coordinator
from keepstep.launcher.trust import fence_key, fence_proven, server_context
from keepstep.records.codec import from_json
from keepstep.records.errors import ConfigError, KeepstepError

BACKLOG = 4096
MAX_FENCE_BYTES = 4096


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


async def serve(args: argparse.Namespace, token: bytes | None) -> None:
    """Run until the job is over and everybody knows."""
    run_dir = Path(args.run_dir)
    config = from_json((run_dir / "run.json").read_bytes(), RunConfig)
    folder_id = (run_dir / "id").read_text().strip()
    admission = Admission(config.run_id, token, args.log_addr, folder_id)
    fence = fence_key(token, config.run_id)
    tcp = listen(args.listen) if args.listen else None
    coordinator = Coordinator(run_dir, args.launch, args.started_ns, admission, args.stays)
    Path(args.socket).unlink(missing_ok=True)
    local = _server(application(coordinator, fence, network=False), uds=args.socket)
    coordinator.servers.append(local)
    tasks = [local.serve(), coordinator.serve()]
    if tcp is not None:
        remote = _server(application(coordinator, fence, network=True))
        if config.tls:
            if token is None:
                raise ConfigError("TLS needs the job token: --token-file or KEEPSTEP_JOB_TOKEN")
            remote.config.ssl = server_context(token)
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
    parser.add_argument("--launch", required=True, help="id of the launcher's life; the same one goes on with its attempt")
    parser.add_argument("--listen", default="", help="HOST:PORT for launchers on other hosts")
    parser.add_argument("--log-addr", default="", help="HOST:PORT of the log funnel")
    parser.add_argument("--token-fd", type=int, default=None)
    parser.add_argument("--stays", action="store_true", help="wait for agents even when none is there")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o077)
    raise_file_limit()
    try:
        asyncio.run(serve(args, read_token(args.token_fd)))
    except KeepstepError as error:
        print(f"coordinator: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def raise_file_limit() -> None:
    """As many open files as this user may have: one a node, and some."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < BACKLOG:
        print(f"coordinator: at most {hard} open files (was {soft}): a job of more nodes needs ulimit -n", file=sys.stderr)


if __name__ == "__main__":
    main()
