"""Whole lives of a job as lists of events, with how they end."""

from __future__ import annotations

import itertools

import msgspec

from keepstep.launcher.coordination.rules import MAX_PORT_RETRIES
from keepstep.launcher.coordination.state import JobShape
from tests.launcher.lives import (
    BUG,
    ONE,
    SWAPPED,
    TAKEN,
    THREE,
    TWO,
    Closed,
    Ending,
    Event,
    Marker,
    broken,
    failure,
    fault,
    finish,
    halted,
    hello,
    note,
    operator_exclude,
    request,
    shape,
    started,
    stop_request,
    stopped,
    training,
)


class Life(msgspec.Struct, frozen=True):
    """Events and how they end. `counted`: restarts that count; `marker`: the marker's file at the start."""

    shape: JobShape
    events: list[Event]
    ending: Ending
    counted: int = 0
    marker: int | None = None


DONE: Ending = ("succeeded", 0, "finished")
killed = failure(1, -9)
other = failure(0, 1, time_ns=700, cascade=True, error_type="DistBackendError")
peer = failure(0, 1, cascade=True, error_type="DistBackendError")


def one_node_lives() -> dict[str, Life]:
    one = [hello("a")]
    given_back = [
        [fault("a", c, 0, "spawn"), stopped("a", c, {}, failure(0, 1, **TAKEN))] for c in range(MAX_PORT_RETRIES + 1)
    ]
    bug = failure(1, 1, **BUG)
    every = [failure(r, 1, time_ns=600 + r, **BUG) for r in (0, 1)]
    interrupted = broken(0, killed)
    return {
        "finished": Life(shape(), [*one, *training(0, 4, ONE, 2), *finish(0, ONE, 4)], DONE),
        "hung, then killed": Life(
            shape(),
            [
                *(*one, *training(0, 3, ONE), *broken(0, kind="hang"), *training(1, 0, ONE)),
                *(*broken(1, killed, step=None), *training(2, 2, ONE, 1), *finish(2, ONE, 2)),
            ],
            DONE,
            2,
        ),
        "exit 42": Life(
            shape(),
            [*one, *training(0, 2, ONE), *broken(0, failure(1, 42), step=2)],
            ("failed", 42, "config_or_code_bug"),
        ),
        "exit 43": Life(
            shape(),
            [*one, *training(0, 2, ONE, 1), *broken(0, failure(1, 43), step=2)],
            ("failed", 43, "numerical_guard"),
        ),
        "the same failure twice": Life(
            shape(),
            [
                *(*one, *training(0, 3, ONE), *broken(0, bug, other)),
                *(*training(1, 3, ONE), *broken(1, bug, other)),
            ],
            ("failed", 42, "code_bug"),
            1,
        ),
        "the same failure at another step, then the end of the budget": Life(
            shape(max_restarts=3),
            [*one, *[e for c in range(4) for e in (*training(c, 3 + c, ONE), *broken(c, bug, step=3 + c))]],
            ("failed", 1, "budget_exhausted"),
            3,
        ),
        "interrupted while a fault is handled": Life(
            shape(),
            [*one, *training(0, 3, ONE), interrupted[0], stop_request("a", 2), *interrupted[1:]],
            ("stopped", 130, "interrupted"),
        ),
        "ports that are taken": Life(
            shape(),
            [*one, *itertools.chain(*given_back), *training(4, 2, ONE), *finish(4, ONE, 2)],
            DONE,
            1,
        ),
        "one rank leaves early": Life(
            shape(),
            [
                *(*one, *training(0, 3, ONE), fault("a", 0, 1)),
                stopped("a", 0, {0: 0, 1: 1}, failure(1, 1, cascade=True, error_type="DistBackendError"), step=3),
                *(*training(1, 3, ONE), *finish(1, ONE, 3)),
            ],
            DONE,
            1,
        ),
        "a script that reports no steps": Life(
            shape(), [*one, started("a", 0, [0, 1], expect_steps=False), *finish(0, ONE, None)], DONE
        ),
        "every rank fails before the first step": Life(
            shape(),
            [*one, *training(0, 0, ONE), *broken(0, *every, step=None)],
            ("failed", 42, "code_bug"),
        ),
        "a launcher that was started again": Life(
            shape(),
            [
                *(*one, *training(0, 3, ONE, 2), ("a", Closed()), hello("a", pid=101)),
                *(*training(1, 4, ONE), *finish(1, ONE, 4)),
            ],
            DONE,
        ),
        "no progress by a marker's file": Life(
            shape(marker_file=True),
            [
                *(*one, *training(0, 2, ONE), *broken(0, killed, step=2)),
                *(*training(1, 3, ONE), ("", Marker(101)), *broken(1, killed)),
                *(*training(2, 2, ONE), *broken(2, killed, step=2)),
                *(*training(3, 2, ONE), ("", Marker(None)), *broken(3, killed, step=2)),
                *(*training(4, 2, ONE), ("", Marker(101)), *broken(4, killed, step=2)),
                *(*training(5, 2, ONE), *broken(5, killed, step=2)),
            ],
            ("no_restart", 93, "no_progress"),
            5,
            100,
        ),
        "no progress by its own checkpoints": Life(
            shape(no_restart_exit_code=17),
            [
                *(*one, *training(0, 3, ONE, 2), *broken(0, killed)),
                *[e for c in (1, 2, 3) for e in (*training(c, 2, ONE, restored=2), *broken(c, killed, step=4))],
            ],
            ("no_restart", 17, "no_progress"),
            3,
        ),
        "a rollback that was announced": Life(
            shape(marker_file=True, max_no_progress_cycles=2),
            [
                *(*one, *training(0, 2, ONE), *broken(0, killed, step=2), *training(1, 2, ONE), ("", Marker(50))),
                *(note("a", 1, 0, "rollback_announced", 2_450, to_step=50, reason="spike"), *broken(1, killed, step=2)),
                *(*training(2, 3, ONE), ("", Marker(51)), *broken(2, killed)),
                *(*training(3, 4, ONE), *finish(3, ONE, 4)),
            ],
            DONE,
            3,
            100,
        ),
    }


