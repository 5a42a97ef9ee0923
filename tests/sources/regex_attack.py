"""Tries every compiled expression of the packages that read texts on lines made to keep it busy. Prints each name before its turn.

Run as a program: an expression that never comes back cannot be stopped from within its process.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
import time
from collections.abc import Iterator

import keepstep.attribution
import keepstep.catalog
import keepstep.sources

LENGTH = 2000
"""Characters of a line that readers look at, or less."""
LIMIT_S = 1.0
"""For one search. What is quadratic in the length takes some milliseconds, what is worse takes seconds or for ever."""
FILLS = (
    " ",
    "a",
    "0",
    "A",
    "-",
    ".",
    "a-",
    "a.",
    "0.",
    "a ",
    "0 ",
    "|",
    "| ",
    "=",
    "a=",
    ": ",
    "/",
    "a/",
    ",",
    "0,",
    "(",
    "[",
    '"',
    "'",
    "_",
    "%",
)
ENDS = ("!", "\0 ")


ANYWHERE = ("search", "finditer", "findall", "sub", "split")


def expressions() -> Iterator[tuple[str, re.Pattern[str], bool]]:
    """Name, expression, and whether it is looked for anywhere in a line or only at its begin; each once."""
    seen = set()
    for package in (keepstep.sources, keepstep.attribution, keepstep.catalog):
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            module = importlib.import_module(found.name)
            text = inspect.getsource(module)
            for name, value in vars(module).items():
                alone = isinstance(value, re.Pattern)
                held = (
                    value.values()
                    if isinstance(value, dict)
                    else value
                    if isinstance(value, list | tuple)
                    else (value,)
                )
                anywhere = not alone or any(f"{name}.{how}(" in text for how in ANYWHERE)
                for one in held:
                    if isinstance(one, re.Pattern) and isinstance(one.pattern, str) and (one, anywhere) not in seen:
                        seen.add((one, anywhere))
                        yield f"{found.name}.{name}", one, anywhere


def literals(pattern: str) -> list[str]:
    """Runs of letters that stand in an expression, as far as they are no names of groups."""
    plain = re.sub(r"\(\?P<\w+>|\(\?P=\w+\)|\(\?[a-z]+[:)]|\\.", " ", pattern)
    return list(dict.fromkeys(re.findall(r"[A-Za-z_]{2,20}", plain)))


def attacks(expression: re.Pattern[str]) -> Iterator[str]:
    """Lines that begin as the expression does and then repeat what it may be repeating."""
    known = literals(expression.pattern)
    for begin in ("", *known[:3]):
        for fill in (*FILLS, *known[:4]):
            for end in ENDS:
                yield begin + fill * ((LENGTH - len(begin)) // len(fill)) + end


def main() -> None:
    count = 0
    for name, expression, anywhere in expressions():
        print(name, flush=True)
        count += 1
        for text in attacks(expression):
            begin = time.perf_counter()
            (expression.search if anywhere else expression.match)(text)
            if time.perf_counter() - begin > LIMIT_S:
                sys.exit(f"{name}: {time.perf_counter() - begin:.1f} s for {text[:60]!r}...")
    print(f"{count} expressions", flush=True)


if __name__ == "__main__":
    main()
