"""Hazards: calls and ops whose recomputation can give a different result."""
