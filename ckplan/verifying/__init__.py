"""Verify a plan: equal gradients, a peak within the budget, and its overhead."""
