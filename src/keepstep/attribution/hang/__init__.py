"""Who a hang waits for: flight-recorder summaries of all ranks -> `keepstep.hang/1`. Pure, and in time linear in ranks.

Each rank waits in its first open operation. That operation waits for members that have not come to it, because they have not
issued it or because they wait in something earlier themselves. Following these edges (`waiting`) ends at ranks that wait for
nobody, at operations that all members have come to, or in a circle; `culprits` says what each of these means.
"""

from keepstep.attribution.hang.culprits import find_culprits

__all__ = ["find_culprits"]
