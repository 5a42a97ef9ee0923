"""Hands this node's images to other agents of the job (wire format: imagewire.py), in threads beside the agent's event loop."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from keepstep.checkpoint.format.fingerprint import check_text, same_method
from keepstep.launcher.node import imagewire as i
from keepstep.launcher.node.images import NodeImages
from keepstep.launcher.output import logwire as w
from keepstep.launcher.trust import proven, server_context
from keepstep.records.errors import KeepstepError

GREETING_S = 10.0
"""Handshake, hello and request: whoever takes longer keeps a place from somebody else."""
MAX_CONNECTIONS = 16
"""Served at once; more wait in the kernel's queue, where an image that thousands want is soon held by others too."""
BACKLOG = 4096


class ImageServer:
    """One listener and a thread a connection. `address` is what others connect to, with "" for the host of a TCP one."""

    def __init__(self, images: NodeImages, caller: i.Caller, path: Path | None, say: Callable[[str], None]) -> None:
        """`path`: listen there, for launchers of this host only; None: a TCP port, on loopback when there is no token."""
        self.refused: Counter[str] = Counter()
        self._images = images
        self._caller = caller
        self._say = say
        self._path = path
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()
        self._context: ssl.SSLContext | None = None
        if path is None and caller.token is not None and caller.tls:
            self._context = server_context(caller.token)
        self._listener = _listen(path, loopback=caller.token is None)
        self.address = f"unix:{path}" if path is not None else f":{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, name="keepstep-images", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, cut what is being sent, and wait for the threads."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            living = dict(self._open)
        for sock in living:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        # Its place may be what the listener waits for.
        for thread in [*living.values(), self._thread]:
            thread.join(i.IO_S)
        self._listener.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while not self._closing.is_set():
            self._places.acquire()
            try:
                sock, _ = self._listener.accept()
            except OSError:
                # Shut down, or no descriptor is free: then a connection that ends makes the next one possible.
                self._places.release()
                if not self._closing.is_set():
                    time.sleep(0.1)
                continue
            thread = threading.Thread(target=self._serve, args=(sock,), name="keepstep-image", daemon=True)
            with self._lock:
                self._open[sock] = thread
            if self._closing.is_set():
                sock.close()
            thread.start()

    def _serve(self, raw: socket.socket) -> None:
        sock = raw
        try:
            raw.settimeout(GREETING_S)
            if self._context is not None:
                sock = self._context.wrap_socket(raw, server_side=True)
                with self._lock:
                    self._open[sock] = self._open.pop(raw)
            wanted = self._greet(sock)
            sock.settimeout(i.IO_S)
            self._send(sock, wanted)
        except ssl.SSLError:
            self.refused["no TLS"] += 1
        except (i.PullError, w.WireError, msgspec.MsgspecError):
            self.refused["malformed"] += 1
        except OSError:
            pass  # the other side went away, which it may
        finally:
            with self._lock:
                self._open.pop(sock, None)
            sock.close()
            self._places.release()

    def _greet(self, sock: socket.socket) -> i.Wanted:
        nonce = secrets.token_hex(16)
        i.send_frame(sock, w.CHALLENGE, w.Challenge(nonce))
        hello = w.parse_hello(i.recv_frame(sock, w.HELLO)[1])
        token = self._caller.token
        if hello.run_id != self._caller.run_id or (
            token is not None and not proven(token, nonce, hello.run_id, hello.node, hello.proof)
        ):
            i.send_frame(sock, w.REFUSED, w.Refused("another run, or no proof of the job token"))
            self.refused["no token"] += 1
            raise ConnectionError
        return msgspec.json.decode(i.recv_frame(sock, i.GET)[1], type=i.Wanted)

    def _send(self, sock: socket.socket, wanted: i.Wanted) -> None:
        held = self._images.open(wanted.checkpoint, wanted.file)
        if held is None:
            i.send_frame(sock, w.REFUSED, w.Refused("no longer held here"))
            return
        fd, image = held
        try:
            i.send_frame(sock, i.FOUND, i.Found(image.size_bytes))
            i.send_bytes(sock, fd, image.size_bytes)
            # The end of the connection says that all is well.
            with contextlib.suppress(i.PullError, ssl.SSLError, ConnectionError):
                i.recv_frame(sock, i.DAMAGED)
                self._look_again(fd, wanted)
        finally:
            os.close(fd)

    def _look_again(self, fd: int, wanted: i.Wanted) -> None:
        """Somebody says that an image is damaged: when it is, nobody is offered it again."""
        held = self._images.open(wanted.checkpoint, wanted.file)
        if held is None:
            return
        os.close(held[0])
        image = held[1]
        try:
            expected = check_text(image.facts.get("fingerprint"))
            if i.fingerprint_of(fd, image.size_bytes, same_method(expected)) == expected:
                return
        except KeepstepError:
            return
        self._say(f"{wanted.checkpoint}/{wanted.file} in this node's memory is damaged: not offered any more")
        self._images.forget(image)


def _listen(path: Path | None, loopback: bool) -> socket.socket:
    if path is not None:
        path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        sock.bind(str(path))
        sock.listen(BACKLOG)
        return sock
    if loopback:
        return socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
    return socket.create_server(("", 0), backlog=BACKLOG)