def many_node_lives() -> dict[str, Life]:
    a, b, c = hello("a"), hello("b"), hello("c")
    two, three = [a, b], [a, b, c]
    spare = shape(2, spares=1)
    swapped = [*training(1, 4, SWAPPED), *finish(1, SWAPPED, 4)]
    lost_b = [("b", None), stopped("a", 0, {0: 1, 1: 1}, peer, step=3)]
    return {
        "killed once": Life(
            shape(2),
            [
                *(*two, *training(0, 3, TWO, 2), *broken(0, failure(2, -9), other, places=TWO)),
                *(*training(1, 4, TWO), *finish(1, TWO, 4)),
            ],
            DONE,
            1,
        ),
        "asked to stop while training": Life(
            shape(2),
            [*two, *training(0, 3, TWO, 2), stop_request("b"), *finish(0, TWO, 3)],
            ("stopped", 143, "preempted"),
        ),
        "asked to stop before anything ran": Life(shape(2), [a, stop_request("a")], ("stopped", 143, "preempted")),
        "a node is lost and another takes its place": Life(
            shape(2), [*two, *training(0, 3, TWO, 2), *lost_b, hello("c"), *swapped], DONE
        ),
        "a node is lost and a spare takes its place": Life(
            spare, [*three, *training(0, 3, TWO, 2), *lost_b, *swapped], DONE
        ),
        "a lost node comes back and is the next spare": Life(
            spare,
            [
                *(*three, *training(0, 3, TWO, 2), *lost_b, *training(1, 2, SWAPPED), hello("b", fenced=True, cycle=0)),
                *(("a", None), stopped("c", 1, {2: 1, 3: 1}, failure(2, 1, cascade=True), step=2)),
                *(*training(2, 3, {"b": [0, 1], "c": [2, 3]}), *finish(2, {"b": [0, 1], "c": [2, 3]}, 3)),
            ],
            DONE,
        ),
        "shrinks, and grows again": Life(
            shape(3, min_nodes=2),
            [
                *(*three, *training(0, 3, THREE, 2), ("c", None)),
                *(stopped("a", 0, {0: 1, 1: 1}, peer, step=3), stopped("b", 0, {2: 1, 3: 1}, step=3)),
                *(*training(1, 3, TWO), hello("c", pid=101), *broken(1, killed, places=TWO)),
                *(*training(2, 4, THREE), *finish(2, THREE, 4)),
            ],
            DONE,
            1,
        ),
        "checks fail before the first cycle": Life(
            shape(2),
            [
                *(a, hello("b", problems=["gpu 3 does not answer"]), c, *training(0, 3, SWAPPED)),
                *finish(0, SWAPPED, 3),
            ],
            DONE,
        ),
        "checks fail after a cycle": Life(
            spare,
            [
                *(*three, *training(0, 3, TWO, 2), fault("b", 0, 2)),
                *(stopped("a", 0, {0: -15, 1: -15}, step=3),),
                stopped("b", 0, {2: 1, 3: -15}, failure(2, 1, **BUG), step=3, problems=("gpu 3 is gone", "disk full")),
                *swapped,
            ],
            DONE,
        ),
        "a rank asks for its node to be left out": Life(
            spare, [*three, *training(0, 3, TWO, 2), request("b", 0, "exclude", 2), *halted(0, TWO), *swapped], DONE
        ),
        "a person takes a node out": Life(
            spare, [*three, *training(0, 3, TWO, 2), operator_exclude("b"), *halted(0, TWO), *swapped], DONE
        ),
        "a person takes a spare out": Life(
            spare,
            [*three, *training(0, 3, TWO), operator_exclude("c"), *training(0, 4, TWO)[-2:], *finish(0, TWO, 4)],
            DONE,
        ),
        "a rank asks for the end": Life(
            shape(2),
            [*two, *training(0, 3, TWO, 2), request("b", 0, "stop", 2, "loss diverged"), *halted(0, TWO)],
            ("no_restart", 93, "workload_request"),
        ),
        "a node that flaps": Life(
            shape(2),
            [
                *two,
                *[
                    e
                    for cycle in range(3)
                    for e in (
                        *training(cycle, 2, TWO),
                        ("b", None),
                        stopped("a", cycle, {0: 1, 1: 1}, peer, step=2),
                        hello("b", fenced=True, cycle=cycle),
                    )
                ],
                *(hello("c"), *training(3, 4, SWAPPED), *finish(3, SWAPPED, 4)),
            ],
            DONE,
        ),
        "a node stops its ranks at the end of its lease and comes back": Life(
            shape(2),
            [
                *(*two, *training(0, 3, TWO, 2), ("b", Closed()), hello("b", fenced=True, cycle=0)),
                stopped("b", 0, {2: -9, 3: -9}, failure(2, -9, stopped_by_us=True), step=3),
                stopped("a", 0, {0: -15, 1: -15}, peer, step=3),
                *(*training(1, 4, TWO), *finish(1, TWO, 4)),
            ],
            DONE,
        ),
        "a late node waits as a spare": Life(
            shape(2),
            [
                *(*two, *training(0, 3, TWO), c, *broken(0, failure(2, -9), places=TWO), *training(1, 2, TWO)),
                *(("b", None), stopped("a", 1, {0: 1, 1: 1}, peer, step=2)),
                *(*training(2, 4, SWAPPED), *finish(2, SWAPPED, 4)),
            ],
            DONE,
            1,
        ),
        "two nodes lost at once, one spare": Life(
            shape(3, min_nodes=2, spares=1),
            [
                *(*three, hello("d"), *training(0, 3, THREE, 2), ("b", None), ("c", None)),
                stopped("a", 0, {0: 1, 1: 1}, peer, step=3),
                *(*training(1, 4, {"a": [0, 1], "d": [2, 3]}), *finish(1, {"a": [0, 1], "d": [2, 3]}, 4)),
            ],
            DONE,
        ),
    }


LIVES = {**one_node_lives(), **many_node_lives()}
