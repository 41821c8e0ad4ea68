"""The second waist: what to do."""
