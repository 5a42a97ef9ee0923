"""The writer process: whatever happens to it costs one save, and nothing of it shows in the rank."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.checkpoint.images import Image, check_written, image_of

from keepstep.checkpoint.save import writerclient
from keepstep.checkpoint.save.sealing import Sealed
from keepstep.checkpoint.save.writerclient import ImageWriter, WriterClient
from keepstep.checkpoint.save.writerthread import ThreadWriter
from keepstep.checkpoint.storage.targets import Fault, PosixFile
from keepstep.checkpoint.storage.writer import FileFact
from keepstep.records.errors import StorageError, VerificationError

MIB = 1 << 20
STALL = Fault(kind="storage-stall", seconds=100)


@pytest.fixture
def client() -> Iterator[WriterClient]:
    """A client whose process is ended after the test."""
    client = WriterClient()
    yield client
    client.close()


@pytest.fixture(params=[WriterClient, ThreadWriter])
def writer(request: pytest.FixtureRequest) -> Iterator[ImageWriter]:
    """Either kind."""
    writer: ImageWriter = request.param()
    writer.ready(20)
    yield writer
    writer.close()


@pytest.fixture
def image() -> Iterator[Image]:
    """A small image."""
    with image_of(MIB + 4096) as image:
        yield image


def save(
    writer: ImageWriter,
    image: Image,
    path: Path,
    *,
    timeout_s: float = 20,
    sealed: Sealed | None = None,
    on_sealed: Callable[[Sealed], None] | None = None,
) -> FileFact:
    """Write `image` to `path`."""
    target = PosixFile(path=str(path))
    return writer.write(image.fd, image.file_bytes, target, timeout_s, sealed=sealed, on_sealed=on_sealed)


def check_next_save(client: WriterClient, image: Image, path: Path, *, respawned: int) -> None:
    """The save after the one that failed works."""
    check_written(path, save(client, image, path), image)
    assert client.respawned == respawned


def pid_of(client: WriterClient) -> int:
    """The process that serves now."""
    assert client.pid is not None
    return client.pid


def wait_for_end(pidfd: int, limit_s: float) -> bool:
    """True when the process of `pidfd` ends in time."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(limit_s * 1000))


def test_seal_then_write_and_both_at_once_make_the_same_file(writer: ImageWriter, image: Image, tmp_path: Path) -> None:
    sealed = writer.seal(image.fd, image.file_bytes, 20)
    seen: list[Sealed] = []
    first = save(writer, image, tmp_path / "a", sealed=sealed)
    second = save(writer, image, tmp_path / "b", on_sealed=seen.append)
    check_written(tmp_path / "a", first, image)
    check_written(tmp_path / "b", second, image)
    assert seen == [sealed]
    assert writer.respawned == 0


