"""In which order a launcher looks for the coordinator."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

import pytest

from keepstep.launcher.node import link
from keepstep.launcher.node.link import Target, knock


def _in_order(targets: list[Target]) -> list[Target]:
    async def collect() -> list[Target]:
        return [target async for target in knock(targets)]

    return asyncio.run(collect())


def _listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def _target(sock: socket.socket) -> Target:
    return Target(f"127.0.0.1:{sock.getsockname()[1]}")


def test_a_host_that_takes_connections_goes_before_one_that_refuses() -> None:
    with _listening() as up, _listening() as closed:
        refusing, answering = _target(closed), _target(up)
        closed.close()
        assert _in_order([refusing, answering]) == [answering, refusing]


def test_the_own_coordinator_goes_first() -> None:
    with _listening() as one, _listening() as two:
        local = Target("/run/coordinator.sock")
        order = _in_order([local, _target(one), _target(two)])
        assert order[0] == local
        assert {t.address for t in order[1:]} == {_target(one).address, _target(two).address}


def test_a_host_that_says_nothing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux answers no more SYN when a listener's queue is full, as a host that is gone answers none."""
    monkeypatch.setattr(link, "OPEN_ONE_OF_MANY_S", 0.3)
    with _listening() as up, socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as stack:
        for _ in range(4):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        assert _in_order([_target(full), _target(up)]) == [_target(up)]


def test_the_only_host_is_not_asked_first() -> None:
    with _listening() as up:
        up.setblocking(False)
        assert _in_order([_target(up)]) == [_target(up)]
        try:
            up.accept()
        except BlockingIOError:
            return
        raise AssertionError("it was asked")


def test_nowhere_to_look() -> None:
    assert _in_order([]) == []
