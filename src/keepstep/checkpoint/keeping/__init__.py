"""Which checkpoints stay: rules by name, what a root holds as they see it, and the deletion of what they do not keep."""
