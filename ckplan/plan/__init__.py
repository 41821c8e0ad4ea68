"""The plan: which activations to recompute, as data."""
