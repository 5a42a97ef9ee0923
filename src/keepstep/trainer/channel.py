"""The side channel: votes, digests, commits and decisions, apart from the training's process groups.

One small interface over three back-ends: the agent's Unix socket under keepstep, an own prefixed TCPStore under
torchrun, and memory for one process. Every call may be made from several threads at once; a wait in one never holds up
another, because each call has a connection of its own for as long as it lasts.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import Enum
from typing import Any, Final, Literal, Protocol, TypeAlias

import msgspec

from keepstep.checkpoint.exchange import Exchange, Fetched, HighWater, KeptFile, KeptSet, NoRoomError, NoStoreError
from keepstep.records import frames
from keepstep.records.errors import ChannelError, ConfigError
from keepstep.trainer.ownmemory import MemoryCalls, OwnMemory

CALL_TIMEOUT_S = 660.0
"""How long one request may take that does not wait for somebody else: longer than launchers wait for a coordinator."""


class _Absent(Enum):
    ABSENT = "absent"


ABSENT: Final = _Absent.ABSENT
Absent: TypeAlias = Literal[_Absent.ABSENT]
"""What `get` returns for a key that was never set; None is a value."""


class Channel(Exchange, Protocol):
    """What all ranks of one cycle share. Keys are texts, values JSON values; every method raises ChannelError.

    `wait` at its timeout names the keys that are missing. `report` is kept by nobody without a launcher, `grant` is always True
    then, and memory is this process's own.
    """

    def get(self, key: str) -> Any | Absent:
        """The value of `key`, or ABSENT."""

    def cas(self, key: str, value: Any) -> Any:
        """Set `key` unless it is set; return the value that now holds."""

    def request(self, what: str, reason: str) -> bool:
        """Ask the launcher to end this cycle; `what` as frames.py says. False: there is no launcher, and nothing was done."""


def _encode(value: Any) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ChannelError(f"not a JSON value: {error}") from None


def _timed_out(keys: Sequence[str], missing: Sequence[str], timeout_s: float) -> ChannelError:
    shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return ChannelError(f"side channel: {len(missing)} of {len(keys)} keys are missing after {timeout_s:g} s: {shown}")


class _Unsupervised(MemoryCalls):
    """The part of a channel that a launcher would answer: no timeline to report to, nobody to refuse a commit."""

    _memory: OwnMemory

    def __init__(self) -> None:
        self._memory = OwnMemory()

    def report(self, kind: str, fields: Mapping[str, Any]) -> None:
        _encode(dict(fields))

    def grant(self, checkpoint: str, step: int) -> bool:
        return True

    def request(self, what: str, reason: str) -> bool:
        return False

    def mark_get(self, root_id: str) -> HighWater | None:
        raise NoStoreError("there is no launcher whose journal keeps a high-water mark")

    def mark_set(self, root_id: str, mark: HighWater, rebase: str = "") -> None:
        raise NoStoreError("there is no launcher whose journal keeps a high-water mark")


class MemoryChannel(_Unsupervised):
    """The channel of one process; threads that play ranks share one object."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: Any) -> None:
        text = _encode(value)
        with self._changed:
            self._values[key] = text
            self._changed.notify_all()

    def get(self, key: str) -> Any | Absent:
        with self._changed:
            text = self._values.get(key)
        return ABSENT if text is None else json.loads(text)

    def cas(self, key: str, value: Any) -> Any:
        text = _encode(value)
        with self._changed:
            held = self._values.setdefault(key, text)
            self._changed.notify_all()
        return json.loads(held)

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, Any]:
        with self._changed:
            if not self._changed.wait_for(lambda: all(key in self._values for key in keys), timeout_s):
                raise _timed_out(keys, [key for key in keys if key not in self._values], timeout_s)
            return {key: json.loads(self._values[key]) for key in keys}

    def close(self) -> None:
        """Give the memory of its buffers back."""
        self._memory.close()


