"""What a step is seen to do."""
