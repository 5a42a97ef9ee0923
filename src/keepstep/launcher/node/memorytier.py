"""The agent's part in memory checkpoints: tells the coordinator what is held, copies a peer's images, fetches for ranks.

Whatever moves or hashes gigabytes runs in threads: a thread of low priority copies for the peer, one image at a time, and a few
fetch what ranks wait for. The event loop only hands out work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from keepstep.launcher import messages as m
from keepstep.launcher.config import RunConfig
from keepstep.launcher.node import imagewire as wire
from keepstep.launcher.node.images import Image, Key, Kind, NodeImages, checked_image
from keepstep.launcher.node.imageserver import ImageServer
from keepstep.records.errors import ChannelError, KeepstepError

COALESCE_S = 0.05
"""How long news are gathered: the ranks of a node keep their images at about the same time."""
NOTE_IMAGES = 256
"""Of one note: 256 times the longest facts and names stay below a message's size."""
UNTOLD_S = 5.0
"""How long a question waits for nodes that have not told a new coordinator what they hold."""
ASK_AGAIN_S = 0.1
FETCHES = 4
"""Images that are fetched at once."""
COPY_NICE = 10


class MemoryOwner(Protocol):
    """What this needs from the launcher."""

    run_id: str
    config: RunConfig

    def say(self, text: str) -> None: ...

    def send(self, make: Callable[[int], m.AgentMessage]) -> asyncio.Future[Any]: ...


