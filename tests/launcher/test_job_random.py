"""Random lives of a job: agents, losses, rejoins and coordinators that die in any order keep what must always hold.

The agents here do what real ones do (obey the newest cycle, end old ranks before new ones start, repeat what was not answered),
and the coordinator calls a node lost only when its ranks are dead, as leases guarantee (test_leases, test_guardian).
"""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.launcher import messages as m
from keepstep.launcher.coordination.state import JobShape
from tests.launcher.lives import (
    Lead,
    Marker,
    dump,
    failure,
    fault,
    hello,
    note,
    replayed,
    request,
    shape,
    started,
    stopped,
)

NODES = "abcdef"
SHAPES = [
    shape(1),
    shape(2),
    shape(2, spares=1, marker_file=True),
    shape(2, spares=2, max_restarts=30, max_no_progress_cycles=0),
    shape(4, min_nodes=2, max_restarts=30),
    shape(4, min_nodes=2, replica_size=4, spares=1, max_no_progress_cycles=0),
]


class Agent:
    """One launcher: what it runs, and what it has said that nobody answered yet."""

    def __init__(self, node: str, pid: int) -> None:
        self.node = node
        self.pid = pid
        self.cycle = -1
        self.live: range | None = None
        """Its ranks that run now."""
        self.fenced = False
        self.ended = False
        self.outbox: list[Any] = []

    def hello(self, problems: list[str]) -> m.Hello:
        message = hello(self.node, pid=self.pid, fenced=self.fenced, cycle=self.cycle, problems=problems)[1]
        assert isinstance(message, m.Hello)
        return message

    def end_ranks(self, status: int = -9) -> None:
        """No process of its cycle is left; it will say so."""
        if self.live is not None:
            statuses = dict.fromkeys(self.live, status)
            failures = [failure(r, status, stopped_by_us=status == -15) for r in self.live if status]
            self.outbox.append(stopped(self.node, self.cycle, statuses, *failures, step=self.cycle + 1)[1])
            self.live = None


