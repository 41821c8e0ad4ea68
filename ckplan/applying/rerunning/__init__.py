"""Rerun a module in backward."""
