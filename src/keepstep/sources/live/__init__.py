"""Sources that ask a running machine or its cluster: the kernel's ring, NVML, tools, a DCGM exporter, InfiniBand counters, Slurm,
Kubernetes (`asking.py`: `--live`).

Each gives the same levels and events as the parser of the tool's output, and says clearly when what it asks is not there.
"""
