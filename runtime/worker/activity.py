"""Describe the present activity of a generation, for a coordinator that has waited long for a commit."""

import time
from collections.abc import Collection

from slipstream.runtime.protocol.to_coordinator import WorkerStatus
from slipstream.runtime.replay.stuck_calls import OPEN_CALLS
from slipstream.schedules.program import WorkerProgram
from slipstream.schedules.schedule import Worker

WAITING_PREFIX = "waits"
"""First word of the description of an activity that waits for other workers."""


class Activity:
    """Present activity of a worker in a generation, written by the thread that computes and read by the main thread."""

    def __init__(self) -> None:
        self._doing: tuple[str | tuple[int, int], float, tuple[Worker, ...]] = "begins an order", time.monotonic(), ()

    @property
    def doing(self) -> str | tuple[int, int]:
        """Description of the activity, or the iteration and the index of an op in the program."""
        return self._doing[0]

    def set_activity(self, what: str | tuple[int, int], awaited: Collection[Worker] = ()) -> None:
        """Record the activity that begins now: a description, or an iteration and an op's index in the program.

        A description that begins with `WAITING_PREFIX` is that of a wait, for the workers in `awaited`, or for node 0.
        """
        self._doing = what, time.monotonic(), tuple(awaited)

    def build_status(self, worker: Worker, program: WorkerProgram, thread: int | None) -> WorkerStatus:
        """Return the activity as a message. If the computing thread, whose identifier is `thread` (None: there is
        none), is in a call into a process group, the message names that call, and gives the time since it began."""
        doing, since, awaited = self._doing
        if not isinstance(doing, str):
            iteration, place = doing
            doing = f"iteration {iteration}, {program.ops[place]}"
        call = None if thread is None else OPEN_CALLS.call_of_thread(thread)
        if call is not None:
            doing, since, awaited = f"{doing}: {call.what}", call.began, call.awaited
        return WorkerStatus(worker, doing, time.monotonic() - since, awaited=awaited,
                            waits=call is not None or doing.startswith(WAITING_PREFIX))
