"""The graph: the costs of one recorded training step, as data."""
