"""The grammar of --inject: what is accepted, and that a mistake is named together with what is valid there."""

from __future__ import annotations

import pytest

from keepstep.records.errors import ConfigError
from keepstep.records.inject import KINDS, Injection, parse_injection


def test_kinds_of_the_contract_so_far() -> None:
    expected = {
        "kill",
        "stop",
        "hang",
        "raise",
        "exit",
        "slow",
        "nan",
        "corrupt-checkpoint",
        "coordinator-kill",
        "preempt",
        "oom",
        "node-loss",
        "partition",
        "storage-error",
        "storage-stall",
    }
    assert expected <= set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_a_step_rank_node_and_cycle(kind: str) -> None:
    more = ",code=79" if kind == "xid" else ""
    injection = parse_injection(f"{kind}@step=7,rank=1,cycle=2,node=n0{more}")
    assert (injection.kind, injection.step, injection.rank, injection.cycle, injection.node) == (kind, 7, 1, 2, "n0")


def test_defaults() -> None:
    assert parse_injection("kill@step=3") == Injection(kind="kill", step=3)
    assert (Injection(kind="kill").rank, Injection(kind="kill").cycle) == (0, 0)


def test_an_xid_needs_its_number() -> None:
    with pytest.raises(ConfigError, match="code=N"):
        parse_injection("xid@step=1")
    found = parse_injection("xid@seconds=0,code=94,pci=0000:3b:00")
    assert (found.code, found.pci, found.timed_s) == (94, "0000:3b:00", 0.0)


def test_own_keys_of_a_kind() -> None:
    assert parse_injection("exit@step=1,code=93").code == 93
    slow = parse_injection("slow@step=1,factor=3,steps=5,seconds=0.5")
    assert (slow.factor, slow.steps, slow.seconds) == (3.0, 5, 0.5)


@pytest.mark.parametrize("kind", ["kill", "stop", "coordinator-kill", "preempt", "node-loss"])
def test_what_comes_from_outside_may_be_timed_instead_of_counted(kind: str) -> None:
    injection = parse_injection(f"{kind}@seconds=2.5")
    assert (injection.step, injection.seconds, injection.timed_s) == (None, 2.5, 2.5)


def test_a_partition_has_a_length_and_its_own_word_for_a_timed_begin() -> None:
    counted = parse_injection("partition@step=4,seconds=3,node=n1")
    assert (counted.seconds, counted.timed_s) == (3.0, None)
    timed = parse_injection("partition@after=2,seconds=3")
    assert (timed.seconds, timed.timed_s) == (3.0, 2.0)
    assert parse_injection("partition@step=4").seconds is None


def test_faults_of_the_storage() -> None:
    assert parse_injection("storage-error@step=4").at_byte == 0
    assert parse_injection("storage-error@step=4,rank=1,at_byte=70000").at_byte == 70_000
    assert parse_injection("storage-stall@step=4,seconds=2.5").seconds == 2.5
    assert parse_injection("storage-stall@step=4").seconds is None


def test_what_waits_for_a_step_is_not_timed() -> None:
    assert parse_injection("kill@step=4,seconds=3").timed_s is None
    assert parse_injection("slow@step=4,seconds=3").timed_s is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("kil@step=1", r"unknown kind 'kil'; valid kinds: kill, stop, hang"),
        ("", r"unknown kind ''; valid kinds:"),
        ("kill", r"'kill': needs step=N or seconds=S"),
        ("hang", r"'hang': needs step=N"),
        ("partition@seconds=1", r"needs step=N or after=S"),
        ("oom@seconds=1", r"'seconds=1' is not one of cycle, node, rank, step as KEY=VALUE"),
        ("kill@after=1", r"'after=1' is not one of"),
        ("hang@seconds=1", r"'seconds=1' is not one of cycle, node, rank, step as KEY=VALUE"),
        ("kill@step=1,code=3", r"'code=3' is not one of cycle, node, rank, seconds, step as KEY=VALUE"),
        ("kill@step", r"'step' is not one of"),
        ("kill@", r"'' is not one of"),
        ("kill@step=1,step=2", r"step is given twice"),
        ("kill@step=one", r"step='one' is not a int"),
        ("slow@step=1,factor=x", r"factor='x' is not a float"),
        ("slow@seconds=1", r"needs step=N"),
        ("exit@rank=1,code=3", r"'exit@rank=1,code=3': needs step=N"),
        ("storage-error@step=1,seconds=2", r"'seconds=2' is not one of at_byte, cycle, node, rank, step as KEY=VALUE"),
        ("storage-error@step=1,at_byte=-1", r"at_byte=-1 is below 0"),
        ("storage-error@step=1,at_byte=1k", r"at_byte='1k' is not a int"),
        ("storage-stall@seconds=2", r"needs step=N"),
        ("storage-stall@step=1,seconds=-2", r"seconds=-2.0 is no time"),
        ("storage-stall@step=1,seconds=nan", r"seconds=nan is no time"),
    ],
)
def test_a_mistake_names_the_part_and_what_is_valid(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_injection(spec)
    assert str(caught.value).startswith(f"--inject {spec!r}: ")
    assert caught.value.exit_code == 2
