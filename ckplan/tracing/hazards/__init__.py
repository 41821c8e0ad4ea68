"""What must not simply run again."""
