"""A rank forked from the zygote is like one that torchrun started, as far as a script can tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from keepstep.launcher.ranks.environment import NCCL_DEFAULTS
from tests.launcher.harness import run

PROBE = textwrap.dedent("""
    import atexit, ctypes, json, os, random, resource, signal, sys
    import multiprocessing as mp
    import numpy, torch

    class Thing:
        value = 7

    def double(x):
        return 2 * x

    def openblas_threads():
        paths = {l.split()[-1] for l in open("/proc/self/maps") if "openblas" in l and ".so" in l}
        for path in paths:
            library = ctypes.CDLL(path)
            for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads64_", "openblas_get_num_threads"):
                if hasattr(library, name):
                    return getattr(library, name)()

    def handlers():
        found = {}
        for number in signal.valid_signals():
            handler = signal.getsignal(number)
            found[int(number)] = getattr(handler, "__name__", str(handler))
        return found

    if __name__ == "__main__":
        mask = os.umask(0); os.umask(mask)
        with mp.get_context("spawn").Pool(1) as pool:
            doubled = pool.map(double, [21])
        out = {
            "argv": sys.argv, "path": sys.path, "cwd": os.getcwd(), "umask": mask,
            "threads": torch.get_num_threads(), "interop": torch.get_num_interop_threads(), "blas": openblas_threads(),
            "omp": os.environ.get("OMP_NUM_THREADS"), "openblas_env": os.environ.get("OPENBLAS_NUM_THREADS"),
            "handlers": handlers(), "blocked": sorted(int(s) for s in signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "limits": [resource.getrlimit(getattr(resource, n)) for n in sorted(dir(resource)) if n.startswith("RLIMIT_")],
            "main": {k: str(globals()[k]) for k in ("__name__", "__file__", "__spec__", "__package__", "__doc__")},
            "main_module": sys.modules["__main__"].Thing is Thing, "nice": os.nice(0), "doubled": doubled,
            "encoding": [sys.stdout.encoding, sys.stderr.encoding, sys.stdout.write_through, sys.stderr.errors],
            "method": mp.get_start_method(), "default_dtype": str(torch.get_default_dtype()),
            "grad": torch.is_grad_enabled(), "thread_count": len(os.listdir("/proc/self/task")) > 0,
            "environ": sorted(k for k in os.environ if not k.startswith(("KEEPSTEP_", "NVRX_", "PYTEST_"))),
            "random": [random.random(), float(numpy.random.rand()), float(torch.rand(1)), torch.initial_seed()],
            "world": [os.environ[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_NAME")],
        }
        # One file a rank and cycle.
        name = f"{sys.argv[1]}-{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}.json"
        atexit.register(lambda: open(name, "w").write(json.dumps(out)))
        sys.stdout.write("no newline at the end")
""")
RANDOM = "random"
# Set by keepstep on purpose, or by torchrun for its own use.
DIFFERENT_ENVIRONMENT = {
    *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "LC_CTYPE", *NCCL_DEFAULTS),
    *("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"),
}


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same script under torchrun, a forked rank (two cycles' worth), and a fresh interpreter."""
    folder = tmp_path_factory.mktemp("parity")
    (folder / "script.py").write_text(PROBE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "KEEPSTEP_"))} | {"ROOT": "x"}
    subprocess.run([*torchrun, "script.py", "torchrun"], cwd=folder, check=True, capture_output=True, env=clean)
    two = ("--standalone", "--nproc-per-node", "2")
    code, forked = run(folder, PROBE, *two, args=("forked",))
    assert code == 0, forked.output
    assert forked.output.count("no newline at the end") == 2
    code, fresh = run(folder, PROBE, *two, "--no-zygote", args=("fresh",))
    assert code == 0, fresh.output
    found: dict[str, dict[str, Any]] = {}
    for path in folder.glob("*-?-*.json"):
        found[path.stem.rsplit("-", 1)[0]] = json.loads(path.read_text())
    return found


@pytest.mark.parametrize("kind", ["forked", "fresh"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_looks_like_torchruns(probes: dict[str, dict[str, Any]], kind: str, rank: str) -> None:
    ours, theirs = dict(probes[f"{kind}-{rank}"]), dict(probes[f"torchrun-{rank}"])
    assert ours["argv"][0] == theirs["argv"][0]
    environments = set(ours.pop("environ")), set(theirs.pop("environ"))
    assert environments[0] ^ environments[1] <= DIFFERENT_ENVIRONMENT
    for key in ("argv", RANDOM, "handlers"):
        ours.pop(key)
        theirs.pop(key)
    assert ours == theirs


@pytest.mark.parametrize("kind", ["forked", "fresh"])
def test_signal_handlers_are_a_fresh_interpreters(probes: dict[str, dict[str, Any]], kind: str) -> None:
    assert probes[f"{kind}-0"]["handlers"] == probes["torchrun-0"]["handlers"]


def test_every_rank_draws_its_own_numbers(probes: dict[str, dict[str, Any]]) -> None:
    drawn = [tuple(p[RANDOM]) for p in probes.values()]
    assert len(drawn) == 6
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == len(drawn), column


def test_forked_ranks_of_two_cycles_draw_different_numbers(tmp_path: Path) -> None:
    script = """
        import os, random, signal, numpy, torch
        print("drawn", random.random(), numpy.random.rand(), float(torch.rand(1)), flush=True)
        if os.environ["KEEPSTEP_CYCLE"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    """
    code, launch = run(tmp_path, script, "--standalone")
    assert code == 0, launch.output
    lines = [line.split()[1:] for line in launch.lines if line.startswith("drawn")]
    assert len(lines) == 2
    assert all(a != b for a, b in zip(*lines, strict=True))
