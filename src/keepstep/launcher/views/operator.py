"""A person's commands to the coordinator of a running job, over its Unix socket on this host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from websockets.exceptions import WebSocketException
from websockets.sync.client import unix_connect

from keepstep.launcher import messages as m
from keepstep.launcher.files import socket_dir
from keepstep.records.codec import to_json
from keepstep.records.errors import KeepstepError
from keepstep.records.exits import EXIT_UNREACHABLE

CONNECT_S = 5.0
ANSWER_S = 30.0

_decode = msgspec.json.Decoder(m.Challenge | m.Reply).decode


class UnreachableError(KeepstepError):
    """Raised when no coordinator of the run answers on this host."""

    exit_code = EXIT_UNREACHABLE


class RefusedByCoordinatorError(KeepstepError):
    """Raised when the coordinator understood a command and does not carry it out; says why."""


def send_operator(run_dir: Path, message: m.Operator, answer_s: float = ANSWER_S) -> dict[str, Any]:
    """Send one command and return the result of its reply.

    Raises UnreachableError when nobody listens or answers within `answer_s`, RefusedByCoordinatorError when the reply says no.
    """
    path = socket_dir(run_dir) / "coordinator.sock"
    try:
        with unix_connect(
            str(path),
            "ws://localhost/operator",
            max_size=m.MAX_MESSAGE_BYTES,
            compression=None,
            ping_interval=None,
            open_timeout=CONNECT_S,
            close_timeout=1,
        ) as connection:
            connection.send(to_json(message).decode(), text=True)
            reply = _decode(connection.recv(timeout=answer_s))
            while isinstance(reply, m.Challenge):
                # For connections over a network: on this host the socket's folder is the proof.
                reply = _decode(connection.recv(timeout=answer_s))
    except (OSError, EOFError, WebSocketException, msgspec.MsgspecError) as error:
        # TimeoutError is an OSError.
        raise UnreachableError(
            f"the coordinator of run {run_dir.name!r} does not answer at {path}: {error or type(error).__name__}; "
            "is this the host that leads the run? `keepstep get jobs` says whether it runs"
        ) from error
    if not reply.ok:
        raise RefusedByCoordinatorError(f"run {run_dir.name!r} refused: {reply.error or 'no reason given'}")
    return reply.result if isinstance(reply.result, dict) else {"result": reply.result}
