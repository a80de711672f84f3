"""How much work a call is, counted and not timed.

The work is the lines of Python that it runs, each time.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

OURS = tuple(
    str(Path(__file__).parents[1] / "src" / "slipstream" / package)
    for package in ("schedules", "planner")
)


def lines_run(call: Callable[[], object]) -> int:
    """Count lines of our functions and comprehensions that run within a call.

    What numpy does in one of them does not count.
    """
    count = 0

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        nonlocal count
        if event == "call" and not frame.f_code.co_filename.startswith(OURS):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
