"""The process that hosts one cycle's TCPStore: forked from the zygote, or a fresh interpreter where that may not fork.

As a program: `python -m keepstep.launcher.ranks.storehost PORT AGENT_PID FD` writes its answer to descriptor FD.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from typing import Any, NoReturn

from keepstep.launcher.ranks.rankmain import adopt_parent


def host_store(port: int, agent_pid: int, write_end: int) -> NoReturn:
    """Listen on `port` (0: any), say so on `write_end`, and stay until killed or until the agent dies."""
    adopt_parent(agent_pid)
    os.setpgid(0, 0)
    try:
        # By name: nothing else in the launcher may pull torch in.
        distributed = sys.modules.get("torch.distributed") or importlib.import_module("torch.distributed")
        store = distributed.TCPStore("localhost", port, None, True, wait_for_workers=False)
        answer: dict[str, Any] = {"pids": [os.getpid()], "port": store.port}
    except Exception as error:
        answer = {"refused": f"{type(error).__name__}: {error}"}
    os.write(write_end, json.dumps(answer).encode() + b"\n")
    os.close(write_end)
    while "port" in answer:
        signal.pause()
    os._exit(1)


if __name__ == "__main__":
    host_store(*(int(a) for a in sys.argv[1:4]))
