"""Stand-ins for real tensors, and backward from Python."""
