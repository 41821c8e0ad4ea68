"""Where regions open and close in a model."""
