"""One launcher: the agent, its connection and lease, cycles on its node, what it sees of its ranks."""
