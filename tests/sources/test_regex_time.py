"""No expression of the readers takes for ever on a line made for it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow  # 445 expressions, 14 s
@pytest.mark.timeout(150)
def test_no_expression_hangs_on_a_line_that_repeats_what_it_repeats() -> None:
    command = [sys.executable, "-m", "tests.sources.regex_attack"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired as error:
        last = (error.stdout or b"").decode().split()[-1:]
        pytest.fail(f"does not come back: {last}")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-2]) > 400
