"""Levels 2 and 3 of the node check: short probes of memory, disk and GPUs, and NVIDIA's diagnostic.

GPU probes run in a process of their own: torch stays out of the launcher, and a probe that hangs can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from keepstep.launcher.bounded import run_tool
from keepstep.launcher.health.nodecheck import MB, CheckResult, Request

COPY_MB = 256
WRITE_MB = 128
GPU_LIMIT_S = 120.0
DCGM_LIMIT_S = 900.0
"""`dcgmi diag -r 2` takes about two minutes on a node of eight GPUs; the bound is for a diagnostic that hangs."""

# The same product twice: a GPU whose arithmetic is broken, or whose memory loses bits, seldom gives the same bits again.
MATMUL = """
import json, sys, time
try:
    import torch
except ImportError:
    print(json.dumps({"skip": "torch is not installed"})); sys.exit()
if not torch.cuda.is_available():
    print(json.dumps({"skip": "torch sees no GPU"})); sys.exit()
found = []
for i in range(torch.cuda.device_count()):
    torch.cuda.set_device(i)
    n = 8192
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    first = a @ b
    torch.cuda.synchronize()
    begin = time.perf_counter()
    same = True
    for _ in range(10):
        same = torch.equal(a @ b, first) and same
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    found.append({"gpu": i, "tflops": 10 * 2 * n**3 / seconds / 1e12, "same": same, "finite": bool(first.isfinite().all())})
print(json.dumps({"gpus": found}))
"""


class Probe(msgspec.Struct, frozen=True):
    """A probe, how long it may take, and what runs it."""

    name: str
    limit_s: float
    run: Callable[[Request], list[CheckResult]]


def probes(level: int) -> list[Probe]:
    """The probes of a level and those below it, in the order they run."""
    second = [
        Probe("probe.memory_copy", 30.0, probe_memory),
        Probe("probe.disk_write", 60.0, probe_disk),
        Probe("probe.gpu_matmul", GPU_LIMIT_S + 5, probe_gpus),
    ]
    third = [Probe("probe.dcgm", DCGM_LIMIT_S + 5, probe_dcgm)]
    return (second if level >= 2 else []) + (third if level >= 3 else [])


def probe_memory(request: Request) -> list[CheckResult]:
    """Speed of copying COPY_MB in one thread, best of three: a node with a sick memory channel or in a low clock is far below."""
    source = bytearray(COPY_MB * MB)
    best_s = min(_timed(lambda: bytes(source)) for _ in range(3))
    return [_rate("probe.memory_copy", COPY_MB / best_s, request.limits.memory_copy_mb_per_s)]


def probe_disk(request: Request) -> list[CheckResult]:
    """Speed of writing and syncing WRITE_MB where the run writes (the temporary folder without a run folder)."""
    folder = next(
        (p for p in (request.run_dir, Path(tempfile.gettempdir())) if p is not None and p.is_dir()), Path("/tmp")
    )
    block = os.urandom(MB)
    with tempfile.TemporaryFile(dir=folder) as file:

        def write() -> None:
            for _ in range(WRITE_MB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

        seconds = _timed(write)
    return [_rate("probe.disk_write", WRITE_MB / seconds, request.limits.disk_write_mb_per_s, str(folder))]


def probe_gpus(_request: Request, script: str = MATMUL) -> list[CheckResult]:
    """A matrix product on every visible GPU: finite, the same bits each time, and how fast."""
    name = "probe.gpu_matmul"
    try:
        done = run_tool([sys.executable, "-c", script], GPU_LIMIT_S)
    except TimeoutError as error:
        return [CheckResult(name=name, ok=False, detail=str(error), next_step="look for NVRM lines in the kernel log")]
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        report: dict[str, Any] = json.loads(lines[-1] if lines else "")
    except ValueError:
        return [CheckResult(name=name, ok=False, detail=f"exit {done.returncode}: {' '.join(lines[-3:])[-300:]}")]
    if "skip" in report:
        return [CheckResult(name=name, ok=None, detail=report["skip"])]
    found = []
    for gpu in report["gpus"]:
        bad = "" if gpu["same"] and gpu["finite"] else "the same product gave different or not finite values"
        step = "cordon the node and run dcgmi diag -r 3" if bad else ""
        value = f"{gpu['tflops']:.1f} TFLOP/s"
        found.append(CheckResult(name=f"{name}.{gpu['gpu']}", ok=not bad, value=value, detail=bad, next_step=step))
    return found


def probe_dcgm(_request: Request) -> list[CheckResult]:
    """`dcgmi diag -r 2`, where it is installed. Its verdict is read from its JSON; one that cannot be read is unknown, not good."""
    program = shutil.which("dcgmi")
    name = "probe.dcgm"
    if program is None:
        return [CheckResult(name=name, ok=None, detail="dcgmi is not installed")]
    try:
        done = run_tool([program, "diag", "-r", "2", "-j"], DCGM_LIMIT_S)
    except (TimeoutError, OSError) as error:
        return [CheckResult(name=name, ok=None, detail=str(error))]
    text = done.stdout.decode(errors="replace")
    passed, failed = read_dcgm(text)
    if failed:
        return [
            CheckResult(name=name, ok=False, detail="failed: " + "; ".join(failed)[:500], next_step="cordon the node")
        ]
    if passed:
        return [CheckResult(name=name, ok=True, value=f"{passed} tests passed")]
    return [
        CheckResult(
            name=name, ok=None, detail=f"no verdict in its output (exit {done.returncode}): {text.strip()[-300:]}"
        )
    ]


def read_dcgm(text: str) -> tuple[int, list[str]]:
    """Count of passed results, and what failed, in the JSON of `dcgmi diag -j`.

    Its nesting differs between DCGM 2, 3 and 4, the leaves do not: objects with a `status` of PASS, FAIL, WARN or SKIP. WARN is no
    verdict.
    """
    start = text.find("{")
    try:
        tree, _ = json.JSONDecoder().raw_decode(text[start:]) if start >= 0 else ({}, 0)
    except ValueError:
        return 0, []
    passed, failed = 0, []
    for where, status in _statuses(tree, ""):
        if status.startswith("pass"):
            passed += 1
        elif status.startswith("fail"):
            failed.append(where)
    return passed, failed


def _statuses(node: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, list):
        for item in node:
            yield from _statuses(item, where)
    elif isinstance(node, dict):
        named = node.get("name") or node.get("category")
        if isinstance(named, str):
            where = f"{where} {named}".strip()
        status = node.get("status")
        if isinstance(status, str):
            gpu = node.get("gpu_id", node.get("gpu_ids", node.get("entity_id")))
            reason = node.get("warnings") or node.get("info") or ""
            text = json.dumps(reason) if not isinstance(reason, str) else reason
            yield f"{where}{'' if gpu is None else f' GPU {gpu}'} {text[:200]}".strip(), status.lower()
        for value in node.values():
            yield from _statuses(value, where)


def _rate(name: str, mb_per_s: float, least: float, where: str = "") -> CheckResult:
    ok = mb_per_s >= least
    return CheckResult(
        name=name,
        ok=ok,
        value=f"{mb_per_s:.0f} MB/s",
        limit=f"{least:g} MB/s",
        detail=where if ok else f"{mb_per_s:.0f} MB/s {where}".strip(),
    )


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    with contextlib.suppress(MemoryError):
        call()
    return time.perf_counter() - begin
