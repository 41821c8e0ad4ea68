"""Move tensors that a region keeps to a file, and back when backward needs them."""
