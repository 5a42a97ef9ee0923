"""What a history would have cost under a policy: incidents in seconds of the job, by phase, and nodes that are taken out. Pure.

The history is what happened; another policy would have had another one. Two differences are estimated, and no others: a fault of a
machine does not come again on a node that was taken out, and a fault of the program does not come again once a person has mended
it. Nothing is added that the history does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from keepstep.goodput.job import FailureKind, Job
from keepstep.goodput.spares import choose
from keepstep.planner.policies import DAY_S, Decided, NodeHistory, Policy
from keepstep.records.verdict import Action, FaultClass, Verdict

HUMAN_S = 1800.0
"""Until a person has come and decided; an assumption, which every output names."""
REPAIR_S = DAY_S
VERIFY_S = 6 * 3600.0
"""Until a node that was taken out is back: repaired, or found to be healthy. Assumptions, the same as a simulated campaign's."""
WINDOW_S = DAY_S
"""A fault on the same place within this is the same fault come again: 22 % of the nodes of a public trace that came back failed
again within a day, 0.4 % would by chance."""
OF_MACHINES: tuple[FaultClass, ...] = ("hardware", "fabric")
"""Classes that stay with a node; a node that is taken out for any other is healthy."""
_BY_PERSON: tuple[Action, ...] = ("ask_human", "fail_fast", "none")
"""What leaves a job that was interrupted to a person."""
_TAKES_OUT: tuple[Action, ...] = ("cordon_node", "drain_at_checkpoint")


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """An incident to decide on. `time_s`: its begin, seconds since the Unix epoch. `label`: what people found the cause to be."""

    id: str
    time_s: float
    node: str | None
    rank: int | None
    verdict: Verdict
    interrupted: bool
    hang: bool = False
    label: FaultClass | None = None

    @property
    def cause(self) -> FaultClass:
        """The class that counts: the label, where it says one, before the verdict."""
        return self.verdict.fault_class if self.label in (None, "unknown") else self.label

    @property
    def of_machine(self) -> bool:
        """Whether the fault stays with the node."""
        return self.cause in OF_MACHINES and self.node is not None

    @property
    def place(self) -> str | None:
        """Node, or rank where no node is known."""
        return self.node or (None if self.rank is None else f"rank {self.rank}")


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """What things cost. `span_s`: length of the history. `spares` None: as many as paid goodput asks for, by policy."""

    job: Job
    gpus: int
    span_s: float
    human_s: float = HUMAN_S
    repair_s: float = REPAIR_S
    verify_s: float = VERIFY_S
    reset_s: float = 0.0
    """A GPU's reset, on top of the restart."""
    window_s: float = WINDOW_S
    spares: int | None = None
    usd_per_gpu_hour: float | None = None


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the job, by phase. `overlap_s`: what of them passed while the job lay already; it is taken off."""

    detect_s: float = 0.0
    person_s: float = 0.0
    save_s: float = 0.0
    decide_s: float = 0.0
    replace_s: float = 0.0
    reset_s: float = 0.0
    start_s: float = 0.0
    load_s: float = 0.0
    rollback_s: float = 0.0
    overlap_s: float = 0.0

    @property
    def outage_s(self) -> float:
        """From the failure until training goes on."""
        waiting = (self.detect_s, self.person_s, self.save_s, self.decide_s)
        return math.fsum((*waiting, self.replace_s, self.reset_s, self.start_s, self.load_s))

    @property
    def cost_s(self) -> float:
        """All of it: time without training, and training that is done again."""
        return self.outage_s + self.rollback_s - self.overlap_s


class CaseCost(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy did about an incident. `prevented_by`: the incident after which it had taken the node out or had the program
    mended, so that this one would not have been; `again`: the one on the same place that it had done nothing lasting about."""

    id: str
    action: Action | None
    node_out: bool = False
    healthy: bool = False
    prevented_by: str | None = None
    again: str | None = None
    phases: Phases = Phases()


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """A history under one policy. Times in seconds of the job, money in dollars."""

    policy: str
    cases: tuple[CaseCost, ...]
    interruptions: int
    """Incidents that stopped the job, those it prevented left out."""
    prevented: int
    wasted_restarts: int
    wasted_s: float
    """Cost of those where a machine's fault came again on a place where nothing had been taken out; part of `cost_s`."""
    evictions: int
    healthy_out: int
    healthy_node_hours: float
    """Of nodes taken out for what was no fault of theirs, until they were found to be healthy."""
    spares: int
    stall_s: float
    """Expected time that the job waits for a node because all spares are in use."""
    cost_s: float
    """All incidents together, and `stall_s`."""
    gpu_hours: float
    """Of the job while it lost time, and of the spares over the whole history."""
    usd: float | None


