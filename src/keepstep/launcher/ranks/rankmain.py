"""What runs in a rank's process before the user's script, forked from the zygote or in a fresh interpreter alike.

As a program (`python -u -m keepstep.launcher.ranks.rankmain FD`) it reads its specification from descriptor FD: the path without a
zygote. The zygote calls `become_rank` in a forked child.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib.abc
import importlib.machinery
import io
import json
import mmap
import os
import random
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from keepstep.records.frames import ENV_PAGE_FD

STACK_SIGNAL = signal.SIGRTMIN + 7
PR_SET_PDEATHSIG = 1
IMPORTS_BYTES = 1 << 17
CASCADE_TYPES = {
    "DistNetworkError",
    "DistStoreError",
    "DistBackendError",
    "ConnectionError",
    "ConnectionResetError",
    "ConnectionAbortedError",
    "ConnectionRefusedError",
    "BrokenPipeError",
    "ChannelError",
}
CASCADE_WORDS = (
    "side channel:",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "ncclRemoteError",
)


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank needs to become itself. Descriptors are numbers in the rank's own process."""

    rank: int
    mode: str
    script: str
    args: list[str]
    env: dict[str, str]
    cwd: str
    agent_pid: int
    failure_path: str
    error_path: str


def libc_prctl(option: int, value: int) -> None:
    """prctl(2). Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def adopt_parent(agent_pid: int, limit_s: float = 10.0) -> None:
    """Wait until the agent is this process's parent, and tie this process's life to it. Exits when the agent is gone."""
    deadline = time.monotonic() + limit_s
    while os.getppid() != agent_pid:
        if time.monotonic() > deadline:
            os._exit(1)
        os.sched_yield()
    libc_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent_pid:
        os._exit(1)


class ImportRecorder(importlib.abc.MetaPathFinder):
    """Notes the name of every module that is really imported, in shared memory that the agent reads.

    The agent learns from it what to preload next time, and that a rank still makes progress before its first step.
    Layout: 8 bytes with the number of bytes that follow, then names separated by newlines.
    """

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, IMPORTS_BYTES)
        self._used = 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        name = fullname.encode() + b"\n"
        if 8 + self._used + len(name) <= IMPORTS_BYTES:
            self._map[8 + self._used : 8 + self._used + len(name)] = name
            self._used += len(name)
            self._map[0:8] = self._used.to_bytes(8, "little")
        return None


def reseed() -> None:
    """Give this process its own random numbers, as a fresh interpreter has: a fork would repeat the zygote's."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy.random" in sys.modules:
        numpy.random.seed(None)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()


