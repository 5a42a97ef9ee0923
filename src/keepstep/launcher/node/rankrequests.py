"""What ranks ask their launcher for, passed on to the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from keepstep.launcher import messages as m
from keepstep.launcher.clock import Anchor
from keepstep.launcher.config import RunConfig
from keepstep.launcher.node.memorytier import MemoryTier
from keepstep.launcher.node.nodecycles import NodeCycles


class RequestOwner(Protocol):
    """What this needs from the launcher."""

    run_id: str
    config: RunConfig
    anchor: Anchor
    cycles: NodeCycles
    memory: MemoryTier

    def say(self, text: str) -> None: ...

    def send(self, make: Callable[[int], m.AgentMessage]) -> asyncio.Future[Any]: ...

    def inject(self, cycle: int, spec: str) -> str | None: ...


class RankRequests:
    """The RankHost of the launcher's socket."""

    def __init__(self, owner: RequestOwner) -> None:
        self.run_id = owner.run_id
        self._owner = owner
        self._attached: dict[int, int] = {}

    def begin(self, command: m.StartCycle) -> None:
        """Another cycle begins: none of its ranks has attached."""
        self._attached = {}
        first = command.first_rank
        self._owner.memory.images.begin_cycle(range(first, first + self._owner.config.nproc))

    def inject(self, cycle: int, spec: str) -> str | None:
        """A rank came to the step of an injection that only the launcher can carry out; returns why not, or None."""
        return self._owner.inject(cycle, spec)

    def current_cycle(self) -> int:
        """Number of the cycle whose ranks may talk to this agent."""
        return self._owner.cycles.number

    async def share(self, op: str, cycle: int, request: dict[str, Any]) -> dict[str, Any]:
        """Forward a side-channel request of a rank to the coordinator. Raises ChannelError."""
        match op:
            case "set" | "cas":
                key, value, absent = str(request["key"]), request["value"], op == "cas"
                result = await self._owner.send(
                    lambda i: m.KvSet(id=i, cycle=cycle, key=key, value=value, only_if_absent=absent)
                )
            case "get":
                result = await self._owner.send(lambda i: m.KvGet(id=i, cycle=cycle, key=str(request["key"])))
            case "wait":
                keys, limit = [str(k) for k in request["keys"]], float(request["timeout_s"])
                result = await self._owner.send(lambda i: m.KvWait(id=i, cycle=cycle, keys=keys, timeout_s=limit))
            case "mark_get":
                result = await self._owner.send(lambda i: m.MarkGet(id=i, cycle=cycle, root_id=str(request["root_id"])))
            case "mark_set":
                root, rebase = str(request["root_id"]), str(request.get("rebase") or "")
                mark = m.HighWater(
                    step=int(request["step"]),
                    cycle=int(request["cycle"]),
                    digest=str(request["digest"]),
                    detail=str(request.get("detail") or ""),
                )
                result = await self._owner.send(
                    lambda i: m.MarkSet(id=i, cycle=cycle, root_id=root, mark=mark, rebase=rebase)
                )
            case "kept":
                after = str(request.get("after") or "")
                return await self._owner.memory.kept(str(request.get("checkpoint") or ""), after)
            case _:
                name, step = str(request["checkpoint"]), int(request["step"])
                result = await self._owner.send(lambda i: m.Grant(id=i, cycle=cycle, checkpoint=name, step=step))
        return dict(result or {})

    async def fetch(self, checkpoint: str, file: str) -> tuple[dict[str, Any], int]:
        """See MemoryTier.fetch."""
        return await self._owner.memory.fetch(checkpoint, file)

    async def request(self, cycle: int, rank: int, what: str, reason: str) -> None:
        """A rank asks for the end of the job ("stop"), or for its node to be left out ("exclude"). Raises ChannelError."""
        self._owner.say(f"rank {rank} asks: {what}: {reason}")
        node = self._owner.config.node
        await self._owner.send(
            lambda i: m.WorkloadRequest(id=i, cycle=cycle, what=what, reason=reason, rank=rank, node=node)
        )

    def report(self, cycle: int, rank: int, kind: str, fields: dict[str, Any]) -> None:
        """Take a mark of a rank; its CLOCK_MONOTONIC times become UTC. The rank does not wait for the disk."""
        times: dict[str, int] = {
            k: self._owner.anchor.from_monotonic(int(fields[k])) for k in ("at_ns", "begin_ns", "end_ns") if k in fields
        }
        attrs: dict[str, Any] = {**fields, **times}
        at_ns = attrs.pop("at_ns", None) or attrs.get("end_ns") or self._owner.anchor.now()
        if kind == "attached" and not self._all_attached(rank, at_ns):
            return
        if kind == "quarantined":
            self._owner.say(f"checkpoint {attrs.get('checkpoint')} refused and quarantined: {attrs.get('reason')}")
        if kind == "attached":
            # One message for all ranks of this node: they are many in a large job, and come at once.
            at_ns, attrs = max(self._attached.values()), {"ranks": len(self._attached)}
        self._owner.send(lambda i: m.Note(id=i, cycle=cycle, kind=kind, rank=rank, t_ns=at_ns, attrs=attrs))

    def _all_attached(self, rank: int, at_ns: int) -> bool:
        """A rank called ks.init(): whether it was the last one of this node."""
        cycles = self._owner.cycles
        cycles.expect_steps = True
        if cycles.current is None or rank in self._attached:
            return False
        cycles.current.attached()
        self._attached[rank] = at_ns
        return len(self._attached) == len(cycles.current.ranks)
