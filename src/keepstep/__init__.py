"""keepstep keeps a synchronous training job stepping while hardware fails underneath it."""

__version__ = "0.1.0"
