"""No input makes a parser of snapshots raise, hang or give more events than its limit; every event is of the catalog."""

from __future__ import annotations

import random
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.catalog.load import shipped
from keepstep.records.event import event_fields
from keepstep.sources.documents import Document, Line, split
from keepstep.sources.parsers import PARSERS, Parser
from keepstep.sources.snapshots.making import EVENTS_LIMIT, number
from tests.sources.snapshot_texts import FULL, IBSTAT, OLD_TABLE, TABLE

MINE = [(name, parse) for name, parse in PARSERS if parse.__module__.startswith("keepstep.sources.snapshots")]
SEEDS = [
    FULL,
    TABLE,
    OLD_TABLE,
    IBSTAT,
    "index, pcie.link.gen.current, pcie.link.gen.max, utilization.gpu [%]\n0, 1, 5, 97 %\n",
    "rank compute_ms wait_ms: 0:610/402 1:612/400 2:1009/3\n",
    "| rank | gemm_ms |\n|---|---|\n| 0 | 1 |\n",
    'DCGM_FI_DEV_XID_ERRORS{gpu="3",UUID="GPU-3",Hostname="h"} 31 1755000000000\n',
    "node gpu link replay recovery\na 0 13 0 5\n# +21 min\na 0 13 0 9\n",
    "SymbolErrorCounter:..............118\n",
    (
        "9b:00.0 Infiniband controller: Mellanox MT2910\n"
        "\tLnkCap: Port #0, Speed 32GT/s, Width x16\n\tLnkSta: Speed 8GT/s, Width x4\n"
    ),
    "GPU 0: X (UUID: GPU-0)\n\t Link 0: <inactive>\n\t Link 1: 26 GB/s\nGPU0 X NV4 SYS\nGPU1 NV4 X NV4\n",
    "memcpy bandwidth (GB/s)\n 0 1 2\n 0 55.1 55.0 1.0\n",
    "  PID PPID COMMAND\n1 1 x\ncpu-bind=MASK - g1, task 0 0 [1]: mask 0x1 set\n",
    '{"body": {"GPU": {"children": {"0": {"value": "Failure"}}}}, "status": "Fail", "name": "Memory"}\n',
    "^^^^ Rank: 0 | MnRtt/Rnk: 812.10ms/17 | MxRtt/Rnk: 1411.88ms/45\n",
    "Rank 3 -- GPU 1 managed by process 5 on node a\n 1 job process is considered dead\n",
]
WORDS = [w for seed in SEEDS for w in seed.split()] + [
    "nan",
    "1e999",
    "-1",
    "0x",
    "::",
    "/Rnk:",
    "\t",
    "\x00",
    "é",
    "N/A",
]


def check(parse: Parser, text: str, title: str = "", path: str = "p") -> None:
    for document in split(path, text):
        events = parse(document._replace(title=title or document.title), shipped())
        assert events is None or 0 <= len(events) <= EVENTS_LIMIT + 64
        for event in events or []:
            assert event.signature in shipped() and event.kind == shipped()[event.signature].kind
            event_fields(event)


@pytest.mark.parametrize(("name", "parse"), MINE)
@settings(max_examples=25, deadline=None)
@given(
    words=st.lists(st.sampled_from(WORDS), max_size=40),
    breaks=st.lists(st.sampled_from([" ", "\n", ": ", ", ", " | "]), max_size=40),
)
def test_words_of_real_outputs_in_any_order(name: str, parse: Parser, words: list[str], breaks: list[str]) -> None:
    text = "".join(w + b for w, b in zip(words, breaks + [" "] * 40, strict=False))
    check(parse, text)
    check(parse, text, title="nvidia-smi -q -i 1 | grep x --query-gpu=index,pstate")


@pytest.mark.parametrize(("name", "parse"), MINE)
@settings(max_examples=25, deadline=None)
@given(text=st.text(alphabet=string.printable + "éß\x00\u2028", max_size=200))
def test_any_text(name: str, parse: Parser, text: str) -> None:
    check(parse, text)
    check(parse, text, path="x/mlx5_0/ports/1/counters/symbol_error")


@pytest.mark.parametrize(("name", "parse"), MINE)
def test_real_outputs_cut_and_damaged(name: str, parse: Parser) -> None:
    rng = random.Random(7)
    for seed in SEEDS:
        for _ in range(12):
            begin, end = sorted(rng.randrange(len(seed) + 1) for _ in range(2))
            text = list(seed[begin:end])
            for _ in range(rng.randrange(6)):
                if text:
                    text[rng.randrange(len(text))] = rng.choice("0: \n|,x\t9[")
            check(parse, "".join(text))


HARD = ["a : " * 480, "rank=1 ms=2 " * 160, "gpu " + "1 " * 900, "| GPU " + "| " * 900,
        "slow straggler rank " * 95, "0 " + "1.1 " * 470,
        "GPU0 " + "NV18 " * 390, "{" * 1900, " " * 1900 + "x", "mask 0x" + "f" * 1900, "index, pstate, " + "1," * 900]  # fmt: skip


@pytest.mark.parametrize(("name", "parse"), MINE)
def test_lines_made_to_be_slow_are_not(name: str, parse: Parser) -> None:
    lines = ["memcpy bandwidth (GB/s)", "cpu-bind=MASK nvidia-smi ECC Errors dcgmi Diagnostic LnkSta GPU0 job process"]
    for text in HARD:
        lines += [text] * 10
    document = Document("p", "", tuple(Line(i, t, t) for i, t in enumerate(lines, 1)))
    begin = time.process_time()
    parse(document, shipped())
    # 112 lines of 2 kB; a pattern that backtracks needs minutes for one of them.
    assert time.process_time() - begin < 5


def test_many_entities_do_not_fill_memory() -> None:
    lines = [f"rank={i} compute_ms={i % 7}" for i in range(30_000)]
    document = Document("p", "", tuple(Line(i, t, t) for i, t in enumerate(lines, 1)))
    events = dict(MINE)["table"](document, shipped())
    assert events is not None and len(events) == 1
    assert len(events[0].attrs["values"]) <= 20_000


@given(st.text(alphabet=string.printable, max_size=30))
def test_a_number_is_a_number_or_nothing(text: str) -> None:
    value = number(text)
    assert value is None or isinstance(value, float)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("97 %", 97),
        ("26.562 GB/s", 26.562),
        ("0x10", 16),
        ("[N/A]", None),
        ("1,234 MiB", 1234),
        ("-3 C", -3),
        ("", None),
        ("nan", None),
    ],
)
def test_numbers_as_tools_print_them(text: str, value: float | None) -> None:
    assert number(text) == value
