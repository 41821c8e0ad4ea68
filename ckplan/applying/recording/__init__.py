"""Record a forward, op by op."""
