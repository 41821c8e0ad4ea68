"""Seconds and workspaces of ops."""