def price(cases: Sequence[Case], policy: Policy, prices: Prices) -> Account:
    """What the incidents, in the order in which they were judged, cost under a policy."""
    walk = _Walk(policy, prices)
    costs = tuple(walk.meet(case) for case in cases)
    by_id = {case.id: case for case in cases}
    wasted = [c.phases.cost_s for c in costs if c.again is not None]
    # Less than one repair time says nothing of how many nodes are away at once.
    span_s = max([prices.span_s, *walk.away_s])
    load = math.fsum(walk.away_s) / span_s if walk.away_s else 0.0
    plan = choose([(1.0, load)], prices.job.nodes, load, given=prices.spares)
    kept = plan.given or plan.best
    stall_s = kept.stall_share * span_s if walk.away_s else 0.0
    cost_s = math.fsum(c.phases.cost_s for c in costs) + stall_s
    spare_gpus = kept.spares * prices.job.gpus_per_node
    gpu_hours = (cost_s * prices.gpus + span_s * spare_gpus) / 3600.0
    healthy = sum(1 for c in costs if c.healthy)
    return Account(
        policy=policy.name,
        cases=costs,
        interruptions=sum(1 for c in costs if by_id[c.id].interrupted and c.prevented_by is None),
        prevented=sum(1 for c in costs if c.prevented_by is not None),
        wasted_restarts=len(wasted),
        wasted_s=math.fsum(wasted),
        evictions=len(walk.away_s),
        healthy_out=healthy,
        healthy_node_hours=healthy * prices.verify_s / 3600.0,
        spares=kept.spares,
        stall_s=stall_s,
        cost_s=cost_s,
        gpu_hours=gpu_hours,
        usd=None if prices.usd_per_gpu_hour is None else gpu_hours * prices.usd_per_gpu_hour,
    )


