"""What planning and looking up have in common: there may be no schedule."""


class NoScheduleError(RuntimeError):
    """No schedule can be had for what is asked. The message is one line, or empty where failures end the run."""
