"""Errors that end a run, and functions that reduce errors of libraries to one line."""


class RunError(RuntimeError):
    """Error that ended a run before its last iteration. The message is one line."""


class ConfigError(ValueError):
    """Error in the configuration. The message is one line."""


class CoordinatorFailedError(RuntimeError):
    """Error that ended a coordinator but not its workers, so that another can take over.

    The message is one line, and the original error is the cause.
    """


class OtherRunError(CoordinatorFailedError):
    """Error of a coordinator that found live workers, but of another run than its own.

    The workers are left as they are, for another coordinator. The message is one line.
    """


class NoLiveWorkerError(RuntimeError):
    """Error that a run cannot be taken over: none of its workers can be reached.

    The message is one line.
    """


def describe_data_end(iteration: int) -> str:
    """Return a clause that says that the data have ended before an iteration."""
    return f"the data have no samples left for iteration {iteration}"


def describe_reason(error: Exception) -> str:
    """Return an error's message in one line; of an OSError, the system's if any."""
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; "no reason given" if it is empty."""
    # torch may append a stack to it.
    return (str(error).splitlines() or ["no reason given"])[0]
