"""Names under which savers write a checkpoint before it is complete."""

from __future__ import annotations

import re

_STAGING = re.compile(
    r"(?i)(?:^|/)\.?_?(?:tmp|temp|staging|partial|incomplete)[-_.][^/\s]*"
    r"|[^/\s]*[-_.](?:tmp|temp|staging|partial|incomplete|unfinished|in[-_]?progress)(?:[-_.][\w.-]{0,64})?/?(?=$|[/\s:,'\"()\]])"
)


def is_staging(name: str) -> bool:
    """Whether a path or a name is that of a checkpoint in the making: "tmp-checkpoint-500", "step-500.tmp", "500.orbax-checkpoint-tmp-17".

    Such a folder is renamed when it is complete; one that is left was cut off, or belongs to another machine.
    """
    return _STAGING.search(name) is not None
