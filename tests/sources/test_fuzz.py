"""Any bytes at all: read without an exception, in bounded time, into a bounded number of events."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.catalog.load import shipped
from keepstep.records.event import TEXT_LIMIT, Event, event_fields
from keepstep.sources.documents import split
from keepstep.sources.parsers import PARSERS
from keepstep.sources.reading import read_paths
from tests.sources.making import matcher, xid

FRAGMENTS = """
[rank7]: [default3]: 0:_ [1,3]<stderr>: [pod/w-3/c]_ ==>_ _<== $_ #_ === dmesg_-T nvidia-smi_-q sinfo_-R
kubectl_get_events { } [ ] " : , 2031-05-22T10:00:01Z Dec__6_19:25:33_h1_kernel:_ E0506_20:14:07_ [__1.5]_ [__+0.1]_
3,10412,7200000000,-; <4> 1725200000123 "MESSAGE": "log": "kind": "items": apiVersion: kind:_Pod status: ---
JobID|State|ExitCode Traceback_(most_recent_call_last): __File_"x.py", Linux_version_6.8 last_seq=99999999999999999999
uptime_s=1e400 repaired_at_ boot_at_ step_ loss_ 50%|#|_1/2_[00:01<00:01,_1it/s] nan inf -1 99999999999999999999999 0x
0000:9c:00.0 GPU-1 mlx5_0 WorkNCCL(SeqNum=1,_OpType=ALLREDUCE 12 é \\u2028 \\x00 \\x1b[31m \\r \\x08
"""
WORDS = [f.replace("_", " ").encode().decode("unicode_escape", "replace") for f in FRAGMENTS.split()]
WORDS += [xid(79), xid(145), "\n", "\n", "\n", "\n  "]
BEGINS = [b"", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff\xfe", b"\xfe\xff", b"{", b"\x80\x02"]
EXAMPLES = [example for signature in shipped() for example in (*signature.examples, *signature.near_misses)]
CUT = st.tuples(st.sampled_from(EXAMPLES), st.integers(1, 200)).map(lambda pair: pair[0][: pair[1]])
PIECES = st.sampled_from(WORDS) | st.text(max_size=8) | CUT
TEXTS = st.lists(PIECES, max_size=60).map("".join)


def check(events: list[Event]) -> None:
    """What holds for every event, whatever it was made from."""
    catalog = shipped()
    for one in events:
        assert one.signature in catalog
        assert len(one.evidence.text) <= TEXT_LIMIT
        assert one.count >= 1
        event_fields(one)


@settings(deadline=2000)
@given(TEXTS)
def test_texts_that_look_like_logs(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "input.log"
        path.write_bytes(text.encode("utf-8", "surrogateescape" if "\udc80" in text else "replace"))
        found = read_paths([str(path)], shipped(), matcher=matcher())
    check(found.events)
    assert len(found.events) <= 100 + 40 * text.count("\n")


@settings(deadline=2000)
@given(
    st.binary(max_size=2000),
    st.sampled_from([b"", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xff\xfe", b"\xfe\xff", b"{", b"\x80\x02"]),
)
def test_any_bytes(data: bytes, begin: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "input.log").write_bytes(begin + data)
        (Path(folder) / "packed").write_bytes(gzip.compress(data)[: 10 + len(data) // 2])
        found = read_paths([folder], shipped(), matcher=matcher())
    check(found.events)


@settings(deadline=2000)
@given(TEXTS)
def test_every_parser_of_documents(text: str) -> None:
    for document in split("input.log", text):
        for name, parse in PARSERS:
            events = parse(document, shipped())
            assert events is None or isinstance(events, list), name
            check(events or [])
