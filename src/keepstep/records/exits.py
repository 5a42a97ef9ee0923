"""Exit codes and what each of them means. One table; `keepstep explain-exit` prints it."""

from __future__ import annotations

import signal

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_PROBLEM = 3
EXIT_UNREACHABLE = 4
EXIT_DENIED = 5
EXIT_NOT_FOUND = 6
EXIT_CONFIG = 42
EXIT_NUMERICAL = 43
EXIT_NO_RESTART = 93

MEANINGS: dict[int, str] = {
    EXIT_OK: "success",
    EXIT_FAILURE: "failure: the job or command failed; for `run` the restart budget is used up, requeueing may help",
    EXIT_USAGE: "usage: a flag, file or value is wrong, or an extra is not installed; the message names it",
    EXIT_PROBLEM: "a check found a problem (scan, why, check, ckpt verify, policy check); never passed through by `run`",
    EXIT_UNREACHABLE: "the server cannot be reached",
    EXIT_DENIED: "denied by policy",
    EXIT_NOT_FOUND: "no such run, incident, checkpoint or file",
    EXIT_CONFIG: "configuration or code bug: the same failure would happen again, do not retry",
    EXIT_NUMERICAL: "numerical guard: loss or gradients are not finite; a human should look before going on",
    EXIT_NO_RESTART: "do not requeue: keepstep decided that another try would not help; verdict.json has the cause",
}


def explain_exit(code: int) -> str:
    """Say in one sentence what exit code `code` means (128+n is signal n)."""
    if code in MEANINGS:
        return MEANINGS[code]
    if code > 128 and code - 128 in {int(s) for s in signal.Signals}:
        name = signal.Signals(code - 128).name
        extra = {
            "SIGINT": ": interrupted from the keyboard",
            "SIGTERM": ": asked to stop (preemption or drain)",
            "SIGKILL": ": killed; on a cluster often the out-of-memory killer or the scheduler's last step",
        }.get(name, "")
        return f"ended by {name} (128+{code - 128}){extra}"
    return "no meaning in keepstep; the program itself chose it"


def exit_status_name(code: int) -> str:
    """Short form of a process status as `waitid` gives it: negative numbers are signals ("SIGKILL"), others "exit N"."""
    if code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"
    return f"exit {code}"
