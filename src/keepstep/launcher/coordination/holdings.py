"""What the nodes' memories hold of checkpoints, as the agents tell it; and which node copies whose.

Nothing of it is journaled: a coordinator that was started again hears all of it from the agents. Notes come one a node and
change, not one a rank, and cost time in proportion to what they say. Answers stay below a message's size: the newest checkpoints
in sums, or one checkpoint's files in pages.
"""

from __future__ import annotations

import bisect
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from keepstep.checkpoint.format.layout import MARKERS, FolderName, parse_folder_name
from keepstep.launcher import messages as m
from keepstep.launcher.coordination.job import Job
from keepstep.launcher.coordination.topology import order
from keepstep.records.codec import to_json

SHOWN_SETS = 16
PAGE_BYTES = 512 << 10
MAX_IMAGES = 4096
"""Of one node; what it tells beyond is not listed."""
SHOWN_HOLDERS = 8
COMPARED = 64
"""All of them would be 16,384, again after every change, while all nodes ask."""
COPY_BYTES = 512 << 10
"""Of one CopyImages message, far more than a node's ranks write of one checkpoint; what does not fit is not copied."""
RECENT_MARKS = 400

_encoder = msgspec.json.Encoder()


class _Node:
    def __init__(self) -> None:
        self.address = ""
        self.told_by: tuple[int, str] | None = None
        """pid and boot id of the launcher that told all it holds."""
        self.images: dict[tuple[str, str], m.HeldImage] = {}


class _Set:
    """One checkpoint: file -> node -> image."""

    def __init__(self, name: FolderName) -> None:
        self.name = name
        self.files: dict[str, dict[str, m.HeldImage]] = {}
        self.single = 0
        """Files that one node holds."""
        self.size_bytes = 0
        self.summary: msgspec.Raw | None = None
        self.names: list[str] | None = None
        """Of its files, in order; None: to be sorted again."""


