"""Short answers to short questions in transcripts, prompts that say where they were asked, and losses of one run each."""

from __future__ import annotations

import pytest

from keepstep.records.event import Event
from keepstep.sources.documents import section_title
from tests.attribution.jobtexts import events_of, lines


def _of(signature: str, *rows: str) -> list[Event]:
    return [e for e in events_of(lines(*rows)) if e.signature == signature]


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("getent hosts 10.1.0.9", "10.1.0.9        scan-02.corp"),
        ("host 10.1.0.9", "9.0.1.10.in-addr.arpa domain name pointer scan-02.corp."),
        ("nslookup 10.1.0.9", "9.0.1.10.in-addr.arpa\tname = scan-02.corp."),
        ("dig -x 10.1.0.9", "9.0.1.10.in-addr.arpa. 300 IN PTR scan-02.corp."),
    ],
)
def test_whose_an_address_is(command: str, answer: str) -> None:
    (found,) = _of("command.host_name", f"$ {command}", answer)
    assert (found.attrs["address"], found.attrs["name"]) == ("10.1.0.9", "scan-02.corp")


def test_an_answer_without_a_name_names_nobody() -> None:
    assert not _of("command.host_name", "$ host 10.1.0.9", "Host 9.0.1.10.in-addr.arpa. not found: 3(NXDOMAIN)")
    assert not _of("command.host_name", "$ cat /etc/motd", "10.1.0.9  scan-02.corp")


def test_device_files_that_are_there() -> None:
    found = _of("container.device_present", "$ ls /dev/infiniband", "rdma_cm  uverbs0  uverbs1")
    assert [e.attrs["device"] for e in found] == ["/dev/infiniband"]
    refused = "ls: cannot access '/dev/kfd': No such file or directory"
    assert not _of("container.device_present", "$ ls /dev/kfd", refused)
    assert [e.attrs["device"] for e in _of("container.device_absent", "$ ls /dev/kfd", refused)] == ["/dev/kfd"]


@pytest.mark.parametrize(
    ("command", "answer", "state"),
    [
        ("sinfo -h -n g-2 -o %T", "idle", "idle"),
        ("sinfo -h -n g-2 -o '%t'", "drain*", "drain"),
        ("sinfo -h -o %T", "idle", None),
        ("sinfo -h -n g-2 -o '%N %T'", "g-2 idle", None),
        ("sinfo -h -n g-[2-3] -o %T", "idle\nallocated", None),
    ],
)
def test_the_state_of_one_machine(command: str, answer: str, state: str | None) -> None:
    found = [e.attrs["state"] for e in _of("command.node_state", f"$ {command}", answer)]
    assert found == ([state] if state else [])


@pytest.mark.parametrize(
    ("line", "title", "node"),
    [
        ("worker-17 $ cat /proc/mdstat", "cat /proc/mdstat", "worker-17"),
        ("(container) $ ls /dev/kfd", "ls /dev/kfd  # in the container", None),
        ("(venv) $ ls /dev/kfd", "ls /dev/kfd", None),
    ],
)
def test_a_prompt_says_where_a_command_ran(line: str, title: str, node: str | None) -> None:
    found = section_title(line)
    assert found is not None
    assert (found[0], found[1].node) == (title, node)


@pytest.mark.parametrize("line", ["step-1 $ cat x", "price-5 $ is too much", "worker-17 $ 4.20 an hour"])
def test_what_is_no_prompt_begins_no_section(line: str) -> None:
    assert section_title(line) is None


def test_losses_of_one_run_are_one_event_and_those_of_many_ranks_none() -> None:
    (found,) = _of("loss.series", "==> a.log <==", "step 1 loss 2.5", " iteration 2/ 10 | lm loss: 2.400000E+00 |")
    assert found.attrs["losses"] == [[1, 2.5], [2, 2.4]]
    assert not _of("loss.series", "==> a.log <==", "step 1 loss 2.5", "step 1 loss 2.5", "step 2 loss 2.4")
    assert not _of("loss.series", "step 1 loss 2.5", "step 2 loss 2.4")
