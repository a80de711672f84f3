"""What is written on an op and beside a worker's row, in the terminal and in pictures."""

from slipstream.schedules.layers import short
from slipstream.schedules.schedule import Op, Schedule, Worker

MAX_HELD = 12
"""Characters of the layers that a worker holds, beside its name."""


def op_labels(op: Op, schedule: Schedule, prime: str = "") -> list[str]:
    """Texts for an op, the most telling first: `F3`, re-routed `f1.3`, shed `F1.3`, of some layers only `F3:4-6`.

    `prime` follows the micro-batch.
    """
    if op.microbatch is None or op.slice is None:
        return [str(op.kind)]
    layers = "" if op.slice < len(schedule.grid.stages) else f":{short([schedule.layers_of(op.slice)])}"
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
    """`1.2`, in the role of another `1.2 as 0.1`, and the layers that it holds where these are not its role's."""
    seat = schedule.seat_of.get(worker)
    if seat is None:
        return str(worker)
    name = str(worker) if seat.role == worker else f"{worker} as {seat.role}"
    if not schedule.holds_others(seat):
        return name
    held = short(schedule.holds_of(seat))
    return f"{name} [{held if len(held) <= MAX_HELD else held[:MAX_HELD - 1] + '…'}]"
