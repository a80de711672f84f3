"""Run `slipstream` by `python -m slipstream`, for launchers that start Python modules."""

import sys
from pathlib import Path

if not sys.flags.safe_path:
    # Python puts the working directory first in sys.path. No file in it may replace a module that
    # this program imports.
    _root = str(Path(__file__).resolve().parents[1])
    sys.path[:1] = [] if _root in sys.path[1:] else [_root]

from slipstream.cli.start import main

# MPI workers and spawned processes import the main module of the process that starts them.
if __name__ == "__main__":
    main()
