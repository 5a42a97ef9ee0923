"""What to expect of a cluster and what to change first: plans from closed forms, and campaigns simulated event by event.

Nothing at the top imports numpy: `sim` does, and what is drawn or simulated needs the extra `plan`.
"""
