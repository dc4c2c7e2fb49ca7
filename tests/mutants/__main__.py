"""Break the package by small steps, or as broken.toml does, and see whether its tests notice.

python tests/mutants [MODULE ...] [--sample N] [--renew]
python tests/mutants --broken [NAME ...]
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from mutants.run import main  # noqa: E402
from mutants.tree import Tree  # noqa: E402

with Tree() as tree:
    status = main(tree, sys.argv[1:])
sys.exit(status)
