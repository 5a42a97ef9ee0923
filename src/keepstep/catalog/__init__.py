"""Facts as data files, each with version and source: what a log line, a code or a counter means, and how much it weighs."""
