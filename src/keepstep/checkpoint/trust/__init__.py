"""Who wrote a checkpoint and who says so: keys, manifests, trust policy, rollback records."""
