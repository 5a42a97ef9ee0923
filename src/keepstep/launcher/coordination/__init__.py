"""What decides for a job: the coordinator process, its journal and state, rules, placement, leases."""
