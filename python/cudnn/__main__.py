"""``python -m cudnn`` is the ``cudnn`` command."""

from cudnn.cli import main

if __name__ == "__main__":
    main()