class World:
    """Agents around one coordinator, which may be replaced. `check` holds after everything that happens."""

    def __init__(self, run_dir: Path, of: JobShape, rng: random.Random) -> None:
        self.run_dir = run_dir
        self.shape = of
        self.rng = rng
        self.lead = Lead(run_dir, of)
        self.agents: dict[str, Agent] = {}
        self.pids = 100
        self.told: dict[int, tuple[Any, ...]] = {}
        """What agents were told about each cycle."""
        self.last_cycle = -1

    # ---- what may happen

    def step(self) -> None:
        kinds = (
            "deliver",
            "obey",
            "connect",
            "cut",
            "lease",
            "kill",
            "crash",
            "fail",
            "ask",
            "marker",
            "start",
            "note",
        )
        weights = (60, 60, 40, 3, 6, 2, 4, 3, 0.5, 2, 20, 6)
        getattr(self, self.rng.choices(kinds, weights)[0])()
        self.check()

    def pick(self, *, connected: bool | None = None, live: bool = False) -> Agent | None:
        here = [
            a
            for a in self.agents.values()
            if not a.ended
            and (connected is None or (a.node in self.lead.connected) == connected)
            and (a.live is not None or not live)
        ]
        return self.rng.choice(here) if here else None

    def start(self) -> None:
        """A launcher begins on a host that has none."""
        free = [n for n in NODES if n not in self.agents]
        if free:
            self.pids += 1
            node = self.rng.choice(free)
            self.agents[node] = Agent(node, self.pids)

    def connect(self) -> None:
        agent = self.pick(connected=False)
        if agent is None:
            return
        message = agent.hello(["bad"] if self.rng.random() < 0.05 else [])
        if self.take(agent.node, message) is None:
            # It may be that the welcome never comes, and the same is said again.
            if self.rng.random() < 0.2:
                self.lead.connected.discard(agent.node)
            else:
                agent.fenced = False

    def cut(self) -> None:
        if (agent := self.pick(connected=True)) is not None:
            self.lead.connected.discard(agent.node)

    def lease(self) -> None:
        """A node is out of touch until its lease is over: its ranks are dead first, then it is called lost."""
        agent = self.pick(connected=False)
        if agent is not None and self.shape.movable:
            if agent.live is not None:
                agent.fenced = True
                agent.end_ranks()
            if self.rng.random() < 0.7:
                self.take(agent.node, None)

    def kill(self) -> None:
        """A launcher dies, its ranks with it. Its guardian may say so; else another launcher or the lease will tell."""
        agent = self.pick()
        if agent is not None:
            del self.agents[agent.node]
            self.lead.connected.discard(agent.node)
            if self.rng.random() < 0.6:
                self.take(agent.node, None)

    def crash(self) -> None:
        """The coordinator dies while it takes in some message, and any whole part of what that wrote is on the disk."""
        path = self.lead.journal.path
        before = path.stat().st_size
        agent = self.pick(connected=True)
        if agent is not None and agent.outbox:
            self.lead.take((agent.node, agent.outbox[0]))
        after = path.stat().st_size
        self.lead.close()
        os.truncate(path, self.rng.randint(before, after))
        marker = self.lead.marker
        self.lead = Lead(self.run_dir, self.shape, max(self.lead.job.attempt, 0), marker)

    def deliver(self) -> None:
        agent = self.pick(connected=True)
        while agent is not None and agent.outbox and self.rng.random() < 0.9:
            message = agent.outbox[0]
            self.take(agent.node, message)
            if self.rng.random() < 0.9:
                # Else the answer is lost, and the message comes again.
                agent.outbox.pop(0)

    def obey(self) -> None:
        agent = self.pick(connected=True)
        if agent is None:
            return
        match command := self.lead.job.command_for(agent.node):
            case m.StartCycle():
                self.start_ranks(agent, command)
            case m.StopCycle() if command.cycle == agent.cycle:
                agent.end_ranks(-15)
            case m.StopCycle() if command.cycle > agent.cycle:
                agent.cycle = command.cycle
                agent.outbox.append(stopped(agent.node, command.cycle, {})[1])
            case m.AskStop() if command.cycle == agent.cycle:
                agent.end_ranks(0)
            case m.AskStop() if command.cycle > agent.cycle:
                agent.cycle = command.cycle
                agent.outbox.append(stopped(agent.node, command.cycle, {})[1])
            case m.End():
                agent.end_ranks()
                agent.outbox.clear()
                agent.ended = True

    def start_ranks(self, agent: Agent, command: m.StartCycle) -> None:
        if command.cycle <= agent.cycle:
            return
        agent.end_ranks()
        agent.cycle = command.cycle
        ranks = range(command.first_rank, command.first_rank + 2)
        seen = (command.world_size, command.master_port, tuple(tuple(span) for span in command.node_spans))
        # Whatever coordinator tells it, a number means one layout; and ranks of two cycles never run at a time.
        assert self.told.setdefault(command.cycle, seen) == seen
        others = [a for a in self.agents.values() if a is not agent and a.live is not None]
        assert all(a.cycle == command.cycle for a in others), f"{command.cycle} beside {[a.cycle for a in others]}"
        assert not any(set(a.live or ()) & set(ranks) for a in others)
        agent.live = ranks
        agent.outbox.append(started(agent.node, command.cycle, list(ranks))[1])
        agent.outbox += [note(agent.node, command.cycle, r, "attached", 900 + r)[1] for r in ranks]

    def fail(self) -> None:
        agent = self.pick(live=True)
        if agent is not None and agent.live is not None:
            rank = self.rng.choice(agent.live)
            agent.outbox.append(fault(agent.node, agent.cycle, rank)[1])
            agent.end_ranks(self.rng.choice([-9, -11, 1]))

    def ask(self) -> None:
        """A rank asks for its node to be left out; a person does; rarely, someone wants it all to stop."""
        agent = self.pick(live=True)
        if agent is not None and agent.live is not None:
            what = self.rng.choices(["exclude", "operator", "stop", "signal"], [6, 3, 1, 1])[0]
            if what == "operator":
                person = m.Operator(id=1, what="exclude", run_id="run-1", node=agent.node)
                self.take("", person)
            elif what == "signal":
                agent.outbox.append(m.StopRequest(id=1, signum=15, node=agent.node))
            else:
                agent.outbox.append(request(agent.node, agent.cycle, what, agent.live[0])[1])

    def note(self) -> None:
        agent = self.pick(live=True)
        if agent is not None and agent.live is not None:
            step = self.rng.randint(1, 50)
            t_ns = 1_000 * (agent.cycle + 1) + step
            agent.outbox.append(
                self.rng.choice(
                    [
                        note(agent.node, agent.cycle, agent.live[0], "committed", t_ns, step=step, checkpoint="c")[1],
                        note(agent.node, agent.cycle, agent.live[0], "restored", t_ns, step=step, source="disk")[1],
                        m.Beat(id=1, cycle=agent.cycle, completed=step, at_ns=t_ns),
                        m.KvSet(id=1, cycle=agent.cycle, key="k", value=step, only_if_absent=self.rng.random() < 0.5),
                    ]
                )
            )

    def marker(self) -> None:
        self.lead.marker = self.rng.choice([None, 0, *range(5)])

    # ---- what must hold

    def take(self, node: str, message: Any) -> m.Reply | None:
        reply = self.lead.take((node, message))
        state, size = dump(self.lead.job), self.lead.journal.path.stat().st_size
        self.lead.take((node, message), again=True)
        again = dump(self.lead.job)
        if isinstance(message, m.Hello):
            again["version"] = state["version"]
        else:
            assert self.lead.journal.path.stat().st_size == size, message
        assert again == state, message
        return reply

    def check(self) -> None:
        job = self.lead.job
        assert job.last_cycle >= self.last_cycle or job.last_cycle not in self.told
        self.last_cycle = max(self.told, default=-1)
        assert job.last_cycle >= self.last_cycle
        assert len({a.cycle for a in self.agents.values() if a.live is not None}) <= 1
        if job.cycle is not None:
            assert job.cycle.number == job.last_cycle
            assert len(set(job.cycle.nodes)) == len(job.cycle.nodes)
            assert self.shape.min_nodes <= len(job.cycle.nodes) <= self.shape.nnodes
            assert job.cycle.world % self.shape.replica_size == 0
        assert not job.counted > self.shape.max_restarts

    def settle(self) -> None:
        """Everybody comes back, and does as told; ranks that run finish."""
        self.lead.last_call = True
        for _ in range(400):
            # Time passes, also where nobody says anything.
            self.lead.take(("", Marker(self.lead.marker)))
            if self.lead.job.verdict is not None:
                return
            for node in NODES:
                if node not in self.agents:
                    # Hosts that are gone are known to be gone.
                    self.take(node, None)
                    self.pids += 1
                    self.agents[node] = Agent(node, self.pids)
            for agent in self.agents.values():
                if agent.node not in self.lead.connected:
                    agent.outbox = [x for x in agent.outbox if not isinstance(x, m.WorkloadRequest)]
                    if self.take(agent.node, agent.hello([])) is None:
                        agent.fenced = False
            for agent in list(self.agents.values()):
                command = self.lead.job.command_for(agent.node)
                if isinstance(command, m.StartCycle):
                    self.start_ranks(agent, command)
                elif isinstance(command, m.StopCycle | m.AskStop):
                    if command.cycle > agent.cycle:
                        agent.cycle = command.cycle
                        agent.outbox.append(stopped(agent.node, command.cycle, {})[1])
                    agent.end_ranks(-15)
                elif agent.live is not None and not agent.outbox:
                    agent.end_ranks(0)
                for message in agent.outbox:
                    self.take(agent.node, message)
                agent.outbox.clear()
            self.check()
        waiting = self.lead.job.waiting
        assert self.lead.job.phase == "forming", self.lead.job.phase
        # Only nodes that were taken out can be missing.
        assert waiting is not None
        assert len(NODES) - len(self.lead.job.excluded) < self.shape.nnodes, waiting


@given(of=st.sampled_from(SHAPES), seed=st.integers(0, 2**32), length=st.integers(20, 500))
@settings(max_examples=150, deadline=None)
def test_any_order_of_messages_losses_returns_and_deaths(of: JobShape, seed: int, length: int) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        world = World(Path(folder), of, random.Random(seed))
        for node in NODES[: of.nnodes]:
            world.agents[node] = Agent(node, ord(node))
        for _ in range(length):
            world.step()
        assert dump(replayed(Path(folder), of)) == dump(world.lead.job)
        world.settle()
        assert dump(replayed(Path(folder), of)) == dump(world.lead.job)
        world.lead.close()
