import pytest


@pytest.fixture(autouse=True)
def no_clock(counted_steps: None) -> None:
    """Plans do not depend on how fast the machine is.

    Exceptions are tests that are marked `real_clock`, or start processes.
    """
