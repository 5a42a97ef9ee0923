"""Facts for `keepstep doctor`: read from the environment, a run folder, this host and its scheduler. Nothing is judged here."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from keepstep.checkpoint.format.layout import MARKERS, parse_folder_name
from keepstep.launcher.config import RunConfig
from keepstep.launcher.coordination.journal import epochs, read_marks
from keepstep.launcher.coordination.runfolder import read_cycles
from keepstep.launcher.doctor.scriptscan import Script, scan_script
from keepstep.records.codec import from_json
from keepstep.records.errors import ConfigError, StorageError
from keepstep.records.timeline import Mark

SCONTROL_TIMEOUT_S = 10.0
NS = 1e9


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The longest of each that a run has seen, in seconds; None when it has seen none.

    `save_s` is from the start of a save to its marker being durable, `first_step_s` holds compilation.
    """

    where: str
    save_s: float | None = None
    first_step_s: float | None = None
    restore_s: float | None = None


class LateRank(msgspec.Struct, frozen=True, kw_only=True):
    """In a captured cycle, one rank was in a section of its own while every other rank waited for it in a collective."""

    cycle: int
    rank: int
    section: str
    waiting: int


class IbPort(msgspec.Struct, frozen=True, kw_only=True):
    """A port of a host channel adapter that speaks InfiniBand. `pkeys`: index -> partition key, as sysfs has them."""

    name: str
    pkeys: dict[int, int]


class TokenFile(msgspec.Struct, frozen=True, kw_only=True):
    """Permissions of the token file. `mode` is None when there is no such file."""

    path: str
    mode: int | None
    is_own: bool = True


