"""How a run fails, and errors of libraries in one line."""


class RunError(RuntimeError):
    """A run that ended before its last iteration. The message is one line."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; torch adds its stack to it."""
    return (str(error).splitlines() or ["no reason given"])[0]
