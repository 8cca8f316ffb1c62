"""``python -m cudnn`` is the ``cudnn`` command."""

from cudnn.cli import main

main()
