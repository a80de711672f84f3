"""Imported once by the fork server of all launchers.

Each of them would load this to plan and to prepare a run.
"""

from slipstream.cli import train
from slipstream.planner.compiled import ensure_compiled
from slipstream.runtime.coordinator.run_fit import check_fit
from slipstream.runtime.launch import RunOptions
from tests.jobs import grid
from tests.runtime.running import schedule_for, tiny

__all__ = ["train"]

ensure_compiled()
check_fit(schedule_for(grid(1, 1, 1)), tiny(), RunOptions())
