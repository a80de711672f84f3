"""Property tests draw the same examples on every run; HYPOTHESIS_PROFILE=explore draws new ones, and more of them.

The fixture `chromium` is a real browser, for pages.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.browser import chromium as chromium

settings.register_profile("steady", deadline=None, suppress_health_check=list(HealthCheck), derandomize=True,
                          database=None)
settings.register_profile("explore", settings.get_profile("steady"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What commands keep for the next one is kept for these tests, and not in the user's folder."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
