"""Which cards a step fits on, as it is or with a plan, and at which batch."""
