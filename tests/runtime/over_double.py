"""For fork servers of tests to import, and nobody else: their workers use the double of NCCL and, where `HASTY` is set,
report what they have run without a commit point."""

import os
from functools import partial

from slipstream.runtime.replay import group_cache, session
from slipstream.runtime.replay.nccl import NcclBackend
from tests.runtime.replay.double import HASTY, Double

_USUAL = session.GenerationSession.reach_commit_point


def _commit_point(self: session.GenerationSession) -> None:
    if HASTY not in os.environ:
        _USUAL(self)


group_cache.NcclBackend = partial(NcclBackend, Double)  # type: ignore[misc, assignment]
session.GenerationSession.reach_commit_point = _commit_point  # type: ignore[method-assign]
