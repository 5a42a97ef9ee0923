"""Names under which savers write a checkpoint before it is complete."""

from __future__ import annotations

import re

_WORD = r"(?:checkpoint|ckpt|global_step|step|iter\w{0,8}|epoch)[-_=.]?\d{1,12}"
_TEMPORARY = r"(?:tmp|temp|staging|partial|incomplete|unfinished|in[-_]?progress)"
_STAGING = re.compile(
    rf"(?i)(?:^|/)\.?_?{_TEMPORARY}[-_.](?:{_WORD}|\d)"
    rf"|(?:{_WORD}|(?:^|/)\d{{1,12}})(?:[-_.][^/\s]{{0,64}})?[-_.]{_TEMPORARY}(?:[-_.][\w.-]{{0,64}})?(?=$|[/\s:,'\"()\]])"
)
"""Only the part of a path that names the step counts: whole trees lie under folders of that name."""


def is_staging(name: str) -> bool:
    """Whether a path is that of a checkpoint in the making: "tmp-checkpoint-500", "step-500.tmp", "500.orbax-checkpoint-tmp-17".

    Such a folder is renamed when it is complete; one that is left was cut off, or belongs to another machine.
    """
    return _STAGING.search(name) is not None
