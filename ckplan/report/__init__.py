"""Convert records to tables and JSON; compute only shares, sums and groups."""
