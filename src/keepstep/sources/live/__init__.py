"""Sources that ask a running machine: NVML, a DCGM exporter, the InfiniBand counters of the kernel.

Each gives the same levels and events as the parser of the tool's output, and says clearly when what it asks is not there.
"""
