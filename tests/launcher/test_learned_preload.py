"""The zygote learns which library modules a script imports, and has them ready for a later cycle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.launcher.harness import Launch, wait_until

SCRIPT = """
    import os, sys, signal, time
    cycle = int(os.environ["KEEPSTEP_CYCLE"])
    print("found", cycle, "wave" in sys.modules, "xml.dom.minidom" in sys.modules, "mine" in sys.modules, flush=True)
    import wave, xml.dom.minidom
    import mine
    import keepstep.trainer as ks
    run = ks.init()
    step = 0
    while not os.path.exists("go"):
        with run.step(step):
            time.sleep(0.01)
        step += 1
    if cycle == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    print("nice", os.nice(0), flush=True)
"""


def test_modules_of_the_first_cycle_are_there_in_the_next_but_not_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("value = 1\n")
    launch = Launch(tmp_path, SCRIPT, "--standalone")
    wait_until(lambda: len(list((launch.run_dir / "nodes").glob("*/preload.json"))) == 1)
    report = json.loads(next((launch.run_dir / "nodes").glob("*/preload.json")).read_text())
    assert "wave" in report["learned"] and "xml.dom.minidom" in report["learned"]
    assert "mine" not in report["learned"] and "mine" not in report["skipped"]
    (tmp_path / "go").touch()
    assert launch.finish() == 0, launch.output
    assert "found 0 False False False" in launch.output
    assert "found 1 True True False" in launch.output
    assert "nice 0" in launch.output


def test_module_with_side_effects_is_skipped_with_the_reason(tmp_path: Path) -> None:
    packages = tmp_path / "site"
    packages.mkdir()
    (packages / "ranky.py").write_text("import os\nrank = os.environ.get('LOCAL_RANK')\n")
    (packages / "thready.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    (packages / "signaly.py").write_text("import signal\nsignal.signal(signal.SIGUSR1, lambda *_: None)\n")
    # trial_imports forks; a pytest process has threads at times, so it runs in an interpreter of its own.
    names = ["ranky", "thready", "signaly", "colorsys", "not_there_at_all"]
    program = f"import json\nfrom keepstep.launcher.ranks.zygote import trial_imports\nprint(json.dumps(trial_imports({names!r})))"
    env = {"PYTHONPATH": str(packages), "PATH": "/usr/bin:/bin"}
    out = subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True, text=True).stdout
    skipped = json.loads(out)
    assert set(skipped) == {"ranky", "thready", "signaly", "not_there_at_all"}
    assert "LOCAL_RANK" in skipped["ranky"]
    assert "threads" in skipped["thready"]
    assert "handlers" in skipped["signaly"]
    assert "import failed" in skipped["not_there_at_all"]
