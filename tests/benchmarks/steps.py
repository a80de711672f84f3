"""Steps in place of those of `benchmarks.devices`: one hangs, one works."""

import json
import sys
import time
from pathlib import Path

from benchmarks.devices.report import Report

if __name__ == "__main__":
    name = sys.argv[1]
    turn = json.loads(sys.stdin.readline())
    if name == "hangs":
        time.sleep(600)
    Report(Path(turn["folder"]), name).row("told", turn["transport"])
