"""For fork servers of tests to import, and nobody else: their workers use the double of NCCL and, where `HASTY` is set,
report what they have run without a commit point."""

import os
from functools import partial

from slipstream.runtime.replay import links, session
from slipstream.runtime.replay.nccl import Nccl
from tests.runtime.replay.double import HASTY, Double

_USUAL = session.Session.commit_point


def _commit_point(self: session.Session) -> None:
    if HASTY not in os.environ:
        _USUAL(self)


links.Nccl = partial(Nccl, Double)  # type: ignore[misc, assignment]
session.Session.commit_point = _commit_point  # type: ignore[method-assign]
