"""How many spares hold when nodes fail independently of one another."""

from __future__ import annotations

import math


def poisson_quantile(mean: float, share: float) -> int:
    """The smallest number that a Poisson variable of this mean does not exceed with probability `share`.

    Raises ValueError when the mean is negative or not finite, or the share is not below 1.
    """
    if not (0.0 <= mean < math.inf and 0.0 <= share < 1.0):
        raise ValueError(f"mean {mean}, share {share}: need a finite mean >= 0 and a share in [0, 1)")
    # Terms by their logarithm: e^-mean is 0 from a mean of 746 on.
    number, total = 0, math.exp(-mean)
    while total < share:
        number += 1
        total += math.exp(number * math.log(mean) - mean - math.lgamma(number + 1.0))
        if number > mean and total >= 1.0 - 1e-15:
            break
    return number
