"""The only package here that imports torch: states taken apart and put together, and the plug-in for torch's own checkpoints."""