class _Pool:
    """Connections that are lent to one call at a time and come back unless the call failed."""

    def __init__(self, make: Callable[[], Any], discard: Callable[[Any], None]) -> None:
        self._make = make
        self._discard = discard
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    @contextmanager
    def lend(self) -> Iterator[Any]:
        with self._lock:
            if self._is_closed():
                raise ChannelError("side channel: closed")
            if self._pid != os.getpid():
                # A forked child (data loader worker) must not talk on its parent's connections.
                self._idle, self._pid = [], os.getpid()
            item = self._idle.pop() if self._idle else None
        if item is None:
            item = self._make()
        try:
            yield item
        except BaseException:
            self._discard(item)
            raise
        with self._lock:
            keep = not self._is_closed()
            if keep:
                self._idle.append(item)
        if not keep:
            self._discard(item)

    def _is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        for item in idle:
            self._discard(item)


class StoreChannel(_Unsupervised):
    """The channel under torchrun: an own TCPStore client with prefixed keys, one clone for each call in progress."""

    def __init__(self, store: Any, prefix: str) -> None:
        """`store` is a torch.distributed Store; it is only cloned, never used itself. All keys begin with `prefix`."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        super().__init__()
        self._root: Any = PrefixStore(prefix, store)
        self._clone_lock = threading.Lock()
        self._pool = _Pool(self._clone, lambda _store: None)

    @classmethod
    def from_environment(cls, run_id: str, *, connect_timeout_s: float = 300.0) -> StoreChannel:
        """Connect to the store that MASTER_ADDR and MASTER_PORT name.

        Under torchrun its agent usually hosts that store (TORCHELASTIC_USE_AGENT_STORE=True). Otherwise rank 0 hosts
        it, multi-tenant: a later `init_process_group` in the same process, which asks for the same port, then shares
        the server. Raises ConfigError when a variable is missing, ChannelError when nobody answers.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        try:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        except (KeyError, ValueError) as error:
            raise ConfigError(f"several ranks, but the environment is not torchrun's: {error}") from None
        agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                host,
                port,
                world_size,
                is_master=rank == 0 and not agent_hosts,
                timeout=timedelta(seconds=connect_timeout_s),
                wait_for_workers=False,
                multi_tenant=not agent_hosts,
            )
        except (RuntimeError, OSError) as error:
            raise ChannelError(f"side channel: no store answers at {host}:{port}: {error}") from error
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(store, f"keepstep/{run_id}/{life}")

    def _clone(self) -> Any:
        with self._clone_lock:
            return self._root.clone()

    @contextmanager
    def _store(self, what: str) -> Iterator[Any]:
        try:
            with self._pool.lend() as store:
                yield store
        except (RuntimeError, OSError) as error:  # torch's DistError family derives from RuntimeError
            raise ChannelError(f"side channel: {what} failed: {error}") from error

    def set(self, key: str, value: Any) -> None:
        text = _encode(value)
        with self._store(f"set {key}") as store:
            store.set(key, text)

    def get(self, key: str) -> Any | Absent:
        with self._store(f"get {key}") as store:
            # Keys are never deleted here, so what the check has seen the get finds.
            return json.loads(store.get(key)) if store.check([key]) else ABSENT

    def cas(self, key: str, value: Any) -> Any:
        text = _encode(value)
        with self._store(f"cas {key}") as store:
            return json.loads(store.compare_set(key, "", text))

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, Any]:
        if not keys:
            return {}
        from torch.distributed import DistError

        with self._store(f"wait for {len(keys)} keys") as store:
            missing: list[str] = []
            if not store.check(list(keys)):
                try:
                    store.wait(list(keys), timedelta(seconds=max(timeout_s, 0.001)))
                except DistError:
                    missing = [key for key in keys if not store.check([key])]
            if missing:
                raise _timed_out(keys, missing, timeout_s)
            return dict(zip(keys, map(json.loads, store.multi_get(list(keys))), strict=True))

    def close(self) -> None:
        """Drop the clones, and give the memory of the buffers back."""
        self._pool.close()
        self._memory.close()


