"""Run ``python -m dataloaders``, which is the ``dataloaders`` command."""

import sys

from dataloaders.cli import main

if __name__ == "__main__":
    sys.exit(main())
