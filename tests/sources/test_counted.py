"""Numbers below commands that count, and where a name before NCCL's own belongs."""

from __future__ import annotations

import pytest

from keepstep.sources.prefixes import strip
from tests.attribution.jobtexts import events_of, lines


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("nvidia-smi -L | wc -l", "gpus"),
        ("lspci -nn -d 10de:2330 | wc -l", "devices"),
        ("squeue -w b12 -h | wc -l", "jobs"),
        ("squeue --nodelist b12 --noheader | wc -l", "jobs"),
        ("squeue -hw b12 | wc -l", "jobs"),
        ("squeue -w b12 | wc -l", None),
        ("squeue -h | wc -l", None),
        ("lspci -d 10de: | wc -l", "nvidia devices"),
        ("lspci | grep -c NVIDIA", "nvidia devices"),
        ("lspci | grep -i nvidia", None),
        ("nvidia-smi -L", None),
        ("grep -c error log", None),
    ],
)
def test_what_a_command_counts(command: str, what: str | None) -> None:
    found = [e for e in events_of(lines(f"$ {command}", "7")) if e.signature == "command.count"]
    assert [(e.attrs["what"], e.attrs["count"]) for e in found] == ([(what, 7)] if what else [])


def test_what_is_no_number_is_not_counted() -> None:
    assert not [
        e
        for e in events_of(lines("$ nvidia-smi -L | wc -l", "bash: nvidia-smi: command not found"))
        if e.signature == "command.count"
    ]


def test_nccl_names_the_machine_and_what_stands_before_it_the_pod() -> None:
    read = strip("2031-02-11T15:16:23Z prefill-2 gpu-w07:311:405 [0] NCCL WARN NET/IB : no route")
    assert (read.node, read.pod) == ("gpu-w07", "prefill-2")
    assert strip("2031-02-11T15:16:23Z n4 train[31]: NCCL WARN").node == "n4"
