"""The zygote: a clean interpreter with torch already imported, from which ranks are forked.

Start: `python -m keepstep.launcher.ranks.zygote FD AGENT_PID`, with the modules to import as JSON on the control socket FD. It
stays a process without threads and without CUDA; otherwise it refuses to fork and the agent starts fresh interpreters instead.

Control frames (length and JSON, descriptors as SCM_RIGHTS):
  agent -> zygote  {"preload": [..], "trial": [..]}                      once
  zygote -> agent  {"ready": true, "skipped": {module: reason}, ...}      once
  agent -> zygote  {"ranks": [RankSpec...]} with 5 descriptors a rank (stdout, stderr, page, stacks, imports)
  zygote -> agent  {"pids": [..]} or {"refused": reason}
  agent -> zygote  {"store": port or 0, "agent_pid": pid}
  zygote -> agent  {"pids": [pid], "port": port} or {"refused": reason}
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
import time
from typing import Any

import msgspec

from keepstep.launcher.ranks.rankmain import RankSpec, adopt_parent, become_rank, run_user_code
from keepstep.launcher.ranks.storehost import host_store

FDS_PER_RANK = 5
FD_NAMES = ("stdout", "stderr", "page", "stacks", "imports")
MAX_FDS = 253  # SCM_MAX_FD
DEFAULT_PRELOAD = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch.utils.data.distributed",
    "torch.multiprocessing",
    "multiprocessing.resource_tracker",
    "keepstep.trainer",
    "keepstep.checkpoint.torch.read",
    "keepstep.checkpoint.torch.state",
    "cryptography.hazmat.primitives.asymmetric.ec",
    "cryptography.hazmat.primitives.serialization",
)
RANK_VARIABLES = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "CUDA_VISIBLE_DEVICES",
    }
)


def send_frame(sock: socket.socket, message: dict[str, Any], fds: list[int] | None = None) -> None:
    """Send one frame; descriptors travel with its first byte, more than one message can hold in several rounds."""
    body = json.dumps(message).encode()
    header = struct.pack(">II", len(body), len(fds or []))
    pending = list(fds or [])
    if pending:
        sock.sendall(header)
        while pending:
            socket.send_fds(sock, [b"F"], pending[:MAX_FDS])
            pending = pending[MAX_FDS:]
        sock.sendall(body)
    else:
        sock.sendall(header + body)


def recv_frame(sock: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive one frame and its descriptors; None when the other end is gone."""
    header = _read(sock, 8)
    if header is None:
        return None
    length, count = struct.unpack(">II", header)
    fds: list[int] = []
    while len(fds) < count:
        data, new, _, _ = socket.recv_fds(sock, 1, MAX_FDS)
        if not data:
            return None
        fds.extend(new)
    body = _read(sock, length)
    return None if body is None else (json.loads(body), fds)


