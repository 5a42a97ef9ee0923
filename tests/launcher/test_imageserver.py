"""Images between agents over real sockets: what arrives is what was held, or is refused; and nobody else gets in."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keepstep.checkpoint.format.blocks import BLOCK_BYTES
from keepstep.checkpoint.format.fingerprint import check_text, fingerprint
from keepstep.launcher.node import imageserver, imagewire
from keepstep.launcher.node.images import Image, NodeImages
from keepstep.launcher.node.imageserver import ImageServer
from keepstep.launcher.node.imagewire import Caller, PullError, blocks_of, pull
from keepstep.launcher.output import logwire
from keepstep.launcher.procs import make_memfd
from keepstep.launcher.trust import make_token
from keepstep.records.errors import VerificationError
from tests.launcher.harness import wait_until

FOLDER = "job7-step-00000005-c0000-a0000"
TOKEN = make_token().encode()
TRANSPORTS = ["unix", "tls", "clear"]


@functools.cache
def pattern(size: int) -> bytes:
    return random.Random(size).randbytes(size)


class End:
    """One node's images and its server."""

    def __init__(self, folder: Path, transport: str) -> None:
        self.token = None if transport == "unix" else TOKEN
        self.caller = Caller(run_id="job7", node="n1", token=self.token, tls=transport == "tls")
        self.images = NodeImages()
        self.said: list[str] = []
        path = folder / "images.sock" if transport == "unix" else None
        self.server = ImageServer(self.images, self.caller, path, self.said.append)
        address = self.server.address
        self.address = address if address.startswith("unix:") else f"127.0.0.1{address}"

    def hold(self, data: bytes, file: str = "f", method: str = "xxh3_128-16m", **facts: Any) -> Image:
        """Held as a rank would keep it."""
        fd = self.images.buffer(0, file, len(data))
        os.pwrite(fd, data, 0)
        os.close(fd)
        facts = {"fingerprint": fingerprint(blocks_of(memoryview(data)), method), **facts}
        image = Image(checkpoint=FOLDER, file=file, size_bytes=len(data), facts=facts)
        self.images.keep(0, file, image)
        return image

    def fetch(self, image: Image, **caller: Any) -> bytes:
        asking = msgspec.structs.replace(self.caller, node="n2", **caller)
        fd = make_memfd("test", image.size_bytes)
        try:
            pull(self.address, image, fd, asking, set())
            return os.pread(fd, image.size_bytes, 0)
        finally:
            os.close(fd)

    def flip(self, file: str, at: int) -> None:
        """Damage one byte of the memory itself."""
        fd = self.images._buffers[0, file].fd
        byte = os.pread(fd, 1, at)
        os.pwrite(fd, bytes([byte[0] ^ 1]), at)


