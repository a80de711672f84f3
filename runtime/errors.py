"""How a run fails, and errors of libraries in one line."""


class RunError(RuntimeError):
    """A run that ended before its last iteration. The message is one line."""


class CoordinatorFailedError(RuntimeError):
    """An error in the coordinator that nothing was done about: its workers live, and another one can go on with them.

    The message is one line, and the error its cause.
    """


class NobodyLeftError(RuntimeError):
    """No worker lives of the run that another coordinator has led. The message is one line."""


def reason_of(error: Exception) -> str:
    """Why something failed, in one line: of what the system refuses, its own words."""
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; torch adds its stack to it."""
    return (str(error).splitlines() or ["no reason given"])[0]
