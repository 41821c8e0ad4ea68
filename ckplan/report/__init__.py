"""Records to tables and JSON. Computes nothing but shares, sums and groups."""
