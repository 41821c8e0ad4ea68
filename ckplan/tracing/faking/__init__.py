"""Fake tensors in place of real ones, and backward run from Python."""