class _Walk:
    """A policy on its way through a history."""

    def __init__(self, policy: Policy, prices: Prices) -> None:
        self._policy = policy
        self._prices = prices
        self._met: dict[str, list[Decided]] = {}
        self._out: dict[str, tuple[float, float, str]] = {}  # node -> taken out at, until, by incident
        self._mended: dict[str, tuple[float, str]] = {}  # signature -> at, by incident
        self._last: dict[str, tuple[float, str, bool]] = {}  # place -> at, incident, whether something was taken out
        self._free_s: float | None = None
        """When training went on after the last outage; None before the first."""
        self.away_s: list[float] = []

    def meet(self, case: Case) -> CaseCost:
        """Decide on an incident and price it."""
        if not case.interrupted and self._policy.waits_for_failure:
            return CaseCost(id=case.id, action=None)
        by = self._preventing(case)
        if by is not None:
            return CaseCost(id=case.id, action=None, prevented_by=by)
        earlier = self._met.setdefault(case.node, []) if case.node is not None else []
        action = self._policy.decide(case.verdict, NodeHistory(case.node, case.time_s, tuple(earlier)))
        earlier.append(Decided(case.time_s, case.verdict, action))
        asked = case.interrupted and action in _BY_PERSON
        node_out = case.node is not None and (action in _TAKES_OUT or (asked and case.of_machine))
        again = self._came_again(case)
        phases = self._phases(case, action, asked, node_out)
        self._remember(case, asked, node_out)
        return CaseCost(
            id=case.id,
            action=action,
            node_out=node_out,
            healthy=node_out and not case.of_machine,
            again=again,
            phases=phases,
        )

    def _preventing(self, case: Case) -> str | None:
        if case.of_machine:
            at_s, until_s, by = self._out.get(case.node or "", (math.inf, 0.0, ""))
            return by if at_s <= case.time_s <= until_s else None
        if case.cause == "user_code":
            at_s, by = self._mended.get(case.verdict.signature, (math.inf, ""))
            return by if at_s <= case.time_s <= at_s + self._prices.window_s else None
        return None

    def _came_again(self, case: Case) -> str | None:
        """The incident before on the same place, where this fault of a machine follows one after which everything stayed."""
        last = self._last.get(case.place or "")
        if last is None or not case.interrupted or case.cause not in OF_MACHINES:
            return None
        at_s, incident, out = last
        return incident if not out and 0.0 <= case.time_s - at_s <= self._prices.window_s else None

    def _remember(self, case: Case, asked: bool, node_out: bool) -> None:
        prices = self._prices
        if case.place is not None and case.interrupted:
            self._last[case.place] = (case.time_s, case.id, node_out)
        if asked and case.cause == "user_code":
            self._mended[case.verdict.signature] = (case.time_s, case.id)
        if node_out and case.node is not None:
            away_s = prices.repair_s if case.of_machine else prices.verify_s
            self.away_s.append(away_s)
            # What was repaired is well for the window; what was healthy is back as it was.
            safe_s = max(away_s, prices.window_s) if case.of_machine else away_s
            self._out[case.node] = (case.time_s, case.time_s + safe_s, case.id)

    def _phases(self, case: Case, action: Action, asked: bool, node_out: bool) -> Phases:
        if not case.interrupted and action in ("none", "ask_human"):
            return Phases()  # training goes on
        job, prices = self._prices.job, self._prices
        kind = kind_of(case, job)
        drained = action == "drain_at_checkpoint" and not case.interrupted
        gone = Phases(
            detect_s=kind.detect_s if case.interrupted else 0.0,
            person_s=prices.human_s if asked or action == "fail_fast" else 0.0,
            save_s=job.tiers[0].block_s if drained else 0.0,
            decide_s=job.restart.decide_s,
            replace_s=job.restart.replace_s if node_out else 0.0,
            reset_s=prices.reset_s if action == "reset_gpu" else 0.0,
            start_s=job.restart.start_s,
            load_s=job.tiers[kind.tier].load_s,
        )
        trained_s = math.inf if self._free_s is None else max(0.0, case.time_s - self._free_s)
        lying_until_s = case.time_s if self._free_s is None else max(case.time_s, self._free_s)
        free_s = max(lying_until_s, case.time_s + gone.outage_s)
        self._free_s = free_s
        return msgspec.structs.replace(
            gone,
            rollback_s=0.0 if drained else min(rollback_s(job, kind), trained_s),
            overlap_s=max(0.0, gone.outage_s - (free_s - lying_until_s)),  # not below 0 by rounding
        )


def rollback_s(job: Job, kind: FailureKind) -> float:
    """Training that a failure undoes, to first order: half the time between two saves to the tier that survives, and its lag."""
    return job.periods[kind.tier] * job.interval_s / 2.0 + job.tiers[kind.tier].persist_lag_s


def kind_of(case: Case, job: Job) -> FailureKind:
    """The kind of the job's failures that an incident is: of the name of its class, else a hang or none, the most frequent."""
    named = [k for k in job.kinds if k.name == case.cause]
    alike = [k for k in job.kinds if (k.name == "hang") == case.hang]
    return max(named or alike or job.kinds, key=lambda k: k.share)
