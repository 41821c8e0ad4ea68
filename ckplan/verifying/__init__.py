"""Prove a plan: the same gradients, a peak within the budget, and what it costs."""
