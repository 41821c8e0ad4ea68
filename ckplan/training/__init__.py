"""The user's side: load a workload and run one training step of it."""
