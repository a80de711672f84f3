"""Describe which workers take over another role."""

from slipstream.schedules.schedule import Schedule
from slipstream.schedules.tables.relabel import count_layers_to_load


def role_change_lines(schedule: Schedule) -> list[str]:
    """Return one line for each worker that plays a role other than its own. Empty if all keep theirs."""
    lines = []
    for seat in schedule.moves:
        loads = count_layers_to_load(schedule.grid, seat.worker, seat.role)
        lines.append(f"{seat.worker} takes over {seat.role}: " + (
            "loads its parameters from a peer" if loads else "holds its parameters already"))
    return lines