class Holdings:
    """The coordinator's book. `tier`: "off", "node", or "peer" (nodes copy each other's images)."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._nodes: dict[str, _Node] = {}
        self._sets: dict[str, _Set] = {}
        self._reached: set[str] = set()
        self._pairs: dict[str, str] = {}
        self._paired_for: tuple[int, int] = (-1, -1)

    def answer(
        self,
        job: Job,
        node: str,
        message: m.KeepNote | m.GetKept | m.Locate,
        now_ns: int,
        send: Callable[[str, m.FromCoordinator], None],
        report: Callable[[str, m.Note], None],
    ) -> str:
        """The encoded reply. `send` tells another node what to copy; `report` takes a mark as if `node` had sent it."""
        result: Any = None
        if isinstance(message, m.KeepNote):
            touched = self._note(node, message)
            if message.whole and node in job.nodes:
                self._nodes[node].told_by = _life(job, node)
            if self._tier == "peer":
                self._order_copies(job, node, message, send)
                for note in self._reaches(job, touched, now_ns):
                    report(node, note)
        elif isinstance(message, m.GetKept):
            result = self.page(message.checkpoint, message.after) if message.checkpoint else {"sets": self.newest()}
            result["untold"] = self.untold(job)
        else:
            result = self.locate(job, node, message.checkpoint, message.file)
            result["untold"] = 0 if result["holders"] else self.untold(job)
        return to_json(m.Reply(epoch=job.epoch, id=message.id, result=result)).decode()

    def forget(self, node: str) -> None:
        """The node is lost, and its memory with it."""
        known = self._nodes.pop(node, None)
        for key in known.images if known is not None else ():
            self._remove(node, key)

    # ---- what is asked

    def untold(self, job: Job) -> int:
        """Nodes that have not said yet what they hold: whoever asks a coordinator that just started asks once more."""
        known = self._nodes
        return sum(node not in known or known[node].told_by != _life(job, node) for node in job.nodes)

    def newest(self) -> list[msgspec.Raw]:
        """The newest checkpoints that are held, newest first: [{checkpoint, files, size_bytes, copied, facts}].

        `copied`: files that two nodes or more hold. `facts`: what its files say alike, as far as the first COMPARED of them go.
        """
        newest = sorted(self._sets.values(), key=lambda s: s.name, reverse=True)
        return [self._summary(s) for s in newest[:SHOWN_SETS]]

    def _summary(self, one: _Set) -> msgspec.Raw:
        if one.summary is None:
            common: dict[str, Any] | None = None
            for held in itertools.islice(one.files.values(), COMPARED):
                facts = msgspec.json.decode(next(iter(held.values())).facts)
                common = facts if common is None else {k: v for k, v in common.items() if k in facts and facts[k] == v}
                if not common:
                    break
            summary = {
                "checkpoint": one.name.text,
                "files": len(one.files),
                "size_bytes": one.size_bytes,
                "copied": len(one.files) - one.single,
                "facts": common or {},
            }
            one.summary = msgspec.Raw(_encoder.encode(summary))
        return one.summary

    def page(self, checkpoint: str, after: str) -> dict[str, Any]:
        """Files of one checkpoint by name: {files: [{file, size_bytes, facts, nodes}], more}. `nodes`: some that hold it."""
        one = self._sets.get(checkpoint)
        if one is None:
            return {"files": [], "more": False}
        if one.names is None:
            one.names = sorted(one.files)
        files: list[msgspec.Raw] = []
        size = 0
        for at in range(bisect.bisect_right(one.names, after), len(one.names)):
            file = one.names[at]
            held = one.files[file]
            image = next(iter(held.values()))
            nodes = list(held)[:SHOWN_HOLDERS]
            raw = _encoder.encode({"file": file, "size_bytes": image.size_bytes, "facts": image.facts, "nodes": nodes})
            size += len(raw)
            if files and size > PAGE_BYTES:
                return {"files": files, "more": True}
            files.append(msgspec.Raw(raw))
        return {"files": files, "more": False}

    def locate(self, job: Job, asking: str, checkpoint: str, file: str) -> dict[str, Any]:
        """Who holds an image: {size_bytes, facts, holders: [[node, address]]}; no holders: nobody does who could send it."""
        one = self._sets.get(checkpoint)
        held = one.files.get(file, {}) if one is not None else {}
        holders = [n for n in held if n != asking and n in job.nodes]
        if not holders:
            return {"holders": []}
        # At random: of an image that all nodes want soon many hold one.
        chosen = random.sample(holders, min(SHOWN_HOLDERS, len(holders)))
        image = held[chosen[0]]
        shown = [[n, self._address(job, n)] for n in chosen]
        return {"size_bytes": image.size_bytes, "facts": image.facts, "holders": shown}

    def _address(self, job: Job, node: str) -> str:
        address = self._nodes[node].address
        if not address.startswith(":"):
            return address
        host = job.nodes[node].next_addr
        return f"[{host}]{address}" if ":" in host else f"{host}{address}"

    # ---- what is told

    def _note(self, node: str, message: m.KeepNote) -> set[str]:
        """Take a note; returns the checkpoints of which more is held now."""
        known = self._nodes.setdefault(node, _Node())
        known.address = message.address or known.address
        if message.whole:
            for key in list(known.images):
                self._drop(node, known, key)
        for checkpoint, file in message.removed:
            self._drop(node, known, (checkpoint, file))
        touched = set()
        for image in message.added:
            if len(known.images) >= MAX_IMAGES and (image.checkpoint, image.file) not in known.images:
                break
            if self._add(node, known, image):
                touched.add(image.checkpoint)
        return touched

    def _add(self, node: str, known: _Node, image: m.HeldImage) -> bool:
        key = image.checkpoint, image.file
        self._drop(node, known, key)
        one = self._sets.get(image.checkpoint)
        if one is None:
            name = parse_folder_name(image.checkpoint)
            if name is None:
                return False
            one = self._sets[image.checkpoint] = _Set(name)
        # A copy of its own: what was decoded shares the whole message's bytes.
        facts = msgspec.Raw(bytes(image.facts))
        image = known.images[key] = msgspec.structs.replace(image, facts=facts)
        held = one.files.get(image.file)
        if held is None:
            held = one.files[image.file] = {}
            one.size_bytes += image.size_bytes
            one.names = None
        held[node] = image
        one.single += {1: 1, 2: -1}.get(len(held), 0)
        one.summary = None
        return True

    def _drop(self, node: str, known: _Node, key: tuple[str, str]) -> None:
        if known.images.pop(key, None) is not None:
            self._remove(node, key)

    def _remove(self, node: str, key: tuple[str, str]) -> None:
        checkpoint, file = key
        one = self._sets[checkpoint]
        held = one.files[file]
        image = held.pop(node)
        one.summary = None
        one.single += {0: -1, 1: 1}.get(len(held), 0)
        if not held:
            del one.files[file]
            one.size_bytes -= image.size_bytes
            one.names = None
        if not one.files:
            del self._sets[checkpoint]

    # ---- copies

    def _order_copies(
        self, job: Job, node: str, message: m.KeepNote, send: Callable[[str, m.FromCoordinator], None]
    ) -> None:
        pairs = self.pairs(job)
        if any(not image.copy for image in message.added):
            self._order(job, node, pairs.get(node), send)
        # One that came back may have missed an order.
        for origin in [o for o, copier in pairs.items() if copier == node] if message.whole else ():
            self._order(job, origin, node, send)

    def _order(self, job: Job, origin: str, copier: str | None, send: Callable[[str, m.FromCoordinator], None]) -> None:
        """Have `copier` copy what `origin` wrote of its newest checkpoint, as far as nobody else holds it."""
        known = self._nodes.get(origin)
        if copier is None or known is None or origin not in job.nodes:
            return
        own = [image for image in known.images.values() if not image.copy]
        if not own:
            return
        newest = max({image.checkpoint for image in own}, key=lambda c: self._sets[c].name)
        images: list[m.HeldImage] = []
        size = 0
        for image in own:
            if image.checkpoint != newest or len(self._sets[newest].files[image.file]) > 1:
                continue
            size += len(image.facts) + len(image.file) + len(image.checkpoint) + 32
            if images and size > COPY_BYTES:
                break
            images.append(image)
        if images:
            send(copier, m.CopyImages(epoch=job.epoch, node=origin, address=self._address(job, origin), images=images))

    def pairs(self, job: Job) -> dict[str, str]:
        """Node -> the node that copies its images, for the present cycle."""
        c = job.cycle
        if c is None:
            return {}
        if self._paired_for != (job.attempt, c.number):
            self._paired_for = (job.attempt, c.number)
            places = {node: job.levels_of(node) for node in c.nodes}
            hosts = {node: host for node, host, _ in c.layout}
            self._pairs = partners(places, hosts)
            if len(c.nodes) == 1 and c.spares:
                self._pairs = {c.nodes[0]: c.spares[0]}
        return self._pairs

    def _reaches(self, job: Job, touched: Iterable[str], now_ns: int) -> list[m.Note]:
        """Marks for checkpoints of which every file is in two nodes' memories now, the marker among them."""
        notes = []
        for checkpoint in touched:
            one = self._sets[checkpoint]
            if one.single or checkpoint in self._reached or not any(marker in one.files for marker in MARKERS):
                continue
            self._reached = {c for c in self._reached if c in self._sets} | {checkpoint}
            if _was_told(job, checkpoint):
                continue
            attrs = {"checkpoint": checkpoint, "step": one.name.step, "tier": "peer", "files": len(one.files)}
            notes.append(m.Note(id=-1, cycle=job.last_cycle, kind="tier_reached", rank=-1, t_ns=now_ns, attrs=attrs))
        return notes


def _life(job: Job, node: str) -> tuple[int, str]:
    return job.nodes[node].pid, job.nodes[node].boot_id


def _was_told(job: Job, checkpoint: str) -> bool:
    """Whether a coordinator before this one said already that peers hold it."""
    recent = (k.attrs for k in job.marks[-RECENT_MARKS:] if k.kind == "tier_reached")
    return any((attrs.get("checkpoint"), attrs.get("tier")) == (checkpoint, "peer") for attrs in recent)


def partners(places: Mapping[str, Sequence[str]], hosts: Mapping[str, str]) -> dict[str, str]:
    """Node -> the node that copies its images: in another failure domain where there is one, and everybody copies one node.

    A domain is a group of the innermost level (leaf, NVLink domain), or a host where nothing is known of the topology. The nodes
    stand in a ring in topology order, so domains are contiguous; a step as long as the largest domain leaves every domain, as
    long as that holds no more than half of the nodes. {} for one node.
    """
    if len(places) < 2:
        return {}
    domains = {node: tuple(levels) or (hosts[node],) for node, levels in places.items()}
    ring = order(domains)
    step = min(max(Counter(domains.values()).values()), len(ring) // 2)
    return {node: ring[(at + step) % len(ring)] for at, node in enumerate(ring)}
