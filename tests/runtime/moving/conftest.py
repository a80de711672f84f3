"""Members that give layers away, and one that gets them."""

import pytest

from slipstream.runtime.moving.layer_receiver import FetchRequest
from tests.runtime.moving.team import Team
from tests.runtime.running import tiny


@pytest.fixture
def team(request):
    team = Team(tiny(**getattr(request, "param", {})).training)
    yield team
    team.receiver.start_fetch(FetchRequest(99, 1, {}, True))
    for member in team.members.values():
        member.sender.close()
