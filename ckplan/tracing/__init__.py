"""Record one training step as a ``Graph``."""
