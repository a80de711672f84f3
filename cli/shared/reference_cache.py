"""Fault-free periods kept from command to command, in the user's cache folder: a file a job.

Nothing depends on them but comparisons: where the folder cannot be read or written, they are planned again.
"""

import os
from contextlib import suppress
from pathlib import Path

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import FaultFree, reference_key
from slipstream.schedules.files import read_at_most, write_atomically

MAX_BYTES = 4096
_REFERENCE = msgspec.json.Decoder(FaultFree)


def known_reference(options: PlanOptions, job: Job) -> FaultFree | None:
    """What earlier commands found."""
    with suppress(NoPlanError, OSError, ValueError, msgspec.MsgspecError):
        return _REFERENCE.decode(read_at_most(_file(options, job), MAX_BYTES, ValueError))
    return None


def keep_reference(options: PlanOptions, job: Job, found: FaultFree) -> None:
    """Keep what is better than what is known."""
    with suppress(NoPlanError, OSError):
        write_atomically(_file(options, job), msgspec.json.encode(found.better(known_reference(options, job))))


def _file(options: PlanOptions, job: Job) -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "slipstream" / "fault-free" / f"{reference_key(options, job)}.json"
