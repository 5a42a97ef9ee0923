"""Output of ranks and launchers: reading pipes, the funnel, the one process that writes the logs of a job."""
