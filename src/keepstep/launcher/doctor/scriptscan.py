"""What a training script's text says without running it: process-group time-outs, and slow work that one rank does alone."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec

from keepstep.records.errors import ConfigError

DEFAULT_NCCL_TIMEOUT_S = 600.0
"""torch.distributed: ten minutes for NCCL since 2.2."""
DEFAULT_OTHER_TIMEOUT_S = 1800.0
"""torch.distributed: thirty minutes for every other backend."""

# Arguments of datetime.timedelta, in order, in seconds.
_UNITS_S = {
    "days": 86400.0,
    "seconds": 1.0,
    "microseconds": 1e-6,
    "milliseconds": 1e-3,
    "minutes": 60.0,
    "hours": 3600.0,
    "weeks": 604800.0,
}
_ONE_RANK = ("is_main_process", "is_local_main_process", "is_global_zero")
_SLOW_CALLS = frozenset(
    {
        *("save", "save_pretrained", "save_file", "save_state", "dump", "to_csv", "to_parquet", "savez", "push_to_hub"),
        *("upload", "upload_file", "put_object", "urlopen", "copytree", "copyfile", "rmtree", "sleep", "system"),
        *("check_call", "check_output", "evaluate"),
    }
)


class GroupTimeout(msgspec.Struct, frozen=True, kw_only=True):
    """One call of `init_process_group`. `seconds` is None when its time-out cannot be read from the text."""

    line: int
    seconds: float | None
    is_default: bool = False


class OneRankWork(msgspec.Struct, frozen=True, kw_only=True):
    """A slow call under `if rank == 0` or alike: the other ranks wait for it in their next collective."""

    line: int
    call: str


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in a script."""

    path: str
    timeouts: list[GroupTimeout] = []
    one_rank_work: list[OneRankWork] = []
    uses_checkpointer: bool = False


def scan_script(path: Path) -> Script:
    """Read the script at `path`. Raises ConfigError when it cannot be read or is not Python."""
    try:
        return scan_source(path.read_text(errors="replace"), str(path))
    except OSError as error:
        raise ConfigError(f"script {path}: {error.strerror}; name a Python file that can be read") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"script {path}: not Python ({error}); name the training script itself") from error


def scan_source(source: str, path: str) -> Script:
    """Scan Python text. Raises SyntaxError or ValueError when it does not parse."""
    tree = ast.parse(source, filename=path)
    constants = _constants(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return Script(
        path=path,
        timeouts=[_timeout(call, constants) for call in calls if _name(call.func) == "init_process_group"],
        one_rank_work=_one_rank_work(tree),
        uses_checkpointer=any(_name(call.func) == "Checkpointer" for call in calls),
    )


def _name(node: ast.expr) -> str:
    """Last part of a name: `dist.init_process_group` -> `init_process_group`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """Names of the module that are assigned exactly once in the whole text."""
    values: dict[str, ast.expr] = {}
    times: dict[str, int] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            times[node.id] = times.get(node.id, 0) + 1
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            if isinstance(target, ast.Name) and times[target.id] == 1:
                values[target.id] = statement.value
    return values


def _timeout(call: ast.Call, constants: dict[str, ast.expr]) -> GroupTimeout:
    # init_process_group(backend, init_method, timeout, ...)
    keywords = {k.arg: k.value for k in call.keywords if k.arg is not None}
    given = keywords.get("timeout", call.args[2] if len(call.args) > 2 else None)
    if isinstance(given, ast.Constant) and given.value is None:
        given = None
    if any(k.arg is None for k in call.keywords) and given is None:
        return GroupTimeout(line=call.lineno, seconds=None)
    if given is not None:
        return GroupTimeout(line=call.lineno, seconds=_seconds(given, constants))
    backend = keywords.get("backend", call.args[0] if call.args else None)
    if isinstance(backend, ast.Name):
        backend = constants.get(backend.id, backend)
    if backend is not None and not isinstance(backend, ast.Constant):
        return GroupTimeout(line=call.lineno, seconds=None, is_default=True)
    named = backend.value if isinstance(backend, ast.Constant) else None
    # Without a name torch takes NCCL where there are GPUs.
    nccl = named is None or "nccl" in str(named)
    return GroupTimeout(
        line=call.lineno, seconds=DEFAULT_NCCL_TIMEOUT_S if nccl else DEFAULT_OTHER_TIMEOUT_S, is_default=True
    )


def _seconds(node: ast.expr, constants: dict[str, ast.expr]) -> float | None:
    """Seconds of a `timedelta(...)` whose arguments are plain arithmetic, or of a constant that is one."""
    if isinstance(node, ast.Name) and node.id in constants:
        return _seconds(constants[node.id], {k: v for k, v in constants.items() if k != node.id})
    if not isinstance(node, ast.Call) or _name(node.func) != "timedelta":
        return None
    parts = list(zip(_UNITS_S, node.args, strict=False)) + [(k.arg or "", k.value) for k in node.keywords]
    total = 0.0
    for unit, value in parts:
        number = _number(value, constants)
        if number is None or unit not in _UNITS_S:
            return None
        total += number * _UNITS_S[unit]
    return total


def _number(node: ast.expr, constants: dict[str, ast.expr]) -> float | None:
    if isinstance(node, ast.Constant):
        return float(node.value) if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
    if isinstance(node, ast.Name) and node.id in constants:
        return _number(constants[node.id], {k: v for k, v in constants.items() if k != node.id})
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand, constants)
        return None if inner is None else -inner
    if not isinstance(node, ast.BinOp):
        return None
    left, right = _number(node.left, constants), _number(node.right, constants)
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Div):
        return left / right if right else None
    if isinstance(node.op, ast.Add):
        return left + right
    return left - right if isinstance(node.op, ast.Sub) else None


def _one_rank_work(tree: ast.Module) -> list[OneRankWork]:
    found = {
        (call.lineno, _name(call.func))
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and _is_one_rank(node.test)
        for statement in node.body
        for call in ast.walk(statement)
        if isinstance(call, ast.Call) and _name(call.func) in _SLOW_CALLS
    }
    return [OneRankWork(line=line, call=call) for line, call in sorted(found)]


def _is_one_rank(test: ast.expr) -> bool:
    """Whether a condition holds on one rank only: `rank == 0`, `dist.get_rank() == 0`, `not rank`, `is_main_process`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return any(_is_one_rank(value) for value in test.values)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_rank(test.operand)
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        sides = [test.left, test.comparators[0]]
        return any(_is_rank(side) for side in sides) and any(
            isinstance(side, ast.Constant) and side.value in (0, "0") for side in sides
        )
    target = test.func if isinstance(test, ast.Call) else test
    return _name(target) in _ONE_RANK


def _is_rank(node: ast.expr) -> bool:
    target = node.func if isinstance(node, ast.Call) else node
    return _name(target).lower().endswith("rank")
