"""Seconds of whole steps on this machine, with plans and without."""
