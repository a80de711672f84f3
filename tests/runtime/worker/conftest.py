"""Members that give layers away, and one that gets them."""

import pytest

from slipstream.runtime.moving.layer_receiver import FetchRequest
from tests.runtime.running import tiny
from tests.runtime.worker.team import Team


@pytest.fixture
def team(request):
    team = Team(tiny(**getattr(request, "param", {})).training)
    yield team
    team.receiver.start_fetch(FetchRequest(99, 1, {}, True))
    for member in team.members.values():
        member.sender.close()
