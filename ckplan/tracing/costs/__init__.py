"""Measure or predict seconds and workspaces of ops."""
