"""Settings of training above a plan: batch, accumulation, precision, optimizer."""
