"""A real S3 server (moto, in a process of its own) behind a front that sees every request and can refuse, fail or cut it.

The front stands for the bucket's policy, the network and the store's limits: it lets put, get and list through and nothing
else, checks upload checksums as S3 does (moto does not), answers 503 SlowDown, loses answers, and kills the server half-way
through an upload.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import http.client
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
import pytest

from keepstep.checkpoint.storage import objectclient
from keepstep.checkpoint.storage.source import Root, StoreOptions, open_root

Fault = Literal["slow", "broken", "conflict", "cut", "lost", "flip", "stall", "kill"]
"""503 SlowDown; 500; 409 because of another write under way; the connection is cut before, or after the server did as asked; a
bit is flipped on the way; no answer before the front is closed; the server dies half-way through the body."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the front saw it. `key` is without the bucket; header names are in lower case."""

    method: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    size_bytes: int
    status: int
    """0 when the connection was cut."""

    @property
    def writes(self) -> bool:
        """True for a write of any kind."""
        return self.method in ("PUT", "POST")


Answer = tuple[int, list[tuple[str, str]], bytes]  # status, headers, body
Policy = Callable[[str, str, int], Fault | None]
"""What happens to a request: (method, key, how many requests with this method came before) -> a fault or None."""


class MotoServer:
    """The server process. `address` is host:port."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "Running on http://" in line:
                self.address = line.split("http://", 1)[1].strip()
                break
        else:
            raise RuntimeError(f"moto ended with {self.process.wait()}")
        # Its log goes on as long as it runs, and a full pipe would stop it.
        self._drain = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._drain.start()

    def make_bucket(self) -> str:
        """A new bucket's name."""
        bucket = f"b-{uuid.uuid4().hex[:16]}"
        connection = http.client.HTTPConnection(self.address, timeout=20)
        connection.request("PUT", f"/{bucket}")
        assert connection.getresponse().status == 200
        connection.close()
        return bucket

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Stop it and let the pipe go."""
        self.kill()
        self._drain.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


class S3:
    """A bucket behind a front of its own. `policy` decides what happens to each request."""

    def __init__(self, server: MotoServer) -> None:
        self.server = server
        self.bucket = server.make_bucket()
        self.policy: Policy = lambda method, key, number: None
        self.may_delete = False
        self.requests: list[Request] = []
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._closing = threading.Event()
        front = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # headers and body go out one after the other: 40 ms an answer otherwise

            def handle_any(self) -> None:
                front.handle(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):  # the client gave up
                    super().handle_error(request, client_address)

        self._listener = Listener(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._listener.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The front's address."""
        return f"http://127.0.0.1:{self._listener.server_address[1]}"

    def options(self, **changes: Any) -> StoreOptions:
        """Options to reach it with, impatient ones."""
        given: dict[str, Any] = {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "allow_http": True,
            "request_timeout_s": 20.0,
            "retry_for_s": 20.0,
            "part_bytes": 5 << 20,
        }
        return StoreOptions(**{**given, **changes})

    def root(self, prefix: str = "team/ckpt", **changes: Any) -> Root:
        """The root `s3://<bucket>/<prefix>`."""
        return open_root(f"s3://{self.bucket}/{prefix}", self.options(**changes))

    def of(self, *methods: str) -> list[Request]:
        """All requests with one of `methods` so far."""
        with self._lock:
            return [request for request in self.requests if request.method in methods]

    def keys(self) -> list[str]:
        """Keys of all objects in the bucket, asked of the server itself."""
        connection = http.client.HTTPConnection(self.server.address, timeout=20)
        connection.request("GET", f"/{self.bucket}?list-type=2&max-keys=1000")
        text = connection.getresponse().read().decode()
        connection.close()
        return [part.split("</Key>")[0] for part in text.split("<Key>")[1:]]

    def close(self) -> None:
        """Stop the front."""
        self._closing.set()
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    # ---- one request

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one request of the client."""
        url = urlsplit(handler.path)
        key = unquote(url.path).removeprefix(f"/{self.bucket}").lstrip("/")
        body = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        with self._lock:
            number = self._counts.get(handler.command, 0)
            self._counts[handler.command] = number + 1
        answer = self._answer(handler, body, self.policy(handler.command, key, number))
        request = Request(
            method=handler.command,
            key=key,
            query=parse_qs(url.query, keep_blank_values=True),
            headers={name.lower(): value for name, value in handler.headers.items()},
            size_bytes=len(body),
            status=0 if answer is None else answer[0],
        )
        with self._lock:
            self.requests.append(request)
        if answer is None:
            handler.close_connection = True
        else:
            self._send(handler, *answer)

    def _answer(self, handler: BaseHTTPRequestHandler, body: bytes, fault: Fault | None) -> Answer | None:
        """What the client gets; None cuts the connection."""
        copies = "x-amz-copy-source" in handler.headers
        if copies or (handler.command == "DELETE" and not self.may_delete) or "delete" in urlsplit(handler.path).query:
            return _error(403, "AccessDenied", "this identity may put, get and list")
        if fault == "slow":
            return _error(503, "SlowDown", "Please reduce your request rate.")
        if fault == "broken":
            return _error(500, "InternalError", "We encountered an internal error.")
        if fault == "conflict":
            return _error(409, "ConditionalRequestConflict", "Please retry.")
        if fault == "stall":
            self._closing.wait(60)
        if fault == "kill":
            self._kill_midway(handler, body)
        if fault in ("cut", "kill", "stall"):
            return None
        if fault == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        wanted = handler.headers.get("x-amz-checksum-sha256")
        if wanted is not None and base64.b64encode(hashlib.sha256(body).digest()).decode() != wanted:
            return _error(400, "BadDigest", "The SHA256 you specified did not match what we received.")
        try:
            answer = self._forward(handler, body)
        except OSError:
            return None  # the server is dead
        return None if fault == "lost" else answer

    def _forward(self, handler: BaseHTTPRequestHandler, body: bytes) -> Answer:
        connection = http.client.HTTPConnection(self.server.address, timeout=30)
        try:
            connection.request(handler.command, handler.path, body, dict(handler.headers.items()))
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _kill_midway(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        connection = http.client.HTTPConnection(self.server.address, timeout=30)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            connection.send(body[: len(body) // 2])
        self.server.kill()

    def _send(self, handler: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        head = handler.command == "HEAD"
        length = next((value for name, value in headers if head and name.lower() == "content-length"), str(len(data)))
        handler.send_response(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                handler.send_header(name, value)
        handler.send_header("content-length", length)
        handler.end_headers()
        if not head:
            handler.wfile.write(data)


def _error(status: int, code: str, message: str) -> Answer:
    data = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
    return status, [("content-type", "application/xml")], data


def first(count: int, fault: Fault, *methods: str) -> Policy:
    """The first `count` requests of each of `methods` meet `fault`."""
    return lambda method, key, number: fault if method in methods and number < count else None


@pytest.fixture(scope="session")
def moto_server() -> Iterator[MotoServer]:
    """The session's server; tests have buckets of their own."""
    server = MotoServer()
    yield server
    server.close()


@pytest.fixture
def s3(moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """A bucket and its front; the environment has credentials that work."""
    set_credentials(monkeypatch)
    monkeypatch.setattr(objectclient, "BACKOFF_S", (0.01, 0.1))
    bucket = S3(moto_server)
    yield bucket
    bucket.close()


def set_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials in the environment, and nothing else of AWS."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "trainer")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-for-a-test-server")


def wait_until(check: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Poll `check` until it holds."""
    end_s = time.monotonic() + limit_s
    while not check():
        assert time.monotonic() < end_s, "did not happen in time"
        time.sleep(0.005)
