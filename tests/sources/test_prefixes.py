"""What is taken off the front of a line, and what is learnt from it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.records.codec import rfc3339
from keepstep.sources.prefixes import Habits, habits_of, strip

UNCHANGED = ""

CASES: list[tuple[str, str, dict[str, Any]]] = [
    # torch and torchrun
    ("[rank7]: Traceback (most recent call last):", "Traceback (most recent call last):", {"rank": 7}),
    ('[rank7]:   File "train.py", line 3, in <module>', '  File "train.py", line 3, in <module>', {"rank": 7}),
    ('[default3]:  File "train.py", line 3', '  File "train.py", line 3', {"local_rank": 3, "rank": None}),
    ("[trainer11]:step 4", "step 4", {"local_rank": 11}),
    ("[default3]:[rank11]: boom", "boom", {"local_rank": 3, "rank": 11}),
    ("[rank12]:[E1206 18:44:12.715298746 Watch.cpp:607] [Rank 4] late", "[E1206 18:44:12.715298746 Watch.cpp:607] [Rank 4] late",
     {"rank": 12}),
    ("[E ProcessGroupNCCL.cpp:821] [Rank 3] late", UNCHANGED, {"rank": 3}),
    # within a group other than the world, a rank is not a rank of the job
    ("[E317 13:41:20.7 P.cpp:17] [PG ID 2 PG GUID 3 Rank 2] stuck", UNCHANGED, {"rank": None}),
    ("[E317 13:41:20.7 P.cpp:17] [PG ID 0 PG GUID 0(default_pg) Rank 368]  failure", UNCHANGED, {"rank": 368}),
    # other launchers
    ("[1,3]<stderr>:oops", "oops", {"rank": 3}),
    ("[prterun-h1-221@1,14]<stdout>: oops", "oops", {"rank": 14}),
    ("[node07:22817] *** Process received signal ***", "*** Process received signal ***", {"node": "node07"}),
    ("[core.py:712] started", UNCHANGED, {"node": None}),
    ("[rank 12] step 3", "step 3", {"rank": 12}),
    ("(TrainWorker pid=334, ip=10.0.0.3) boom", "boom", {"node": "10.0.0.3"}),
    # Kubernetes and containers
    ("[pod/llm-worker-3/main] hello", "hello", {"pod": "llm-worker-3"}),
    ("2031-05-22T10:00:01.123456789Z stderr F hello", "hello", {}),
    ("2031-10-21T18:04:55.143+00:00\t  File \"x.py\"", '  File "x.py"', {}),
    # the kernel
    ("[8123904.118207] NVRM: Xid (PCI:0002:00:00): 119", "NVRM: Xid (PCI:0002:00:00): 119", {"stream": "kernel"}),
    ("[    2.118207][  T412] usb 1-1: new", "usb 1-1: new", {"stream": "kernel"}),
    ("[  +0.000316] pcieport 0000:5d:02.0: AER", "pcieport 0000:5d:02.0: AER", {"stream": "kernel"}),
    ("<4>[   12.345678] hello", "hello", {"stream": "kernel"}),
    ("3,10412,7200000000,-;NVRM: Xid", "NVRM: Xid", {"stream": "kernel", "seq": 10412}),
    ("30,10412,7200000000,-;systemd[1]: Started", "systemd[1]: Started", {"stream": None, "seq": 10412}),
    ("kern  :warn  : 2031-01-21T04:41:44,283302+00:00 NVRM: Xid", "NVRM: Xid", {"stream": "kernel"}),
    ("kern  :warn  : [  123.4567] NVRM: Xid", "NVRM: Xid", {"stream": "kernel"}),
    # syslog and journal
    ("Dec  6 19:25:33 at7tj000004 systemd-networkd[2385]: ib1: Lost carrier", "systemd-networkd[2385]: ib1: Lost carrier",
     {"node": "at7tj000004"}),
    ("Jul 27 02:10:11 nd-7 kernel: [88211.1] NVRM: Xid", "NVRM: Xid", {"node": "nd-7", "stream": "kernel"}),
    ("2031-07-15T11:20:33+0000 ip-10-1-2-3 kernel: NVRM: Xid", "NVRM: Xid", {"node": "ip-10-1-2-3", "stream": "kernel"}),
    ("2031-07-15T11:20:33.123456+00:00 gpu-7 myagent: late", "myagent: late", {"node": "gpu-7"}),
    ("Tue 2031-06-24 10:15:00 UTC host9 kernel: x", "x", {"node": "host9", "stream": "kernel"}),
    ("<34>1 2031-10-11T22:14:15.003Z h.example.com su - ID47 - failed", "su: failed", {"node": "h.example.com"}),
    ("<4>1 2031-10-11T22:14:15.003Z h7 kernel - - - NVRM: Xid", "NVRM: Xid", {"node": "h7", "stream": "kernel"}),
    ("[   12.345678] h7 kernel: NVRM: Xid", "NVRM: Xid", {"node": "h7", "stream": "kernel"}),
    ("1725200000.123456 h7 kernel: NVRM: Xid", "NVRM: Xid", {"node": "h7", "stream": "kernel"}),
    ("/var/log/messages-3:Dec  6 19:25:33 a1 kernel: x", "x", {"node": "a1"}),
    ("kern.log:412:Dec  6 19:25:33 a1 kernel: x", "x", {"node": "a1"}),
    # programs: the header stays
    ("E0506 20:14:07.331880       1 log_watcher.go:102] closed", UNCHANGED, {}),
    ("ERROR 03-17 13:40:58 [core.py:712] fatal", UNCHANGED, {}),
    ("gpu-r2-07:44871:20188 [3] NCCL INFO NET/IB", UNCHANGED, {"node": "gpu-r2-07", "device": 3}),
    ('time="2031-06-24T10:15:00Z" level=error msg="x"', UNCHANGED, {}),
    ("2031-01-24T09:12:44 INFO rank0: plotting", "INFO rank0: plotting", {"rank": 0, "node": None}),
    ("2031-01-24 09:12:44,123 trainer epoch: 3", "trainer epoch: 3", {"node": None}),
    ("Mar 17 13:40:58 engine loop: died", "engine loop: died", {"node": None}),
    ("[2031-12-03 07:50:31,123] [INFO] [engine.py:3] x", "[INFO] [engine.py:3] x", {}),
    # no prefix at all
    ("3: eth0: <BROADCAST>", UNCHANGED, {"rank": None}),
    ("gpu-17: text", UNCHANGED, {"node": None}),
    ("Ranking 3: of all", UNCHANGED, {"rank": None}),
    ("rank=001 saved=5c02", UNCHANGED, {"rank": None}),
    ("", UNCHANGED, {"rank": None}),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "text", "said"), CASES)
def test_forms(raw: str, text: str, said: dict[str, Any]) -> None:
    prefixed = strip(raw)
    assert prefixed.text == (text or raw)
    assert {name: getattr(prefixed, name) for name in said} == said


@pytest.mark.parametrize(
    "text",
    [
        "ERROR:    2031-03-17 13:40:58,123 uvicorn boom",
        "[ERROR] 2031-03-17 13:40:58 boom",
        "(EngineCore_0 pid=331) WARNING 2031-03-17 13:40:58 [core.py:712] boom",
        "W 2031-03-17 13:40:58 backend_utils.py:2731] boom",
        'time="2031-03-17 13:40:58" level=error msg=boom',
        "level=error ts=2031-03-17 13:40:58 msg=boom",
        "2031-03-17 13:40:58.000 | ERROR    | main:12 - boom",
        "srun: error: *** STEP 4.0 ON n03 CANCELLED AT 2031-03-17T13:40:58 DUE TO TIME LIMIT ***",
        "  time      : 2031-03-17_13:40:58",
        "[2031-03-17 13:40:58,123][torch.distributed][ERROR] boom",
    ],
)
def test_where_a_time_stands(text: str) -> None:
    stamp = strip(text).said.stamp
    assert stamp is not None and stamp.kind == "local"
    assert rfc3339(stamp.ns).startswith("2031-03-17T13:40:58")


def test_a_level_of_one_letter_stands_before_a_day() -> None:
    stamp = strip("W 07-17 22:41:06 backend_utils.py:2731] boom").said.stamp
    assert stamp is not None and stamp.kind == "yearless"
    assert strip("W 07 lines").said.stamp is None


class TestHabits:
    """Prefixes that are believed only when most lines have them."""

    def test_labels_of_srun(self) -> None:
        lines = [
            "0: step 1 loss 2.0",
            " 1: step 1 loss 2.0",
            "12: Traceback (most recent call last):",
            "srun: error: n1",
        ]
        habits = habits_of(lines)
        assert habits == Habits(labels=True)
        assert [strip(t, habits).rank for t in lines] == [0, 1, 12, None]
        assert strip('12:   File "x.py"', habits).text == '  File "x.py"'

    def test_a_label_is_no_rank_where_srun_starts_a_launcher_on_each_node(self) -> None:
        habits = Habits(labels=True, tasks_are_nodes=True)
        assert strip("3: [default5]:hello", habits).local_rank == 5
        assert strip("3: hello", habits).rank is None
        assert strip("3: [rank29]: hello", habits).rank == 29

    def test_containers_of_compose(self) -> None:
        lines = ["trainer-3  | step 1", "trainer-12 | [rank12]: boom"]
        habits = habits_of(lines)
        assert habits.bars
        assert [(strip(t, habits).pod, strip(t, habits).text) for t in lines] == [
            ("trainer-3", "step 1"),
            ("trainer-12", "boom"),
        ]

    def test_hosts_of_pdsh(self) -> None:
        lines = ["gpu-17: NVRM: Xid 1", "gpu-18: NVRM: Xid 2", "gpu-17: [ 12.5] NVRM: Xid 3", "gpu-18: x"]
        habits = habits_of(lines)
        assert habits.hosts
        assert [strip(t, habits).node for t in lines] == ["gpu-17", "gpu-18", "gpu-17", "gpu-18"]
        assert strip(lines[2], habits).text == "NVRM: Xid 3"

    @pytest.mark.parametrize(
        "lines",
        [
            ["cable1: a.p0 <-> b.p0", "cable2: b.p1 <-> c.p1"],
            ["1: lo: <LOOPBACK>", "    link/loopback 00:00", "2: eth0: <UP>", "    link/ether 00:11"],
            ["NAME | READY | AGE", "pod-1 | yes | 3d", "pod-2 | yes | 3d"],
            ["step 1", "0: x"],
            [],
        ],
    )
    def test_tables_and_lists_are_none(self, lines: list[str]) -> None:
        assert habits_of(lines) == Habits()


WORDS = """
[rank7]: [default3]: 0:_ [1,3]<stderr>: [ ] Dec__6_19:25:33_ 2031-05-22T10:00:01Z_ <4> kernel:_ [__1.5]_ h7_ { (pid=3)_
E0506_20:14:07_ 1725200000.5 x _ : 29 /var/log/a.log: /
"""
PIECES = st.lists(
    st.sampled_from([word.replace("_", " ") for word in WORDS.split()]) | st.text(max_size=5), max_size=12
).map("".join)


@given(PIECES, st.booleans())
def test_what_is_left_is_the_end_of_the_line(raw: str, habits: bool) -> None:
    prefixed = strip(raw, Habits(habits, habits, habits, False))
    # RFC 5424 alone is put together anew: "program: message".
    assert raw.endswith(prefixed.text) or raw.startswith("<")
    assert prefixed.rank is None or 0 <= prefixed.rank < 10**7
