"""Record one training step as a ``Graph``: the entrance of the hourglass."""
