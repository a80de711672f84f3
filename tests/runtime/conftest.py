"""What tests of runs share."""

import pytest

from slipstream.runtime import launch
from slipstream.runtime.coordinator import event_loop
from slipstream.runtime.coordinator.planning.background import run_in_thread
from slipstream.runtime.coordinator.run_options import Resilience
from slipstream.runtime.processes.fork_server import ForkServer
from tests import patience
from tests.runtime.failing import TIMEOUT_SECONDS
from tests.runtime.forked import own_fork_server


@pytest.fixture(autouse=True, scope="session")
def _patient():
    """No healthy worker is given up in runs of this process, however busy the machine.

    A test may say otherwise.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            Resilience.__init__.__kwdefaults__, "heartbeat_timeout_seconds", TIMEOUT_SECONDS
        )
        patch.setitem(launch.run.__kwdefaults__, "resilience", Resilience())
        yield


@pytest.fixture(scope="session")
def fork_server():
    """Forks the workers of all runs, so that torch is imported once."""
    with ForkServer() as fork_server:
        yield fork_server


@pytest.fixture(scope="session")
def other_fork_server():
    """That of another node."""
    with own_fork_server() as fork_server:
        yield fork_server


@pytest.fixture
def plans_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs plan in threads, so that a scheduler can note what it is asked."""
    monkeypatch.setattr(event_loop, "choose_background", lambda _: run_in_thread)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of a storm on a busy machine.

    Workers that are well are given up, too, and starts take seconds.
    """
    monkeypatch.setattr("benchmarks.chaos.STALL_SECONDS", patience.SECONDS)