def test_errors_come_back_as_what_they_are(writer: ImageWriter, image: Image, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(StorageError, match=r"cannot create .*/f: File exists \(EEXIST\)"):
        save(writer, image, tmp_path / "f")
    with pytest.raises(VerificationError, match="20 bytes cannot end in digests"):
        writer.seal(image.fd, 20, 20)
    with pytest.raises(StorageError, match="cannot lie in a buffer"):
        writer.seal(image.fd, 1 << 30, 20)
    sealed = writer.seal(image.fd, image.file_bytes, 20)
    image.change(77)
    with pytest.raises(StorageError, match="g: staging buffer changed while it was written: block 0"):
        save(writer, image, tmp_path / "g", sealed=sealed)
    check_written(tmp_path / "h", save(writer, image, tmp_path / "h"), image)
    assert writer.respawned == 0


def test_injected_faults_hit_the_next_write_only(writer: ImageWriter, image: Image, tmp_path: Path) -> None:
    writer.inject(Fault(kind="storage-error", at_byte=5000), 20)
    with pytest.raises(StorageError, match="Input/output error"):
        save(writer, image, tmp_path / "f")
    check_written(tmp_path / "f", save(writer, image, tmp_path / "f"), image)


def test_stalled_write_is_given_up_at_its_deadline(image: Image, tmp_path: Path) -> None:
    for writer in (WriterClient(), ThreadWriter()):
        writer.ready(20)
        writer.inject(Fault(kind="storage-stall", seconds=3), 20)
        with pytest.raises(StorageError, match=r"no (answer to|end of) write within 0\.5 s"):
            save(writer, image, tmp_path / f"{type(writer).__name__}-1", timeout_s=0.5)
        second = tmp_path / f"{type(writer).__name__}-2"
        check_written(second, save(writer, image, second), image)
        assert writer.respawned == 1
        writer.close()
        with pytest.raises(StorageError, match="closed"):
            writer.seal(image.fd, image.file_bytes, 20)


def test_process_killed_in_a_write_fails_that_save_only(client: WriterClient, image: Image, tmp_path: Path) -> None:
    client.inject(STALL, 20)
    with pytest.raises(StorageError, match=r"writer process [0-9]+ was killed by SIGKILL during write"):
        save(client, image, tmp_path / "a", on_sealed=lambda sealed: os.kill(pid_of(client), signal.SIGKILL))
    assert client.pid is None
    check_next_save(client, image, tmp_path / "b", respawned=1)


def kill(pid: int) -> None:
    """SIGKILL, and the process has ended when this returns."""
    pidfd = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        assert wait_for_end(pidfd, 10)
    finally:
        os.close(pidfd)


def test_process_that_died_between_saves_is_not_even_noticed(
    client: WriterClient, image: Image, tmp_path: Path
) -> None:
    client.ready(20)
    kill(pid_of(client))
    check_next_save(client, image, tmp_path / "a", respawned=1)


def test_stopped_process_is_replaced_at_the_deadline(client: WriterClient, image: Image, tmp_path: Path) -> None:
    client.ready(20)
    os.kill(pid_of(client), signal.SIGSTOP)
    with pytest.raises(StorageError, match=r"no answer to write within 0\.2 s; it was killed by SIGKILL"):
        save(client, image, tmp_path / "a", timeout_s=0.2)
    check_next_save(client, image, tmp_path / "b", respawned=1)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own that can be frozen: from then on writers block in the kernel, where no signal reaches them."""
    tools = [shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin") for name in ("mkfs.ext4", "fsfreeze", "mount")]
    if os.geteuid() != 0 or None in tools:
        pytest.skip("freezing a file system needs root, mkfs.ext4 and fsfreeze")
    file, place = tmp_path / "disk.img", tmp_path / "disk"
    with file.open("wb") as image:
        image.truncate(64 * MIB)
    place.mkdir()
    subprocess.run(["mkfs.ext4", "-q", "-F", str(file)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(file), str(place)], check=False, capture_output=True).returncode:
        pytest.skip("cannot mount a loop device here")
    try:
        yield place
    finally:
        subprocess.run(["fsfreeze", "-u", str(place)], check=False, capture_output=True)
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_file_system_that_stops_answering_costs_one_save(
    client: WriterClient, image: Image, tmp_path: Path, disk: Path
) -> None:
    check_written(disk / "a", save(client, image, disk / "a"), image)
    pid = pid_of(client)
    subprocess.run(["fsfreeze", "-f", str(disk)], check=True)
    with pytest.raises(StorageError, match=r"no answer to write within 0\.5 s; it cannot be killed at present"):
        save(client, image, disk / "b", timeout_s=0.5)
    assert ") D " in Path(f"/proc/{pid}/stat").read_text()
    check_next_save(client, image, tmp_path / "c", respawned=1)
    pidfd = os.pidfd_open(pid)
    subprocess.run(["fsfreeze", "-u", str(disk)], check=True)
    assert wait_for_end(pidfd, 10)
    os.close(pidfd)
    check_next_save(client, image, disk / "d", respawned=1)
    assert not Path(f"/proc/{pid}").exists(), "collected when the file system answered again"


def test_answer_to_a_request_that_was_given_up_is_dropped(client: WriterClient, image: Image, tmp_path: Path) -> None:
    def give_up(sealed: Sealed) -> None:
        raise LookupError("the caller changed its mind")

    for number in range(3):
        with pytest.raises(LookupError):
            save(client, image, tmp_path / str(number), on_sealed=give_up)
    pid = pid_of(client)
    with image_of(9000) as other:
        check_written(tmp_path / "other", save(client, other, tmp_path / "other"), other)
    assert (pid_of(client), client.respawned) == (pid, 0)


def test_two_clients_never_get_each_others_answers(client: WriterClient, tmp_path: Path) -> None:
    other = WriterClient()
    errors: list[BaseException] = []

    def work(own: WriterClient, size: int) -> None:
        try:
            with image_of(size) as image:
                for number in range(8):
                    path = tmp_path / f"{size}-{number}"
                    check_written(path, save(own, image, path), image)
                    image.change(number)
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=work, args=pair) for pair in ((client, 70_000), (other, 50_000), (client, 60_000))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    other.close()
    assert errors == []


def test_signals_to_the_ranks_group_do_not_end_it(client: WriterClient, image: Image, tmp_path: Path) -> None:
    client.ready(20)
    pid = pid_of(client)
    assert os.getpgid(pid) == os.getpgid(0), "SIGKILL to the rank's group ends it too"
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(pid, signum)
    check_next_save(client, image, tmp_path / "a", respawned=0)
    assert client.pid == pid


def test_thread_that_started_it_may_end(client: WriterClient, image: Image, tmp_path: Path) -> None:
    thread = threading.Thread(target=client.ready, args=(20,))
    thread.start()
    thread.join()
    pid = pid_of(client)
    check_next_save(client, image, tmp_path / "a", respawned=0)
    assert client.pid == pid


_PARENT = """
import os, sys, threading
from keepstep.checkpoint.save.writerclient import WriterClient
from keepstep.checkpoint.storage.targets import Fault, PosixFile
from tests.checkpoint.images import Image

client, image = WriterClient(), Image(5000)

def work():
    client.inject(Fault(kind="storage-stall", seconds=100), 20)
    say = lambda sealed: print(client.pid, flush=True)
    client.write(image.fd, image.file_bytes, PosixFile(path=sys.argv[2]), 100, on_sealed=say)

if sys.argv[1] == "main":
    work()
else:
    threading.Thread(target=work).start()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_it_ends_with_its_rank_even_in_a_write(tmp_path: Path, where: str) -> None:
    top = str(Path(__file__).parents[2])
    with script(_PARENT, where, tmp_path / "f", path=top) as rank:
        assert rank.stdout is not None
        pidfd = os.pidfd_open(int(rank.stdout.readline()))
        try:
            rank.kill()
            assert wait_for_end(pidfd, 10)
        finally:
            os.close(pidfd)


@contextlib.contextmanager
def script(text: str, *arguments: object, path: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs `text`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, path])}
    command = [sys.executable, "-W", "error", "-c", text, *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process


_FORKS = """
import os, sys
from keepstep.checkpoint.save.writerclient import WriterClient
from keepstep.checkpoint.storage.targets import PosixFile
from keepstep.records.errors import StorageError
from tests.checkpoint.images import Image, check_written
from pathlib import Path

client, image, folder = WriterClient(), Image(5000), Path(sys.argv[1])
client.ready(20)
print("before")
sys.stdout.flush()
pid = os.fork()
if pid == 0:
    try:
        client.seal(image.fd, image.file_bytes, 20)
    except StorageError as error:
        print(error)
    client.close()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
fact = client.write(image.fd, image.file_bytes, PosixFile(path=str(folder / "f")), 20)
check_written(folder / "f", fact, image)
assert client.respawned == 0
client.close()
print("after")
"""


def test_rank_may_fork_and_print(tmp_path: Path) -> None:
    with script(_FORKS, tmp_path, path=str(Path(__file__).parents[2])) as rank:
        out, err = rank.communicate(timeout=30)
    assert (rank.returncode, err) == (0, "")
    assert out.splitlines() == ["before", "this writer process belongs to the process that was forked from", "after"]


def test_thousands_of_open_files_do_not_matter_and_none_is_inherited(image: Image, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 6000:
        pytest.skip(f"only {hard} descriptors allowed here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (6000, hard))
    held: list[int] = []
    client = WriterClient()
    try:
        for _ in range(5000):
            held.append(os.open("/dev/null", os.O_RDONLY))
            os.set_inheritable(held[-1], True)
        check_written(tmp_path / "a", save(client, image, tmp_path / "a"), image)
        assert len(os.listdir(f"/proc/{client.pid}/fd")) < 10
    finally:
        client.close()
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def anonymous_bytes(pid: int) -> int:
    """Memory of its own that a process has resident."""
    text = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("RssAnon:"))


@pytest.mark.slow
def test_fifty_saves_leave_nothing_behind(client: WriterClient, image: Image, tmp_path: Path) -> None:
    def one(number: int) -> None:
        path = tmp_path / str(number)
        save(client, image, path)
        path.unlink()
        with pytest.raises(StorageError):
            save(client, image, tmp_path / "nowhere" / "f")

    def held() -> list[int]:
        gc.collect()  # what earlier tests left to the collector is not ours to count
        return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), pid_of(client))]

    for number in range(5):
        one(number)
    before, memory = held(), anonymous_bytes(pid_of(client))
    for number in range(50):
        one(number)
    # Fewer is what earlier tests left behind and other threads let go meanwhile.
    assert all(now <= then for now, then in zip(held(), before, strict=True))
    assert anonymous_bytes(pid_of(client)) < memory + 2 * MIB
    maps = Path(f"/proc/{client.pid}/maps").read_text()
    assert "memfd:image" not in maps, "no image stays mapped"


