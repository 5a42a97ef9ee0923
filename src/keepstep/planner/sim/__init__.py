"""Simulated training campaigns: thousands of runs of one scenario, event by event, with every second in one bucket.

`campaign.simulate` is the way in. Two engines give the same result for each run: `lockstep` (numpy) and `compiled` (numba).
Needs numpy, which comes with the extra `plan`.
"""
