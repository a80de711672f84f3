"""A clock that tests set."""


class Clock:
    """Stands in for the module `time` where code reads `time.monotonic`."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def monotonic(self) -> float:
        """The time, in seconds."""
        return self.now