@pytest.fixture(params=TRANSPORTS)
def end(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[End]:
    made = End(tmp_path, request.param)
    yield made
    made.server.close()
    made.images.close()


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[End]:
    made = End(tmp_path, "tls")
    yield made
    made.server.close()
    made.images.close()


@pytest.mark.parametrize("size", [1, 4096, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_every_byte_arrives(size: int, end: End) -> None:
    assert end.fetch(end.hold(pattern(size))) == pattern(size)
    assert end.server.refused == {}


@pytest.mark.parametrize("method", ["xxh3_128-16m", "sha256-16m", "sha256"])
def test_damaged_memory_is_found_and_offered_no_more(method: str, end: End) -> None:
    image = end.hold(pattern(100_000), method=method)
    end.flip("f", 77_777)
    with pytest.raises(VerificationError, match=f"{FOLDER}/f from the memory at .*: fingerprint"):
        end.fetch(image)
    wait_until(lambda: end.images.images() == [])
    wait_until(lambda: len(end.said) == 1)
    assert "damaged" in end.said[0]
    with pytest.raises(PullError, match="no longer held here"):
        end.fetch(image)


def test_whoever_cries_damage_falsely_changes_nothing(end: End) -> None:
    image = end.hold(pattern(1000))
    other = msgspec.structs.replace(image, facts={"fingerprint": "sha256:" + "0" * 64})
    with pytest.raises(VerificationError):
        end.fetch(other)
    end.server.close()
    assert end.images.images() == [image]
    assert end.said == []


def test_what_has_no_fingerprint_is_not_even_asked_for(end: End) -> None:
    image = end.hold(b"x", fingerprint=None)
    with pytest.raises(VerificationError, match="'None' is no fingerprint"):
        end.fetch(image)


def test_another_size_than_was_told_is_refused(end: End) -> None:
    image = end.hold(pattern(1000))
    with pytest.raises(PullError, match="1000 bytes are offered where 999 belong"):
        end.fetch(msgspec.structs.replace(image, size_bytes=999))


def test_nobody_listens(end: End) -> None:
    image = end.hold(pattern(1000))
    end.server.close()
    with pytest.raises(PullError, match="from the memory at"):
        end.fetch(image)


class TestRefused:
    def test_another_token_has_another_key(self, tls: End) -> None:
        with pytest.raises(PullError, match="pin"):
            tls.fetch(tls.hold(pattern(10)), token=make_token().encode())

    def test_no_proof_of_the_token(self, tmp_path: Path) -> None:
        end = End(tmp_path, "clear")
        image = end.hold(pattern(10))
        for wrong in ({"token": make_token().encode()}, {"token": None}, {"run_id": "job8"}):
            with pytest.raises(PullError, match="refused: another run, or no proof of the job token"):
                end.fetch(image, **wrong)
        wait_until(lambda: end.server.refused["no token"] == 3)  # counted when its thread is done with it
        assert end.fetch(image) == pattern(10)
        end.server.close()
        end.images.close()

    def test_what_is_no_tls(self, tls: End) -> None:
        host, _, port = tls.address.rpartition(":")
        with socket.create_connection((host, int(port)), 10) as sock:
            sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
        wait_until(lambda: tls.server.refused == {"no TLS": 1})
        assert tls.fetch(tls.hold(pattern(10))) == pattern(10)

    @pytest.mark.parametrize(
        "data",
        [b"\xff" * 9, b"\0\0\0\0\0", b"\0\0\0\x03\x02{}", b"\0\0\0\x02\x10{"],
        ids=["huge", "none", "bad", "kind"],
    )
    def test_what_is_no_greeting(self, data: bytes, tmp_path: Path) -> None:
        end = End(tmp_path, "unix")
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(end.address.removeprefix("unix:"))
            sock.sendall(data)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(4096):
                    pass
        wait_until(lambda: end.server.refused == {"malformed": 1})
        assert end.fetch(end.hold(pattern(10))) == pattern(10)
        end.server.close()
        end.images.close()

    def test_those_who_say_nothing_lose_their_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(imageserver, "GREETING_S", 0.2)
        end = End(tmp_path, "unix")
        image = end.hold(pattern(10))
        with contextlib.ExitStack() as stack:
            for _ in range(imageserver.MAX_CONNECTIONS + 2):
                sock = stack.enter_context(socket.socket(socket.AF_UNIX))
                sock.connect(end.address.removeprefix("unix:"))
            assert end.fetch(image) == pattern(10)
        end.server.close()
        end.images.close()


def test_many_at_once(end: End) -> None:
    """More than are served at once; each gets all of it."""
    image = end.hold(pattern(300_000))
    expected = hashlib.sha256(pattern(300_000)).digest()
    seen: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: seen.append(hashlib.sha256(end.fetch(image)).digest()))
        for _ in range(imageserver.MAX_CONNECTIONS + 8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == [expected] * len(threads)


def test_the_server_ends_while_it_sends_and_its_peer_sees_that(end: End) -> None:
    image = end.hold(pattern(BLOCK_BYTES + 1))
    asking = msgspec.structs.replace(end.caller, node="n2")
    sock = imagewire._connect(end.address, asking, False)
    imagewire.send_frame(sock, imagewire.GET, imagewire.Wanted(FOLDER, image.file))
    assert sock.recv(1)
    # Nobody reads the rest: the server stands in a write.
    began = time.monotonic()
    end.server.close()
    assert time.monotonic() - began < 10
    with contextlib.suppress(OSError):
        while sock.recv(1 << 20):
            pass
    sock.close()


def test_a_transfer_can_be_cut(end: End) -> None:
    """A launcher that ends does not wait for its peers."""
    image = end.hold(pattern(BLOCK_BYTES + 1))
    path = end.server._listener.getsockname()
    assert path
    connections: set[socket.socket] = set()
    fd = make_memfd("test", image.size_bytes)
    failed: list[Exception] = []
    # A server that promises and sends nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        thread = threading.Thread(target=_pull_quietly, args=(silent.getsockname()[1], image, fd, connections, failed))
        thread.start()
        peer, _ = silent.accept()
        imagewire.send_frame(peer, logwire.CHALLENGE, logwire.Challenge("n"))
        imagewire.recv_frame(peer, logwire.HELLO)
        imagewire.recv_frame(peer, imagewire.GET)
        imagewire.send_frame(peer, imagewire.FOUND, imagewire.Found(image.size_bytes))
        peer.sendall(b"some")
        wait_until(lambda: len(connections) == 1)
        for sock in list(connections):
            sock.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive()
        peer.close()
    os.close(fd)
    assert isinstance(failed[0], PullError)
    assert connections == set()


def _pull_quietly(port: int, image: Image, fd: int, connections: set[socket.socket], failed: list[Exception]) -> None:
    try:
        pull(f"127.0.0.1:{port}", image, fd, Caller(run_id="r", node="n", token=None, tls=False), connections)
    except PullError as error:
        failed.append(error)


class TestFingerprints:
    def test_known_values(self) -> None:
        """By hand from the formats' own functions."""
        import xxhash

        data = pattern(BLOCK_BYTES + 5)
        parts = [data[:BLOCK_BYTES], data[BLOCK_BYTES:]]
        digests = b"".join(xxhash.xxh3_128(p).digest() for p in parts)
        assert fingerprint(blocks_of(memoryview(data))) == f"xxh3_128-16m:{xxhash.xxh3_128(digests).hexdigest()}"
        shas = b"".join(hashlib.sha256(p).digest() for p in parts)
        assert (
            fingerprint(blocks_of(memoryview(data)), "sha256-16m") == f"sha256-16m:{hashlib.sha256(shas).hexdigest()}"
        )
        assert fingerprint(parts, "sha256") == f"sha256:{hashlib.sha256(data).hexdigest()}"

    @pytest.mark.parametrize(
        "text", ["", "sha256:", "sha256:" + "A" * 64, "md5:" + "0" * 32, None, 5, "sha256:" + "0" * 63]
    )
    def test_what_is_none(self, text: object) -> None:
        with pytest.raises(VerificationError, match="no fingerprint"):
            check_text(text)


@pytest.mark.slow
def test_speed(end: End) -> None:
    """How fast an image goes from one memory to the other, verified, on loopback (both ends on this machine's cores)."""
    size = 256 << 20
    image = end.hold(pattern(1 << 20) * 256)
    asking = msgspec.structs.replace(end.caller, node="n2")
    fd = make_memfd("test", size)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        pull(end.address, image, fd, asking, set())
        took.append(time.perf_counter() - began)
    os.close(fd)
    print(f"{end.address[:4]} tls={end.caller.tls and end.token is not None}: {size / sorted(took)[1] / 1e9:.2f} GB/s")
