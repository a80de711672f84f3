"""Write the rows of all pipelines for torch.distributed.pipelining.

`schedules.rows` builds them; the cells are those of `torch_csv` with communication. There is a row
for each role, pipeline by pipeline: row `d * columns + s` is that of worker d.s, and it is empty if
nobody plays the role.
"""

from slipstream.cli.exporters import ExportError
from slipstream.schedules.rows import build_rows
from slipstream.schedules.schedule import Schedule
from slipstream.schedules.whole_stages import NotWholeError


def write_rows(schedule: Schedule) -> str:
    """Return the CSV of all pipelines. Raises ExportError unless stages are whole and in place."""
    try:
        rows = build_rows(schedule)
    except NotWholeError as error:
        raise ExportError(str(error)) from None
    players = map(schedule.player_of.get, schedule.grid.workers())
    text = ""
    for player in players:
        cells = rows[player] if player else ()
        text += ",".join(map(str, cells)) + "\n"
    return text