def _read(sock: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = sock.recv(count - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def threads() -> int:
    """Number of threads of this process."""
    return len(os.listdir("/proc/self/task"))


def cuda_initialised() -> bool:
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.cuda.is_initialized())


def why_not_fork() -> str | None:
    """The reason why forking a rank from this process would be unsafe, or None."""
    if cuda_initialised():
        return "CUDA is initialised in the zygote (a preloaded module did it)"
    count = threads()
    return f"{count - 1} unexpected threads run in the zygote (a preloaded module started them)" if count > 1 else None


def _state() -> dict[str, Any]:
    handlers = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        handlers[int(number)] = handler if isinstance(handler, int) else id(handler)
    return {
        "threads": threads(),
        "fds": len(os.listdir("/proc/self/fd")),
        "handlers": handlers,
        "cuda": cuda_initialised(),
    }


def trial_imports(modules: list[str]) -> dict[str, str]:
    """Import each module in a throw-away child and return those that must not be preloaded, with the reason.

    A module passes when its import leaves threads, descriptors, signal handlers and CUDA alone and reads no rank variable.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        os.nice(19)
        with open(write_end, "w") as out:
            _try_each(modules, out)
        os._exit(0)
    os.close(write_end)
    verdicts: dict[str, str] = {}
    with open(read_end) as results:
        for line in results:
            module, reason = json.loads(line)
            verdicts[module] = reason
    os.waitpid(pid, 0)
    return {m: verdicts.get(m, "its import ended the process") for m in modules if verdicts.get(m, "died") != ""}


def _try_each(modules: list[str], out: Any) -> None:
    read: set[str] = set()
    original = os._Environ.__getitem__

    def recording(self: Any, key: Any) -> Any:
        read.add(key if isinstance(key, str) else str(key))
        return original(self, key)

    os._Environ.__getitem__ = recording  # type: ignore[method-assign]
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    before = _state()
    for module in modules:
        read.clear()
        reason = ""
        try:
            importlib.import_module(module)
        except BaseException as error:
            reason = f"import failed: {type(error).__name__}: {error}"
        after = _state()
        changed = [k for k in before if before[k] != after[k]]
        if changed:
            reason = f"its import changes {', '.join(changed)}"
        elif read & RANK_VARIABLES:
            reason = f"its import reads {', '.join(sorted(read & RANK_VARIABLES))}"
        before = after
        out.write(json.dumps([module, reason]) + "\n")
        out.flush()


def preload(modules: list[str], trial: list[str]) -> dict[str, str]:
    """Import `modules`, then those of `trial` that a throw-away child found harmless. Returns what was skipped and why."""
    skipped: dict[str, str] = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            skipped[module] = f"import failed: {error}"
    if trial:
        skipped |= trial_imports(trial)
        for module in trial:
            if module not in skipped:
                try:
                    importlib.import_module(module)
                except Exception as error:
                    skipped[module] = f"import failed: {error}"
    return skipped


def fork_ranks(specs: list[RankSpec], fds: list[int], control: socket.socket) -> tuple[list[int], RankSpec | None]:
    """Fork all ranks through one intermediate process, so that they are re-parented to the agent.

    In the zygote returns (pids, None); in a rank it returns ([], its specification).
    """
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        pids = []
        for index, spec in enumerate(specs):
            pid = os.fork()
            if pid == 0:
                own = fds[index * FDS_PER_RANK : (index + 1) * FDS_PER_RANK]
                # detach: the socket object must not close that number again when the rank's interpreter ends.
                _enter_rank(spec, own, [read_end, write_end, control.detach(), *(f for f in fds if f not in own)])
                return [], spec
            pids.append(pid)
        os.write(write_end, json.dumps(pids).encode())
        os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        data = pipe.read()
    os.waitpid(middle, 0)
    return (json.loads(data) if data else []), None


def _enter_rank(spec: RankSpec, own: list[int], close: list[int]) -> None:
    for fd in close:
        os.close(fd)
    adopt_parent(spec.agent_pid)
    named = dict(zip(FD_NAMES, own, strict=True))
    for name, target in (("stdout", 1), ("stderr", 2)):
        fd = named.pop(name)
        os.dup2(fd, target)
        os.close(fd)
    become_rank(spec, named, forked=True)


def fork_store(port: int, agent_pid: int, control: socket.socket) -> dict[str, Any]:
    """Fork a process that hosts one cycle's TCPStore and listens before any rank is started.

    Ranks then only connect, as under torchrun's own agent: none of them can come too early and lose its retry delay. Port 0 takes
    a free one. The process ends with the agent.
    """
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        pid = os.fork()
        if pid != 0:
            os._exit(0)
        os.close(read_end)
        os.close(control.detach())
        host_store(port, agent_pid, write_end)
    os.close(write_end)
    os.waitpid(middle, 0)
    with open(read_end, "rb") as pipe:
        answer = pipe.readline()
    result: dict[str, Any] = json.loads(answer) if answer else {"refused": "the store's process ended"}
    return result


def serve(control: socket.socket) -> RankSpec | None:
    """Answer fork requests until the agent is gone (None), or return in a forked rank with its specification."""
    while True:
        frame = recv_frame(control)
        if frame is None:
            return None
        message, fds = frame
        if "store" in message:
            reason = why_not_fork()
            send_frame(
                control, {"refused": reason} if reason else fork_store(message["store"], message["agent_pid"], control)
            )
            continue
        specs = msgspec.convert(message["ranks"], list[RankSpec])
        reason = why_not_fork()
        if reason is not None:
            send_frame(control, {"refused": reason})
        else:
            pids, spec = fork_ranks(specs, fds, control)
            if spec is not None:
                return spec
            send_frame(control, {"pids": pids} if len(pids) == len(specs) else {"refused": "fork failed"})
        for fd in fds:
            os.close(fd)


def main() -> None:
    """Entry point of the zygote process."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    frame = recv_frame(control)
    if frame is None:
        return
    began = time.monotonic()
    # A polling import: NVML answers "is there a GPU" without initialising the driver in a process that forks.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    request = frame[0]
    skipped = preload(request["preload"], request["trial"])
    gc.collect()
    gc.freeze()
    ready = {
        "ready": True,
        "modules": len(sys.modules),
        "skipped": skipped,
        "seconds": time.monotonic() - began,
        "why_not_fork": why_not_fork(),
        "imported": sorted(sys.modules),
    }
    send_frame(control, ready)
    spec = serve(control)
    if spec is None:
        os._exit(0)
    # A rank from here on. Leaving main normally gives it an ordinary interpreter exit: handlers run, output is flushed.
    del sys.path[0]
    run_user_code(spec)


if __name__ == "__main__":
    main()
