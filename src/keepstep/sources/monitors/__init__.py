"""What other monitors say: states and health events as JSON, conditions of nodes over time, counts of nodes that fail a check."""