class MemoryTier:
    """All methods are for the event loop's thread."""

    def __init__(self, owner: MemoryOwner, sockets: Path, token: bytes | None) -> None:
        config = owner.config
        self.images = NodeImages(enabled=config.memory_tier != "off", on_change=self._on_change)
        self._owner = owner
        self._sockets = sockets
        self._caller = wire.Caller(run_id=owner.run_id, node=config.node, token=token, tls=config.tls)
        self._several = config.nnodes + config.spares > 1 and config.memory_tier != "off"
        """Whether other nodes may ask for images of this one."""
        self._server: ImageServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._quiet = asyncio.Event()
        """The coordinator knows everything."""
        self._quiet.set()
        self._whole = False
        self._orders: dict[str, m.CopyImages] = {}
        """The checkpoint being copied and the newest that came since."""
        self._ordered = asyncio.Event()
        self._asking: dict[tuple[str, str], asyncio.Task[dict[str, Any]]] = {}
        self._fetching: dict[Key, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._pulling: set[socket.socket] = set()
        """Connections on which threads receive."""
        self._said: set[type[Exception]] = set()
        self._fetchers = ThreadPoolExecutor(FETCHES, "keepstep-fetch")
        self._copier = ThreadPoolExecutor(1, "keepstep-copy", _lower_priority)

    def start(self) -> None:
        """Listen for other agents and begin to tell the coordinator. Raises OSError."""
        self._loop = asyncio.get_running_loop()
        if self._several:
            path = None if self._owner.config.endpoints else self._sockets / f"images-{os.getpid()}.sock"
            self._server = ImageServer(self.images, self._caller, path, self._say_from_thread)
        self._tasks = [asyncio.create_task(self._keep_telling()), asyncio.create_task(self._keep_copying())]
        for task in self._tasks:
            task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Training goes on without the memory tier, but not in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._owner.say(f"the memory tier of this node stopped: {type(error).__name__}: {error}")

    async def close(self) -> None:
        """End all of it and give the memory back."""
        for task in [*self._tasks, *self._asking.values(), *self._fetching.values()]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await asyncio.to_thread(self._server.close)
        # The interpreter waits for these threads at its end.
        for sock in list(self._pulling):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        self._copier.shutdown(wait=False, cancel_futures=True)
        self.images.close()

    # ---- what the coordinator knows

    def tell_all(self) -> None:
        """A coordinator welcomed this node: it may be a new one that knows nothing."""
        self._whole = True
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._quiet.clear()

    def _on_change(self) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # closed: the launcher ends
                self._loop.call_soon_threadsafe(self._wake)

    async def _keep_telling(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(COALESCE_S)
            self._news.clear()
            with contextlib.suppress(ChannelError):  # refused: this node was given up, and will be welcomed anew
                await self._tell()
            if not self._news.is_set():
                self._quiet.set()

    async def _tell(self) -> None:
        whole, self._whole = self._whole, False
        added, removed = self.images.take_changes()
        if whole:
            added, removed = self.images.images(), []
        elif not added and not removed:
            return
        address = self._server.address if self._server is not None else ""
        for begin in range(0, max(len(added), len(removed), 1), NOTE_IMAGES):
            part = [_held(image) for image in added[begin : begin + NOTE_IMAGES]]
            first, gone = begin == 0, removed[begin : begin + NOTE_IMAGES]

            def note(i: int, first: bool = first, part: Any = part, gone: Any = gone) -> m.KeepNote:
                return m.KeepNote(id=i, whole=whole and first, address=address, added=part, removed=gone)

            await self._owner.send(note)

    # ---- what ranks ask

    async def kept(self, checkpoint: str, after: str) -> dict[str, Any]:
        """What the job's memories hold (messages.GetKept), with the `tier` of each file from here. Raises ChannelError.

        Ranks of this node that ask for the same at once are answered together.
        """
        question = checkpoint, after
        task = self._asking.get(question)
        if task is None:
            task = self._asking[question] = asyncio.create_task(self._ask_kept(checkpoint, after))
            task.add_done_callback(lambda t: self._asking.pop(question, None) and (t.cancelled() or t.exception()))
        return await asyncio.shield(task)

    async def _ask_kept(self, checkpoint: str, after: str) -> dict[str, Any]:
        # What ranks of this node kept before they ask is told before the question.
        await self._quiet.wait()
        result = await self._ask(lambda i: m.GetKept(id=i, checkpoint=checkpoint, after=after))
        here = {image.file for image in self.images.images() if image.checkpoint == checkpoint}
        for file in result.get("files", ()):
            file["tier"] = "shm" if file["file"] in here else "peer"
        return result

    async def _ask(self, make: Callable[[int], m.AgentMessage]) -> dict[str, Any]:
        """Ask again while a coordinator that has just started does not know everything; not for ever."""
        result: dict[str, Any] = await self._owner.send(make)
        # Counted from the first answer: the question may have waited long for a coordinator to be there at all.
        limit = asyncio.get_running_loop().time() + UNTOLD_S
        while result.pop("untold", 0) and asyncio.get_running_loop().time() < limit:
            await asyncio.sleep(ASK_AGAIN_S)
            result = await self._owner.send(make)
        return result

    async def fetch(self, checkpoint: str, file: str) -> tuple[dict[str, Any], int]:
        """An image from this node's memory, or from another's, which is then held here too.

        Returns {size_bytes, tier, facts} and a read-only descriptor, for the caller to close. Raises ChannelError.
        """
        tier = "shm"
        held = self.images.open(checkpoint, file)
        if held is None:
            tier = "peer"
            await self._fetch_once((checkpoint, file))
            held = self.images.open(checkpoint, file)
        if held is None:
            raise ChannelError(f"{checkpoint}/{file}: in the memory of no node of this job")
        fd, image = held
        return {"size_bytes": image.size_bytes, "tier": tier, "facts": image.facts}, fd

    async def _fetch_once(self, key: Key) -> None:
        task = self._fetching.get(key)
        if task is None:
            task = self._fetching[key] = asyncio.create_task(self._fetch(key))
            task.add_done_callback(lambda t: self._fetching.pop(key, None) and (t.cancelled() or t.exception()))
        await asyncio.shield(task)

    async def _fetch(self, key: Key) -> None:
        if not self._several:
            return
        found = await self._ask(lambda i: m.Locate(id=i, checkpoint=key[0], file=key[1]))
        if not found["holders"]:
            return
        image = checked_image(*key, found["size_bytes"], found["facts"], copy=True)
        problems = []
        for node, address in found["holders"]:
            try:
                await self._in_thread(self._fetchers, image, address, "fetched")
                return
            except (OSError, KeepstepError) as error:
                problems.append(f"node {node}: {error}")
                self._owner.say(f"an image could not be fetched from the memory of node {node}: {error}")
        raise ChannelError("; ".join(problems))

    # ---- copies for a peer

    def copy(self, order: m.CopyImages) -> None:
        """Hold copies of these images. The set in progress is finished first, while its owner still has it; then the newest."""
        checkpoint = order.images[0].checkpoint
        in_progress = {name: o for name, o in list(self._orders.items())[:1] if name != checkpoint}
        self._orders = {**in_progress, checkpoint: order}
        self._ordered.set()

    async def _keep_copying(self) -> None:
        while True:
            await self._ordered.wait()
            checkpoint, order = next(iter(self._orders.items()))
            await self._copy_set(order)
            if self._orders.get(checkpoint) is order:
                del self._orders[checkpoint]
            if not self._orders:
                self._ordered.clear()

    async def _copy_set(self, order: m.CopyImages) -> None:
        held = {image.key for image in self.images.images()}
        for one in order.images:
            if (one.checkpoint, one.file) in held or b'"fingerprint"' not in bytes(one.facts):
                # Without one a copy could not be verified; the rank may say it a little later.
                continue
            try:
                await self._in_thread(self._copier, _image(one), order.address, "peer")
            except (OSError, ValueError, KeepstepError) as error:
                # It may happen at every save: said for the first time that it happens in one way.
                if type(error) not in self._said:
                    self._said.add(type(error))
                    self._owner.say(f"no copy of an image of node {order.node}: {error}")

    async def _in_thread(self, pool: ThreadPoolExecutor, image: Image, address: str, kind: Kind) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(pool, self._pull, image, address, kind)

    def _pull(self, image: Image, address: str, kind: Kind) -> None:
        """In a thread. Raises OSError (no memory) or KeepstepError."""
        fd = self.images.reserve(image, kind)
        try:
            wire.pull(address, image, fd, self._caller, self._pulling, background=kind == "peer")
        except BaseException:
            os.close(fd)
            raise
        self.images.add_copy(fd, image, kind)

    def _say_from_thread(self, text: str) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._owner.say, text)


def _held(image: Image) -> m.HeldImage:
    facts = msgspec.Raw(msgspec.json.encode(image.facts))
    return m.HeldImage(image.checkpoint, image.file, image.size_bytes, facts, image.copy)


def _image(held: m.HeldImage) -> Image:
    """Raises ValueError: what another node says is no more to be trusted with names than a rank."""
    return checked_image(held.checkpoint, held.file, held.size_bytes, msgspec.json.decode(held.facts), copy=True)


def _lower_priority() -> None:
    # Linux gives every thread a nice value of its own (setpriority(2), "C library/kernel differences").
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COPY_NICE)
