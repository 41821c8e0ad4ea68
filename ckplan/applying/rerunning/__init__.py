"""Run a module again in backward."""
