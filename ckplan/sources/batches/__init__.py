"""Batches with labels, made from a configuration: one function for every task."""
