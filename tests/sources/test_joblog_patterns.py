"""The patterns of what jobs print match their examples as they come: behind the prefixes of launchers and collectors."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from keepstep.catalog.load import entries
from keepstep.catalog.signature import Signature
from keepstep.records.verdict import NODE_ACTIONS
from keepstep.sources.documents import split
from tests.attribution.jobtexts import matcher, signatures_of

FILES = ("torch", "cuda", "nccl", "python", "job", "launcher", "derived_job")
ENTRIES: list[Signature] = [
    entry
    for name in FILES
    for entry in entries(
        (resources.files("keepstep.catalog") / "data" / "signatures" / f"{name}.toml").read_text(encoding="utf-8"), name
    )
]
PREFIXES = (
    "",
    "[rank3]: ",
    "[default1]:",
    "2031-02-14T11:00:00Z ",
    "(Worker pid=71, ip=10.0.0.4) ",
    "2031-02-14 11:00:00,118 ",
)
EXAMPLES = [(entry.id, example) for entry in ENTRIES for example in entry.examples]


def matched(text: str) -> set[str]:
    return {m.signature.id for d in split("job.log", text) for line in d.lines for m in matcher().match_line(line.text)}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_examples_match_behind_prefixes(prefix: str) -> None:
    lost = []
    for name, example in EXAMPLES:
        if example.startswith(("$", "==>")):
            continue
        if name not in matched(prefix + example) and not example[0].isspace():
            lost.append((name, prefix + example))
    assert lost == []


def test_near_misses_do_not_match() -> None:
    assert [(e.id, miss) for e in ENTRIES for miss in e.near_misses if e.id in matched(miss)] == []


def test_every_pattern_has_an_example() -> None:
    assert [e.id for e in ENTRIES if e.pattern and not e.examples] == []


def test_a_fault_of_the_program_takes_no_hardware_out() -> None:
    wrong = []
    for entry in ENTRIES:
        best = max(entry.weights, key=lambda name: entry.weights[name], default=None)
        if best == "user_code" and entry.role == "root" and entry.action in NODE_ACTIONS:
            wrong.append(entry.id)
    assert wrong == []


def test_symptoms_say_nearly_nothing_about_the_class() -> None:
    assert [e.id for e in ENTRIES if e.role == "symptom" and sum(e.weights.values()) > 1.3] == []


def test_ordinary_lines_of_a_healthy_job_are_nothing_that_failed() -> None:
    text = """\
2031-02-14 11:00:00 step 100 loss 2.01 lr 1e-4 grad_norm 0.8 tokens/s 41000
 iteration      500/  100000 | lm loss: 2.1E+00 | number of skipped iterations:   0 | number of nan iterations:   0 |
[rank0]: epoch 3 done, val_loss=0.44 accuracy 0.91
W0214 11:00:00.1 torch/distributed/run.py:774] Setting OMP_NUM_THREADS environment variable for each process to be 1 in default
n1:5:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
n1:5:9 [0] NCCL INFO Connected all trees
n1:5:9 [0] NCCL INFO comm 0x5581 rank 0 nranks 16 cudaDev 0 busId 1b000 - Init COMPLETE
saving checkpoint at iteration 500 to /ckpt
  successfully saved checkpoint from iteration 500 to /ckpt
"""
    from keepstep.catalog.load import shipped

    assert [s for s in signatures_of(text) if shipped()[s].role in ("root", "cascade", "symptom")] == []


def test_files_are_plain_toml() -> None:
    for name in FILES:
        text = (resources.files("keepstep.catalog") / "data" / "signatures" / f"{name}.toml").read_text(
            encoding="utf-8"
        )
        assert tomllib.loads(text)["signature"]
