import pytest


@pytest.fixture(autouse=True)
def clock_of_steps(steady_clock: object) -> None:
    """No plan depends on how fast the machine is, but where a test is marked `real_clock`, or starts processes."""
