"""Where bytes lie: POSIX folders, object stores, memory of the job's nodes."""
