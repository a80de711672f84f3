import pytest


@pytest.fixture(autouse=True)
def no_clock(counted_steps: None) -> None:
    """No plan depends on how fast the machine is, but where a test is marked `real_clock`, or starts processes."""
