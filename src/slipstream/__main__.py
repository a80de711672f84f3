"""`python -m slipstream` is `slipstream`, for launchers that start Python modules."""

import sys
from pathlib import Path

if not sys.flags.safe_path:
    # Python has put the working directory first. Nothing in it may replace what this program imports.
    _root = str(Path(__file__).resolve().parents[1])
    sys.path[:1] = [] if _root in sys.path[1:] else [_root]

from slipstream.cli.start import main

if __name__ == "__main__":  # workers of MPI and processes that are spawned import the main module of who starts them
    main()
