"""What the bytes of a checkpoint mean: names, tensors, pieces, values, the index. No input or output, no torch."""
