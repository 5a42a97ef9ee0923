"""Metrics of a DCGM exporter or another exporter of this machine, over HTTP."""

from __future__ import annotations

import urllib.error
import urllib.request

from keepstep.records.errors import ConfigError

TIMEOUT_S = 5.0
SIZE_LIMIT = 32 << 20
"""Bytes. An exporter of eight GPUs with all fields gives half a megabyte."""


class ScrapeError(ConfigError):
    """The endpoint could not be read."""


def scrape(url: str, timeout_s: float = TIMEOUT_S) -> str:
    """The text of a metrics endpoint. Raises ScrapeError naming the address, what happened and what to try."""
    if not url.startswith(("http://", "https://")):
        raise ScrapeError(f"{url}: not an http address; dcgm-exporter listens on http://NODE:9400/metrics")
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            body: bytes = answer.read(SIZE_LIMIT + 1)
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise ScrapeError(f"{url}: {error}; is dcgm-exporter running there?") from error
    if len(body) > SIZE_LIMIT:
        raise ScrapeError(f"{url}: more than {SIZE_LIMIT} bytes; is this a metrics endpoint?")
    return body.decode(errors="replace")
