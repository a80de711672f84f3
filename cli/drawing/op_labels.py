"""Choose the labels of ops and of workers' rows, for the terminal and pictures."""

from slipstream.schedules.layers import compact_layers_text
from slipstream.schedules.schedule import Op, Schedule, Worker

MAX_HELD = 12
"""Maximum width, in characters, of the held layers next to a worker's name."""


def op_labels(op: Op, schedule: Schedule, prime: str = "") -> list[str]:
    """Return candidate labels of an op, most informative first.

    `F3` is micro-batch 3, `f1.3` a re-routed one of pipeline 1, `F1.3` one shed from there, and
    `F3:4-6` a slice of layers 4 to 6. The text `prime` follows the number: it marks stages after
    the first of a worker that holds several. An op without micro-batch has its letter alone.
    """
    if op.microbatch is None or op.slice is None:
        return [str(op.kind)]
    layers = (
        ""
        if op.slice < len(schedule.grid.stages)
        else f":{compact_layers_text([schedule.layers_of(op.slice)])}"
    )
    number, place = f"{op.microbatch}{prime}", f"{op.pipeline}.{op.microbatch}{prime}"
    origin, letter = schedule.origin(op), str(op.kind)
    if origin == "own":
        texts = [f"{letter}{number}", f"{letter}{op.microbatch}", letter]
    elif origin == "rerouted":
        texts = [f"{letter.lower()}{place}", f"{letter.lower()}{op.microbatch}", letter.lower()]
    else:
        texts = [f"{letter}{place}", f"{letter}.{op.microbatch}", f"{letter}.", letter]
    return [texts[0] + layers, *texts]


def worker_label(worker: Worker, schedule: Schedule) -> str:
    """Return a worker's label: `1.2`, or `1.2 as 0.1` if it fills another role.

    Held layers follow, in up to `MAX_HELD` characters, if they are not those of the role.
    """
    seat = schedule.seat_of.get(worker)
    if seat is None:
        return str(worker)
    name = str(worker) if seat.role == worker else f"{worker} as {seat.role}"
    if not schedule.has_moved_layers(seat):
        return name
    layers = compact_layers_text(schedule.held_layers_of_seat(seat))
    if len(layers) > MAX_HELD:
        layers = layers[: MAX_HELD - 1] + "…"
    return f"{name} [{layers}]"
