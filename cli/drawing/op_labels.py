"""What is written on an op, in the terminal and in pictures."""

from slipstream.schedules.layers import short
from slipstream.schedules.schedule import Op, Schedule


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
