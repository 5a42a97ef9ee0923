"""Real processes: statuses, orphans, descendants, states and handlers. What changes a process runs in one of its own."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from keepstep.launcher import procs

Start = Callable[[str], subprocess.Popen[str]]
WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python code in a process that is ready once it printed a line, and ends with the test."""
    running: list[subprocess.Popen[str]] = []

    def launch(code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield launch
    for process in running:
        process.kill()
        process.communicate()


def run(code: str) -> str:
    """Output of Python code in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def await_state(pid: int, wanted: str) -> None:
    """Until the kernel says so; bounded by the test's own time limit."""
    while procs.state_of(pid) != wanted:
        os.sched_yield()


class TestReap:
    def test_exit_codes_signals_and_running(self) -> None:
        code = """
            import os, select, signal
            from keepstep.launcher.procs import reap
            def child(body):
                pid = os.fork()
                if pid == 0:
                    body()
                    os._exit(0)
                fd = os.pidfd_open(pid)
                select.select([fd], [], [])
                return reap(pid)
            print(child(lambda: os._exit(7)), child(lambda: None), child(lambda: os.kill(os.getpid(), 9)))
            pid = os.fork()
            if pid == 0:
                signal.pause()
            print(reap(pid))
            os.kill(pid, 9)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            print(reap(pid))
        """
        assert run(code).split() == ["7", "0", "-9", "None", "-9"]

    def test_a_status_nobody_can_read_is_no_success(self, start: Start) -> None:
        process = start(WAIT)
        process.kill()
        process.wait()
        assert procs.reap(process.pid) == procs.STATUS_LOST != 0


class TestSubreaper:
    def test_an_orphan_comes_to_it_with_its_status(self) -> None:
        code = """
            import os
            from keepstep.launcher.procs import become_subreaper, reap
            become_subreaper()
            read_end, write_end = os.pipe()
            if os.fork() == 0:
                middle = os.getpid()
                pid = os.fork()
                if pid == 0:
                    while os.getppid() == middle:
                        os.sched_yield()
                    os._exit(9)
                os.write(write_end, str(pid).encode())
                os._exit(0)
            os.close(write_end)
            os.wait()
            orphan = int(os.read(read_end, 20))
            os.waitid(os.P_PID, orphan, os.WEXITED | os.WNOWAIT)
            print(reap(orphan))
        """
        assert run(code) == "9\n"

    def test_statuses_are_kept_also_below_a_parent_that_ignored_them(self) -> None:
        code = """
            import os, signal, sys, textwrap
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            inner = '''
            import os
            from keepstep.launcher.procs import become_subreaper, reap
            become_subreaper()
            pid = os.fork()
            if pid == 0:
                os._exit(7)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            print(reap(pid), flush=True)
            '''
            os.execv(sys.executable, [sys.executable, "-c", textwrap.dedent(inner)])
        """
        assert run(code) == "7\n"


class TestDescendants:
    TREE = """
        import os, signal
        def child(depth):
            r, w = os.pipe()
            pid = os.fork()
            if pid == 0:
                below = child(depth - 1) if depth else []
                os.write(w, (" ".join(map(str, [os.getpid(), *below])) + "\\n").encode())
                os.close(w)
                while True:
                    signal.pause()  # until it is killed; standard input may be at its end
            os.close(w)
            return [int(n) for n in os.fdopen(r).readline().split()]
        """

    def test_the_whole_tree_without_excluded_parts(self) -> None:
        code = textwrap.dedent(self.TREE) + textwrap.dedent("""
            from keepstep.launcher.procs import descendants
            first, second = child(2), child(1)
            print(descendants(os.getpid(), set()) == set(first + second), len(first + second))
            print(descendants(os.getpid(), {first[1]}) == {first[0], *second})
            print(descendants(os.getpid(), {first[0], second[0]}) == set())
            for pid in first + second:
                os.kill(pid, 9)
            """)
        assert run(code).split() == ["True", "5", "True", "True"]

    def test_zombies_are_not_living(self) -> None:
        code = """
            import os
            from keepstep.launcher.procs import descendants, state_of
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            print(state_of(pid), descendants(os.getpid(), set()))
        """
        assert run(code) == "Z set()\n"

    def test_a_name_that_looks_like_the_rest_of_the_line(self) -> None:
        code = """
            import ctypes, os, signal
            from keepstep.launcher.procs import descendants, state_of
            r, w = os.pipe()
            pid = os.fork()
            if pid == 0:
                ctypes.CDLL(None).prctl(15, b") R 1 (", 0, 0, 0)
                os.write(w, b"x")
                signal.pause()
            os.read(r, 1)
            print(descendants(os.getpid(), set()) == {pid})
            os.kill(pid, 9)
        """
        assert run(code) == "True\n"

    def test_what_an_earlier_life_left_is_found_by_its_environment(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KEEPSTEP_TEST_RUN", f"run-{os.getpid()}")
        process = start(WAIT)
        assert procs.with_environment("KEEPSTEP_TEST_RUN", f"run-{os.getpid()}").keys() == {process.pid}
        assert procs.with_environment("KEEPSTEP_TEST_RUN", f"run-{os.getpid()}0") == {}


class TestStates:
    def test_stopped_zombie_and_gone(self, start: Start) -> None:
        process = start(WAIT)
        os.kill(process.pid, signal.SIGSTOP)
        await_state(process.pid, "T")
        os.kill(process.pid, signal.SIGCONT)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert procs.state_of(process.pid) == "Z"
        process.wait()
        assert procs.state_of(process.pid) == ""

    def test_signals_to_what_is_gone_are_no_error(self, start: Start) -> None:
        process = start(WAIT)
        assert procs.kill_quietly(process.pid, 0)
        process.kill()
        process.wait()
        assert not procs.kill_quietly(process.pid, signal.SIGTERM)
        assert not procs.kill_group(process.pid, signal.SIGTERM)

    def test_a_group_is_ended_whole(self) -> None:
        code = """
            import os, signal
            from keepstep.launcher.procs import kill_group
            r, w = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                os.fork()
                os.write(w, b"x")
                signal.pause()
            os.read(r, 1), os.read(r, 1)
            os.close(w)
            print(kill_group(pid, signal.SIGKILL))
            print(os.read(r, 1))  # its end comes when the last of the group is gone
        """
        assert run(code) == "True\nb''\n"

    def test_which_signals_are_handled(self, start: Start) -> None:
        code = "import signal; signal.signal(signal.SIGRTMIN + 7, lambda *_: None); signal.signal(signal.SIGUSR1, signal.SIG_IGN);"
        process = start(code + WAIT)
        assert procs.catches(process.pid, signal.SIGRTMIN + 7)
        assert not procs.catches(process.pid, signal.SIGRTMIN + 6)
        assert not procs.catches(process.pid, signal.SIGUSR1)
        process.kill()
        process.wait()
        assert not procs.catches(process.pid, signal.SIGRTMIN + 7)

    def test_kernel_stack_of_one_that_is_gone(self, start: Start) -> None:
        process = start(WAIT)
        process.kill()
        process.wait()
        assert procs.kernel_stack(process.pid) == ""


class TestMemfd:
    def test_is_zeroed_and_wholly_allocated(self) -> None:
        fd = procs.make_memfd("test", 3 * mmap.PAGESIZE)
        try:
            status = os.fstat(fd)
            assert (status.st_size, status.st_blocks * 512) == (3 * mmap.PAGESIZE, 3 * mmap.PAGESIZE)
            assert os.pread(fd, 10, 0) == bytes(10)
            assert not os.get_inheritable(fd)
        finally:
            os.close(fd)

    def test_more_than_allowed_raises_and_leaks_nothing(self) -> None:
        code = """
            import os, resource
            from keepstep.launcher.procs import make_memfd
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            before = os.listdir("/proc/self/fd")
            try:
                make_memfd("test", 2 << 20)
            except OSError as error:
                print(error.strerror, os.listdir("/proc/self/fd") == before)
        """
        assert run(code) == "File too large True\n"
