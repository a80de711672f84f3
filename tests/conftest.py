"""Property tests draw the same examples on every run.

HYPOTHESIS_PROFILE=explore draws new ones, and more of them.

The fixture `chromium` is a real browser, for pages.
"""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.browser import chromium as chromium

# The tests share the machine with each other, and with the processes that they start: one thread
# each. Read when torch is imported, which is later.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")))
)
"""Processes that tests start find `tests`, too."""
# What commands print into pipes is as wide as it is, also where pytest-xdist sets it.
os.environ.pop("COLUMNS", None)

settings.register_profile(
    "steady",
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
settings.register_profile("explore", settings.get_profile("steady"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

# As where a shell runs the tests in the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `tests/runtime/coordinator/transcripts` be written anew."""
    parser.addoption(
        "--rewrite-transcripts",
        action="store_true",
        help="write what follows in each transcript anew",
    )


@pytest.hookimpl(tryfirst=True)  # before items are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests in a browser as slow."""
    for item in items:
        if "chromium" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The cache of these tests is not in the user's folder."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def counted_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of this process count steps in place of seconds.

    So do those that a command makes.

    But not in a test of the module that is marked `real_clock`.
    """
    if not request.node.get_closest_marker("real_clock"):
        from slipstream.planner.budget import StepClock  # here, as it loads the planner
        from slipstream.planner.options import PlanOptions

        monkeypatch.setattr(PlanOptions, "make_clock", lambda _: StepClock())
