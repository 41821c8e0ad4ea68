"""Build a model and a batch from a name or a configuration, without a user's file."""