class AgentChannel:
    """The channel under keepstep: the agent's Unix socket, as keepstep.records.frames describes it."""

    def __init__(self, path: str, *, run_id: str, cycle: int, rank: int, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Connects at the first call. `timeout_s` bounds each request, over and above what a wait asks for."""
        self._path = path
        self._hello = {"op": "hello", "run_id": run_id, "cycle": cycle, "rank": rank}
        self._timeout_s = timeout_s
        self._pool = _Pool(self._connect, socket.socket.close)

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.settimeout(self._timeout_s)
            sock.connect(self._path)
            sock.sendall(frames.pack({**self._hello, "pid": os.getpid()}))
            reply = frames.recv_frame(sock)
            if not reply.get("ok"):
                raise ChannelError(f"side channel: the agent refused this rank: {reply.get('error')}")
        except BaseException:
            sock.close()
            raise
        return sock

    def _call(self, request: dict[str, Any], *, extra_s: float = 0.0) -> dict[str, Any]:
        op = request["op"]
        try:
            data = frames.pack(request)
        except (TypeError, ValueError) as error:
            raise ChannelError(f"side channel: {op}: {error}") from None
        try:
            with self._pool.lend() as sock:
                sock.settimeout(self._timeout_s + extra_s)
                sock.sendall(data)
                reply = frames.recv_frame(sock)
        except (OSError, ValueError, struct.error) as error:
            raise ChannelError(f"side channel: {op} failed: {error or type(error).__name__}") from error
        if not reply.get("ok") and reply.get("error") != "timeout":
            raise ChannelError(f"side channel: {op} was refused: {reply.get('error')}")
        return reply

    def set(self, key: str, value: Any) -> None:
        _encode(value)
        self._call({"op": "set", "key": key, "value": value})

    def get(self, key: str) -> Any | Absent:
        reply = self._call({"op": "get", "key": key})
        return reply.get("value") if reply.get("found") else ABSENT

    def cas(self, key: str, value: Any) -> Any:
        _encode(value)
        return self._call({"op": "cas", "key": key, "value": value}).get("value")

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, Any]:
        if not keys:
            return {}
        reply = self._call({"op": "wait", "keys": list(keys), "timeout_s": timeout_s}, extra_s=timeout_s)
        if not reply.get("ok"):
            raise _timed_out(keys, list(reply.get("missing") or keys), timeout_s)
        values = reply.get("values") or {}
        return {key: values[key] for key in keys}

    def report(self, kind: str, fields: Mapping[str, Any]) -> None:
        _encode(dict(fields))
        self._call({"op": "report", "kind": kind, "fields": dict(fields)})

    def grant(self, checkpoint: str, step: int) -> bool:
        return bool(self._call({"op": "grant", "checkpoint": checkpoint, "step": step}).get("granted"))

    def request(self, what: str, reason: str) -> bool:
        self._call({"op": "request", "what": what, "reason": reason})
        return True

    def buffer(self, name: str, size_bytes: int) -> int:
        reply, fd = self._call_for_fd({"op": "buffer", "name": name, "size_bytes": size_bytes})
        if os.fstat(fd).st_size < size_bytes:
            os.close(fd)
            raise ChannelError(f"side channel: no buffer of {size_bytes} bytes: {reply}")
        return fd

    def keep(self, buffer: str, checkpoint: str, file: str, size_bytes: int, facts: Mapping[str, Any]) -> bool:
        what = {"buffer": buffer, "checkpoint": checkpoint, "file": file, "size_bytes": size_bytes}
        _encode(dict(facts))
        return bool(self._call({"op": "keep", **what, "facts": dict(facts)}).get("kept"))

    def unkeep(self, buffer: str) -> None:
        self._call({"op": "unkeep", "buffer": buffer})

    def kept(self) -> list[KeptSet]:
        return [msgspec.convert(one, KeptSet) for one in self._call({"op": "kept"})["sets"]]

    def kept_files(self, checkpoint: str) -> list[KeptFile]:
        found: list[KeptFile] = []
        more = True
        while more:
            after = found[-1].file if found else ""
            page = self._call({"op": "kept", "checkpoint": checkpoint, "after": after})
            found += [msgspec.convert({"checkpoint": checkpoint, **one}, KeptFile) for one in page["files"]]
            more = bool(page["more"])
        return found

    def fetch(self, checkpoint: str, file: str) -> Fetched:
        reply, fd = self._call_for_fd({"op": "fetch", "checkpoint": checkpoint, "file": file})
        return Fetched(fd=fd, size_bytes=reply["size_bytes"], tier=reply["tier"], facts=reply["facts"])

    def mark_get(self, root_id: str) -> HighWater | None:
        return msgspec.convert(self._call({"op": "mark_get", "root_id": root_id})["mark"], HighWater | None)

    def mark_set(self, root_id: str, mark: HighWater, rebase: str = "") -> None:
        self._call({"op": "mark_set", "root_id": root_id, **msgspec.to_builtins(mark), "rebase": rebase})

    def _call_for_fd(self, request: dict[str, Any]) -> tuple[dict[str, Any], int]:
        op, data = request["op"], frames.pack(request)
        try:
            with self._pool.lend() as sock:
                sock.settimeout(self._timeout_s)
                sock.sendall(data)
                reply, fds = frames.recv_frame_with_fds(sock)
        except (OSError, ValueError, struct.error) as error:
            raise ChannelError(f"side channel: {op} failed: {error or type(error).__name__}") from error
        if not reply.get("ok") or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            kind = NoRoomError if reply.get("no_room") else ChannelError
            raise kind(f"side channel: {op} was refused: {reply.get('error') or reply}")
        return reply, fds[0]

    def inject(self, spec: str) -> None:
        """Ask the launcher to carry out an injection (JSON of keepstep.records.inject.Injection). Raises ChannelError."""
        self._call({"op": "inject", "spec": spec})

    def close(self) -> None:
        """Close the idle connections; ones in use close when their call ends."""
        self._pool.close()


class ScopedChannel(MemoryCalls):
    """A view of `channel` in which every key begins with `prefix` and a slash."""

    def __init__(self, channel: Channel, prefix: str) -> None:
        self._channel = channel
        self._prefix = f"{prefix}/"
        self._memory = channel

    def set(self, key: str, value: Any) -> None:
        self._channel.set(self._prefix + key, value)

    def get(self, key: str) -> Any | Absent:
        return self._channel.get(self._prefix + key)

    def cas(self, key: str, value: Any) -> Any:
        return self._channel.cas(self._prefix + key, value)

    def wait(self, keys: Sequence[str], timeout_s: float) -> dict[str, Any]:
        values = self._channel.wait([self._prefix + key for key in keys], timeout_s)
        return {key: values[self._prefix + key] for key in keys}

    def report(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._channel.report(kind, fields)

    def grant(self, checkpoint: str, step: int) -> bool:
        return self._channel.grant(checkpoint, step)

    def request(self, what: str, reason: str) -> bool:
        return self._channel.request(what, reason)

    def mark_get(self, root_id: str) -> HighWater | None:
        return self._channel.mark_get(root_id)

    def mark_set(self, root_id: str, mark: HighWater, rebase: str = "") -> None:
        self._channel.mark_set(root_id, mark, rebase)


def scoped(channel: Channel, prefix: str) -> ScopedChannel:
    """`channel` with all keys below `prefix`."""
    return ScopedChannel(channel, prefix)


def open_decisions(channel: Channel) -> Channel:
    """Where shared decisions of a supervised rank are kept, so that training goes on while the coordinator is away.

    All ranks of a cycle must choose alike: the store of the cycle, where the launcher hosts it; memory for a job of one rank; else
    `channel`. Raises ChannelError.
    """
    env = os.environ
    if env.get("WORLD_SIZE") == "1":
        return MemoryChannel()
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and isinstance(channel, AgentChannel):
        return StoreChannel.from_environment(env[frames.ENV_RUN_ID])
    return channel


def open_channel() -> MemoryChannel | StoreChannel | AgentChannel:
    """The channel this process's environment asks for: the agent's socket, else a store for several ranks, else memory.

    Raises ConfigError (environment incomplete) or ChannelError (nobody answers).
    """
    env = os.environ
    path = env.get(frames.ENV_AGENT_SOCKET)
    if path:
        try:
            return AgentChannel(
                path, run_id=env[frames.ENV_RUN_ID], cycle=int(env[frames.ENV_CYCLE]), rank=int(env["RANK"])
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"{frames.ENV_AGENT_SOCKET} is set, but the rest of the environment is not: {error}"
            ) from None
    if int(env.get("WORLD_SIZE", "1")) > 1:
        return StoreChannel.from_environment(env.get(frames.ENV_RUN_ID) or env.get("TORCHELASTIC_RUN_ID") or "local")
    return MemoryChannel()
