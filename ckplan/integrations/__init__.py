"""Callbacks for other training loops; each file needs the library of its name."""