def restore_blas_threads(env: dict[str, str]) -> None:
    """Set OpenBLAS to the thread count a fresh interpreter would use: the zygote loaded it with one."""
    wanted = next((env[k] for k in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS") if env.get(k)), "")
    count = int(wanted) if wanted.isdigit() else len(os.sched_getaffinity(0))
    with open("/proc/self/maps") as maps:
        libraries = {line.split()[-1] for line in maps if "openblas" in line and ".so" in line}
    for path in libraries:
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_", "openblas_set_num_threads"):
            if hasattr(library, name):
                getattr(library, name)(count)
                break


def unbuffer_output() -> None:
    """Write-through text on descriptors 1 and 2, as `python -u` gives: nothing is lost when a rank is killed."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "wb", closefd=False)
        stream = io.TextIOWrapper(
            raw, encoding="utf-8", errors="backslashreplace" if fd == 2 else "strict", write_through=True
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def become_rank(spec: RankSpec, fds: dict[str, int], forked: bool) -> None:
    """Everything between fork and the user's code: identity, environment, randomness, threads, stack dumps."""
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(spec.env)
    os.environ[ENV_PAGE_FD] = str(fds["page"])
    os.chdir(spec.cwd)
    for fd in fds.values():
        # Only a program that replaces this one needs them; the script's own children do not.
        os.set_inheritable(fd, spec.mode == "exec" and fd == fds["page"])
    if forked:
        unbuffer_output()
        reseed()
        restore_blas_threads(spec.env)
    faulthandler.register(STACK_SIGNAL, file=fds["stacks"], all_threads=True, chain=False)
    sys.meta_path.insert(0, ImportRecorder(fds["imports"]))


def run_user_code(spec: RankSpec) -> None:
    """Run the script as `python script.py ARGS` would. SystemExit passes through; other exceptions are recorded and exit 1."""
    if spec.mode == "exec":
        os.execvp(spec.script, [spec.script, *spec.args])
    try:
        if spec.mode == "module":
            sys.argv = [spec.script, *spec.args]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(spec.script, run_name="__main__", alter_sys=True)
        else:
            run_script(spec.script, spec.args)
    except SystemExit as error:
        if error.code not in (None, 0):
            record_failure(spec, error)
        raise
    except BaseException as error:
        record_failure(spec, error)
        # Our own frames at the top would only hide the user's.
        error.__traceback__ = user_traceback(error)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def run_script(script: str, args: list[str]) -> None:
    """Execute a file as `__main__`. The module stays in sys.modules until the end: exit handlers and pickling need it."""
    path = Path(script).resolve()
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=os.path.abspath(script),
        __builtins__=__builtins__,
        __spec__=None,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", os.path.abspath(script)),
    )
    sys.argv = [script, *args]
    sys.path.insert(0, str(path.parent))
    sys.modules["__main__"] = main
    exec(compile(path.read_bytes(), os.path.abspath(script), "exec"), main.__dict__)


def _is_ours(filename: str) -> bool:
    return filename.startswith((str(Path(__file__).parent), "<frozen "))


def user_traceback(error: BaseException) -> types.TracebackType | None:
    """The traceback without the launcher's own frames at its top."""
    tb = error.__traceback__
    while tb is not None and _is_ours(tb.tb_frame.f_code.co_filename):
        tb = tb.tb_next
    return tb


def user_frame(error: BaseException) -> str | None:
    """The innermost frame of the user's code (not of an installed library or of Python itself) as file:line in function."""
    frames = traceback.extract_tb(user_traceback(error))
    library = (sys.prefix, sys.base_prefix, "<frozen")
    own = [f for f in frames if not f.filename.startswith(library) and not _is_ours(f.filename)]
    candidates = own or list(frames)
    return f"{candidates[-1].filename}:{candidates[-1].lineno} in {candidates[-1].name}" if candidates else None


def record_failure(spec: RankSpec, error: BaseException) -> None:
    """Leave what went wrong for the agent, and in torch's elastic error file unless `@record` wrote that already."""
    text = "".join(traceback.format_exception(type(error), error, user_traceback(error)))
    name = type(error).__name__
    message = str(error)
    record: dict[str, Any] = {
        "rank": spec.rank,
        "time_mono_ns": time.monotonic_ns(),
        "message": message[:2000],
        "traceback": text[-20000:],
        "frame": user_frame(error),
        "cascade": name in CASCADE_TYPES or any(w in message for w in CASCADE_WORDS),
        "injected": name == "InjectedError",
    }
    if not isinstance(error, SystemExit):
        record["error_type"] = name
    with contextlib.suppress(OSError):
        Path(spec.failure_path).write_text(json.dumps(record))
        if not Path(spec.error_path).exists():
            extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
            Path(spec.error_path).write_text(
                json.dumps({"message": {"message": f"{name}: {message}", "extraInfo": extra}})
            )


def main() -> None:
    """A rank in a fresh interpreter. argv: descriptor of the specification, then page, stacks and imports descriptors."""
    spec_fd, page, stacks, imports = (int(a) for a in sys.argv[1:5])
    with os.fdopen(spec_fd, "rb") as file:
        spec = msgspec.json.decode(file.read(), type=RankSpec)
    adopt_parent(spec.agent_pid)
    become_rank(spec, {"page": page, "stacks": stacks, "imports": imports}, forked=False)
    # `-m` put the working directory first; the script's own folder takes its place.
    del sys.path[0]
    run_user_code(spec)


if __name__ == "__main__":
    main()