def test_replacing_it_leaves_no_descriptor_and_no_zombie(client: WriterClient, image: Image) -> None:
    client.ready(20)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        pid = pid_of(client)
        kill(pid)
        client.ready(20)
        assert not Path(f"/proc/{pid}").exists()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer: what earlier tests left behind


def test_close_ends_a_request_in_flight(client: WriterClient, image: Image, tmp_path: Path) -> None:
    client.inject(STALL, 20)
    with pytest.raises(StorageError, match="was killed by SIGKILL during write"):
        save(client, image, tmp_path / "a", on_sealed=lambda sealed: client.close())
    client.close()
    with pytest.raises(StorageError, match="closed"):
        client.ready(20)


def test_process_that_cannot_be_started(client: WriterClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(StorageError, match="cannot start a writer process: No such file"):
        client.ready(20)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(StorageError, match=r"writer process [0-9]+ ended with exit code 1 during warm"):
        client.ready(20)


@pytest.mark.parametrize("answer", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x03???"])
def test_process_that_talks_nonsense_is_replaced(
    client: WriterClient, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    program = (
        f"import socket, sys; s = socket.socket(fileno=int(sys.argv[2])); s.sendall({answer!r}); s.recv(9); s.recv(9)"
    )
    with monkeypatch.context() as patch:
        patch.setattr(writerclient, "_BOOT", program)
        with pytest.raises(StorageError, match="answered warm with nonsense"):
            client.ready(20)
    client.ready(20)
    assert client.respawned == 1
