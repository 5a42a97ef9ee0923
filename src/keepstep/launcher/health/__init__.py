"""The state of a host: checks, GPUs, evidence of kernel, memory, sockets and NCCL, bandwidth between nodes."""
