"""Run a recompute program in backward."""
