"""``python -m ckplan`` is ``ckplan``."""

from ckplan.cli import main

main()
