"""A plan for other tools."""
