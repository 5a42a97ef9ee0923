"""A text taken apart: sections, transcripts, whose lines they are; nothing is lost and line numbers stay."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.sources.documents import Document, Origin, split
from keepstep.sources.names import of_path, of_title


def titles(text: str) -> list[str]:
    return [d.title for d in split("x.log", text)]


class TestSections:
    def test_numbers_are_those_of_the_file(self) -> None:
        documents = split("x.log", "a\n==> b.log <==\nc\n\n$ dmesg\ne\n")
        assert [(d.title, [(n.number, n.text) for n in d.lines]) for d in documents] == [
            ("", [(1, "a")]),
            ("b.log", [(3, "c"), (4, "")]),
            ("dmesg", [(6, "e")]),
        ]

    def test_an_answer_without_a_line_is_an_answer(self) -> None:
        assert titles("$ dmesg | grep Xid\n$ uptime -s\n2031-03-17 14:00:12\n") == ["dmesg | grep Xid", "uptime -s"]

    @pytest.mark.parametrize(
        ("raw", "title"),
        [
            ("==> /var/log/messages <==", "/var/log/messages"),
            ("=== rank7.log ===", "rank7.log"),
            ("##### dmesg -T #####", "dmesg -T"),
            ("--------- node gpu-17 ---------", "node gpu-17"),
            ("$ nvidia-smi -q -i 2", "nvidia-smi -q -i 2"),
            ("# nvidia-smi", "nvidia-smi"),
            ("# cat /var/log/messages", "cat /var/log/messages"),
            ("[root@h3 ~]# dmesg", "dmesg"),
            ("ubuntu@gpu-17:~/run$ ls -l", "ls -l"),
            ("(venv) me@gpu-17:/scratch$ python train.py", "python train.py"),
        ],
    )
    def test_what_begins_one(self, raw: str, title: str) -> None:
        assert titles(f"{raw}\nx") == [title]

    @pytest.mark.parametrize(
        "raw",
        [
            "============================================================",
            "====== training starts ======",
            "# 20 s later, under load",
            "# all_reduce_perf ... out-of-place 8.9 GB/s",
            "# last iteration was slow",
            "# find the rank that is late",
            "#SBATCH --time=04:00:00",
            "cost: 5 $ per hour",
            "-- Boot 0a1b2c3d --",
            "|=======================+=====================|",
            "[rank0]: 5 # comment",
        ],
    )
    def test_what_does_not(self, raw: str) -> None:
        assert titles(f"{raw}\nx") == [""]

    def test_hosts_of_dshbak_and_files_of_more(self) -> None:
        dashes, colons = "-" * 16, ":" * 14
        text = f"{dashes}\ngpu-17\n{dashes}\na\n{colons}\nx.log\n{colons}\nb\n{dashes}\nnothing\n{dashes}"
        documents = split("in", text)
        assert [d.title for d in documents] == ["", "gpu-17", "x.log"]
        assert documents[1].lines[1].node == "gpu-17"

    def test_the_prompt_names_the_machine(self) -> None:
        document = split("x.log", "[root@h3 ~]# dmesg\n[ 1.5] NVRM: Xid")[0]
        assert (document.node, document.lines[0].node, document.lines[0].stream) == ("h3", "h3", "kernel")


class TestNames:
    @pytest.mark.parametrize(
        ("path", "node", "rank", "pod"),
        [
            ("rank7.log", None, 7, None),
            ("rank-00007.stderr", None, 7, None),
            ("nccl_trace_rank_3", None, 3, None),
            ("node12-dmesg.txt", "node12", None, None),
            ("dmesg-gpu-17.txt", "gpu-17", None, None),
            ("gpu-17/kern.log", "gpu-17", None, None),
            ("gpu-17.log", "gpu-17", None, None),
            ("ip-10-0-7-19.log.gz", "ip-10-0-7-19", None, None),
            ("trainer-3.log", None, None, "trainer-3"),
            ("llm-worker-0-3-x7k2l.log", None, None, "llm-worker-0-3-x7k2l"),
            ("h3/rank12.log", "h3", 12, None),
            ("slurm-88123.out", None, None, None),
            ("run7/train.log", None, None, None),
            ("cycle-0003.log", None, None, None),
            ("step_400/x.log", None, None, None),
            ("input.log", None, None, None),
        ],
    )
    def test_files(self, path: str, node: str | None, rank: int | None, pod: str | None) -> None:
        hints = of_path(path)
        assert (hints.node, hints.rank, hints.pod) == (node, rank, pod)

    @pytest.mark.parametrize(
        ("title", "node"),
        [
            ("h3:/var/log/messages", "h3"),
            ("kernel on h-12, 1755086100", "h-12"),
            ("lspci -vvv (excerpt, node dl380-a4)", "dl380-a4"),
            ("nvidia-smi -q -i 2", None),
            ("nvidia-smi on gpu-17", "gpu-17"),
            ("sinfo -R --noheader", None),
            ("run A", None),
            ("node journal", None),
        ],
    )
    def test_titles(self, title: str, node: str | None) -> None:
        assert of_title(title).node == node

    def test_torchrun_folders(self) -> None:
        line = split("x", "boom", Origin(of_path("none_4x/attempt_0/7/stderr.log")))[0].lines[0]
        assert (line.local_rank, line.rank) == (7, 7)


class TestRanks:
    def test_local_ranks_follow_lines_that_tell_both(self) -> None:
        text = "[default1]:[rank9]: a\n[default3]:b\n[default3]:[rank11]: c"
        assert [(n.rank, n.local_rank) for n in split("x.log", text)[0].lines] == [(9, 1), (11, 3), (11, 3)]

    def test_a_label_of_srun_before_torchrun_is_a_node(self) -> None:
        text = (
            "srun torchrun --nproc-per-node=8 train.py\n==> slurm-1.out <==\n0: [default5]:a\n1: [default5]:[rank13]: b"
        )
        lines = split("x.log", text)[1].lines
        assert [n.local_rank for n in lines] == [5, 5]
        assert lines[1].rank == 13


class TestTransports:
    def test_journal_json(self) -> None:
        record = {
            "__REALTIME_TIMESTAMP": "1925200000123456",
            "_SOURCE_MONOTONIC_TIMESTAMP": "88211000001",
            "_TRANSPORT": "kernel",
            "_HOSTNAME": "gb-r06-01",
            "_BOOT_ID": "6f1b0c2d",
            "__SEQNUM": "77",
            "MESSAGE": "NVRM: Xid (PCI:0008:01:00): 45",
        }
        line = split("x.json", json.dumps(record))[0].lines[0]
        assert (line.text, line.node, line.boot_id, line.seq) == (record["MESSAGE"], "gb-r06-01", "6f1b0c2d", 77)
        assert (line.time_ns, line.boot_ns, line.stream) == (1925200000123456000, 88211000001000, "kernel")

    def test_a_message_that_is_a_list_of_bytes(self) -> None:
        text = '{"MESSAGE": [27, 91, 51, 49, 109, 78, 86, 82, 77, 255], "_HOSTNAME": "h1"}'
        assert split("x.json", text)[0].lines[0].text == "NVRM\ufffd"

    def test_journal_export(self) -> None:
        entry = "__CURSOR=s=1\n__REALTIME_TIMESTAMP=1925200000123456\n_HOSTNAME=h1\n_TRANSPORT=kernel\n"
        text = f"{entry}MESSAGE=NVRM: Xid\n\n__CURSOR=s=2\n"
        line = split("x.txt", text)[0].lines[4]
        assert (line.number, line.text, line.node, line.time_ns) == (5, "NVRM: Xid", "h1", 1925200000123456000)

    @pytest.mark.parametrize(
        "record",
        [
            {"log": "[rank3]: boom\n", "stream": "stderr", "time": "2031-05-22T10:00:01.5Z"},
            {
                "textPayload": "[rank3]: boom",
                "timestamp": "2031-05-22T10:00:01.5Z",
                "resource": {"labels": {"node_name": "n1"}},
            },
            {"message": "[rank3]: boom", "timestamp": 1937210401500, "logStreamName": "job/3"},
            {
                "log": "[rank3]: boom",
                "@timestamp": "2031-05-22T10:00:01.5Z",
                "kubernetes": {"host": "n1", "pod_name": "w-3"},
            },
        ],
    )
    def test_containers_and_clouds(self, record: dict[str, object]) -> None:
        line = split("x.json", json.dumps(record))[0].lines[0]
        assert (line.text, line.rank, line.time_ns) == ("boom", 3, 1937210401500000000)

    def test_other_json_is_left_to_its_parsers_with_its_time(self) -> None:
        text = '{"kind": "Event", "message": "x", "lastTimestamp": "2031-05-22T10:00:01.5Z"}'
        line = split("x.json", text)[0].lines[0]
        assert (line.text, line.time_ns) == (text, 1937210401500000000)


class TestTerminal:
    def test_a_progress_bar_keeps_its_last_state_and_what_stands_before(self) -> None:
        text = "loading\r 10%|# | 1/10 [00:01]\r 20%|## | 2/10 [00:02]\rRuntimeError: x\r\nnext"
        assert [(n.number, n.text) for n in split("x.log", text)[0].lines] == [
            (1, "loading"),
            (1, " 20%|## | 2/10 [00:02]"),
            (1, "RuntimeError: x"),
            (2, "next"),
        ]

    @pytest.mark.parametrize(
        ("raw", "text"),
        [
            ("\x1b[31mERROR\x1b[0m: x", "ERROR: x"),
            ("\x1b]0;title\x07x", "x"),
            ("\x1b[36m[rank3]:\x1b[0m x", "x"),
            ("abd\x08c", "abc"),
            ("\0\0\0NVRM: Xid", "NVRM: Xid"),
            ("^[[31mERROR^[[0m", "ERROR"),
            ("x\r", "x"),
        ],
    )
    def test_controls(self, raw: str, text: str) -> None:
        line = split("x.log", raw)[0].lines[0]
        assert (line.text, line.raw) == (text, raw)


def told(document: Document) -> list[int]:
    return [line.number for line in document.lines]


PIECES = (
    "==> ",
    "a.log",
    " <==",
    "$ ",
    "# ",
    "dmesg",
    "[root@h1 ~]",
    "=== ",
    "x",
    "\r",
    "\x0c",
    "\u2028",
    "0: ",
    "{",
    "=",
    "é",
)
LINE = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@given(st.lists(LINE, max_size=12))
def test_no_line_is_lost_and_none_is_invented(lines: list[str]) -> None:
    text = "\n".join(lines)
    documents = split("x.log", text)
    counted = len(text.split("\n")) - (text.endswith("\n") or not text)
    held = {n for d in documents for n in told(d)}
    begun = sum(1 for d in documents if d.title)
    assert len(held) + begun == counted
    assert held <= set(range(1, counted + 1))
    for document in documents:
        assert told(document) == sorted(told(document))
        assert all(line.raw == text.split("\n")[line.number - 1] for line in document.lines)
