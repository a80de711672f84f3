"""For fork servers of tests to import, and nobody else.

Their workers use the double of NCCL. Where `HASTY` is set, they report what they have run without a
commit point, and die after a report only once a slow call has begun.
"""

import os
import time
from functools import partial
from pathlib import Path

from slipstream.runtime.protocol.failure_injection import Place
from slipstream.runtime.replay import group_cache, session
from slipstream.runtime.replay.nccl import NcclBackend
from slipstream.runtime.worker import injected_faults
from tests.patience import SECONDS
from tests.runtime.replay.double import BEGUN, HASTY, SLOW, Double

_USUAL = session.GenerationSession.reach_commit_point


def _commit_point(self: session.GenerationSession) -> None:
    if HASTY not in os.environ:
        _USUAL(self)


_FAIL = injected_faults.Injector.fail_if_due


def _fail_if_due(self: injected_faults.Injector, iteration: int, place: Place) -> None:
    is_awaited = HASTY in os.environ and SLOW in os.environ and place == "reported"
    if is_awaited and (iteration, place) in self._mine:
        begun_path, ends = (
            Path(f"{os.environ[SLOW].split()[-1]}{BEGUN}"),
            time.monotonic() + SECONDS,
        )
        while not begun_path.exists() and time.monotonic() < ends:
            time.sleep(0.01)
    _FAIL(self, iteration, place)


injected_faults.Injector.fail_if_due = _fail_if_due  # type: ignore[method-assign]
group_cache.NcclBackend = partial(NcclBackend, Double)  # type: ignore[misc, assignment]
session.GenerationSession.reach_commit_point = _commit_point  # type: ignore[method-assign]
