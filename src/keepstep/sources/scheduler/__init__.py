"""Records of what runs jobs, turned into events: Slurm, Kubernetes and what is built on it, cgroup files, checkpoint folders.

Everything here is read from text that was recorded; nothing asks a cluster. Reading is tolerant: excerpts, cut lines and columns
in any order are taken for what they say. What is not understood is left out; nothing raises.
"""