class Toleration(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A toleration of a pod as the Kubernetes API spells it. `toleration_seconds` None: for ever."""

    key: str = ""
    operator: str = "Equal"
    effect: str = ""
    toleration_seconds: int | None = None


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that the rules look at. None means: not known here."""

    env: dict[str, str] = {}
    config: RunConfig | None = None
    config_where: str = ""
    measured: Measured | None = None
    late_ranks: list[LateRank] = []
    script: Script | None = None
    ib_ports: list[IbPort] = []
    slurm: dict[str, str] | None = None
    slurm_where: str = ""
    in_kubernetes: bool = False
    tolerations: list[Toleration] | None = None
    pod_where: str = ""
    available_bytes: int | None = None
    available_where: str = ""
    shard_bytes: int | None = None
    """Bytes that one save of this node's ranks stages in host memory."""
    shard_where: str = ""
    open_files: tuple[int, int] | None = None
    """Soft and hard limit of open files."""
    run_dir_type: str | None = None
    """File system that the run folder is on, as /proc/mounts names it."""
    token: TokenFile | None = None
    gpus: int | None = None
    price_per_gpu_hour: float | None = None
    image_pull_s: float | None = None


def gather(
    *,
    run_dir: Path | None = None,
    script: Path | None = None,
    pod: Path | None = None,
    slurm_config: Path | None = None,
    checkpoints: Path | None = None,
    gpus: int | None = None,
    price_per_gpu_hour: float | None = None,
    image_pull_s: float | None = None,
    env: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> Facts:
    """Read everything that can be read here. Raises ConfigError or StorageError for a file that the user named.

    `root` stands before /proc and /sys.
    """
    config = read_config(run_dir) if run_dir is not None else None
    path = script or _script_of(config)
    slurm, slurm_where = read_slurm(slurm_config)
    available, available_where = available_memory(root)
    shard = newest_shard_bytes(checkpoints, config.nnodes if config else 1) if checkpoints is not None else None
    world = config.nnodes * config.nproc if config else None
    return Facts(
        env=dict(env),
        config=config,
        config_where=f"{run_dir}/run.json" if run_dir is not None else "",
        measured=measure(run_dir) if run_dir is not None else None,
        late_ranks=read_late_ranks(run_dir) if run_dir is not None else [],
        script=scan_script(path) if path is not None else None,
        ib_ports=read_ib_ports(root),
        slurm=slurm,
        slurm_where=slurm_where,
        in_kubernetes="KUBERNETES_SERVICE_HOST" in env,
        tolerations=read_tolerations(pod) if pod is not None else None,
        pod_where=str(pod or ""),
        available_bytes=available,
        available_where=available_where,
        shard_bytes=shard,
        shard_where=str(checkpoints or ""),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        run_dir_type=file_system(run_dir, root) if run_dir is not None else None,
        token=token_file(Path(config.token_file)) if config and config.token_file else None,
        gpus=gpus if gpus is not None else world,
        price_per_gpu_hour=price_per_gpu_hour,
        image_pull_s=image_pull_s,
    )


def read_config(run_dir: Path) -> RunConfig | None:
    """run.json of a run folder, None without one. Raises StorageError when it is damaged."""
    path = run_dir / "run.json"
    try:
        return from_json(path.read_bytes(), RunConfig)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise StorageError(f"{path}: cannot be read as a run's configuration: {error}") from error


def _script_of(config: RunConfig | None) -> Path | None:
    """The run's own script where it is a Python file that is still there."""
    if config is None or config.mode != "script":
        return None
    path = Path(config.script)
    return path if path.suffix == ".py" and path.is_file() else None


def measure(run_dir: Path) -> Measured | None:
    """The longest save, first step and restore of a run; None when it has no journal."""
    if not epochs(run_dir):
        return None
    cycles = [cycle.phases for cycle in read_cycles(run_dir)]
    return Measured(
        where=f"{run_dir}, {len(cycles)} cycles",
        save_s=_longest([_save_s(mark) for mark in read_marks(run_dir)]),
        first_step_s=_longest([phases.first_step_s for phases in cycles]),
        restore_s=_longest([phases.restore_s for phases in cycles]),
    )


def _save_s(mark: Mark) -> float:
    """Seconds of a save that a mark tells of: persisting (`committed`) or standing still (`ckpt_block`); else 0."""
    attrs = mark.attrs
    if mark.kind == "committed":
        persist_ns = attrs.get("persist_ns")
        return persist_ns / NS if isinstance(persist_ns, int) else 0.0
    if mark.kind == "ckpt_block":
        begin, end = attrs.get("begin_ns"), attrs.get("end_ns")
        return (end - begin) / NS if isinstance(begin, int) and isinstance(end, int) else 0.0
    return 0.0


def _longest(values: list[float]) -> float | None:
    return max((v for v in values if v > 0), default=None)


def read_late_ranks(run_dir: Path) -> list[LateRank]:
    """From the evidence of failed cycles: cycles where exactly one rank was not in a collective, but in a section."""
    found = []
    for folder in sorted((run_dir / "evidence").glob("cycle-*")):
        ranks = [r for r in (_json(p) for p in sorted(folder.glob("rank-*.json"))) if r]
        late = [r for r in ranks if r.get("in_collective") is not True]
        if len(ranks) < 2 or len(late) != 1 or not folder.name[6:].isdigit():
            continue
        sections = late[0].get("page", {}).get("sections") or []
        if sections:
            found.append(
                LateRank(
                    cycle=int(folder.name[6:]),
                    rank=int(late[0].get("rank", -1)),
                    section=str(sections[-1][0]),
                    waiting=len(ranks) - 1,
                )
            )
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_ib_ports(root: Path) -> list[IbPort]:
    """InfiniBand ports of this host with their partition keys; ports that speak Ethernet (RoCE) are left out."""
    ports = []
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        if _text(port / "link_layer") != "InfiniBand":
            continue
        keys = {int(p.name): _text(p) for p in (port / "pkeys").glob("*") if p.name.isdigit()}
        ports.append(
            IbPort(
                name=f"{port.parent.parent.name}:{port.name}",
                pkeys={index: int(text, 16) for index, text in sorted(keys.items()) if int(text or "0", 16)},
            )
        )
    return ports


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def read_slurm(saved: Path | None) -> tuple[dict[str, str] | None, str]:
    """Slurm's configuration: from `saved` (output of `scontrol show config`), else from scontrol itself, else None.

    Raises ConfigError when the named file cannot be read or holds something else.
    """
    if saved is not None:
        try:
            settings = parse_slurm(saved.read_text(errors="replace"))
        except OSError as error:
            raise ConfigError(f"--slurm-config {saved}: {error.strerror}") from error
        if not settings:
            raise ConfigError(
                f"--slurm-config {saved}: no `Key = value` line; give the output of `scontrol show config`"
            )
        return settings, str(saved)
    command = shutil.which("scontrol")
    if command is None:
        return None, ""
    try:
        done = subprocess.run(
            [command, "show", "config"], capture_output=True, text=True, timeout=SCONTROL_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, ""
    return parse_slurm(done.stdout), "scontrol show config"


def parse_slurm(text: str) -> dict[str, str]:
    """`Key = value` lines, as in `scontrol show config` and slurm.conf; "(null)" and comments are empty."""
    settings = {}
    for line in text.splitlines():
        match = re.match(r"\s*([A-Za-z][A-Za-z0-9_]*)\s*=\s*(.*?)\s*$", line.split("#", 1)[0])
        if match:
            settings[match[1]] = "" if match[2] == "(null)" else match[2]
    return settings


def read_tolerations(path: Path) -> list[Toleration]:
    """Tolerations in `kubectl get pod NAME -o json`. Raises ConfigError when the file is no pod."""
    try:
        pod = json.loads(path.read_bytes())
        return msgspec.convert(pod["spec"].get("tolerations") or [], list[Toleration])
    except OSError as error:
        raise ConfigError(f"--pod {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"--pod {path}: no pod ({error!r}); give the output of `kubectl get pod NAME -o json`"
        ) from None


def available_memory(root: Path) -> tuple[int | None, str]:
    """Bytes that a process here can still have, and what says so: the tightest cgroup on the way up, else MemAvailable."""
    limits: list[tuple[int, str]] = []
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    if match:
        limits.append((int(match[1]) * 1024, "/proc/meminfo MemAvailable"))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory") and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = base / path.lstrip("/")
        for level in (folder, *folder.parents):
            if not level.is_relative_to(base):
                break
            limit, used = _text(level / names[0]), _text(level / names[1])
            if limit.isdigit() and used.isdigit():
                limits.append((max(0, int(limit) - int(used)), f"{level / names[0]} less {names[1]}"))
    return min(limits) if limits else (None, "")


def newest_shard_bytes(checkpoints: Path, nodes: int) -> int:
    """Bytes a node writes in the newest whole checkpoint below `checkpoints`. Raises ConfigError when there is none."""
    whole = []
    for folder in checkpoints.iterdir() if checkpoints.is_dir() else ():
        name = parse_folder_name(folder.name)
        if name is not None and any((folder / marker).is_file() for marker in MARKERS):
            whole.append((name, folder))
    if not whole:
        raise ConfigError(
            f"--checkpoints {checkpoints}: no whole checkpoint there; give the root that ks.Checkpointer uses"
        )
    total = sum(file.stat().st_size for file in max(whole)[1].iterdir() if file.is_file())
    return -(-total // nodes)


def file_system(path: Path, root: Path = Path("/")) -> str | None:
    """Type of the file system that `path` is on, by the longest mount point above it."""
    target = path.resolve()
    best: tuple[int, str] | None = None
    for line in _text(root / "proc/mounts").splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # The kernel writes a space in a path as \040; later mounts cover earlier ones.
        point = Path(fields[1].encode().decode("unicode_escape"))
        if target.is_relative_to(point) and (best is None or len(point.parts) >= best[0]):
            best = (len(point.parts), fields[2])
    return best[1] if best else None


def token_file(path: Path) -> TokenFile:
    """Permissions of the token file; its content is not read."""
    try:
        status = path.stat()
    except OSError:
        return TokenFile(path=str(path), mode=None)
    return TokenFile(path=str(path), mode=status.st_mode & 0o777, is_own=status.st_uid == os.geteuid())
