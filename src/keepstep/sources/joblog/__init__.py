"""What stands in a job's log over several lines: tracebacks, failure blocks, stacks, summaries of cycles, listings of dumps."""
