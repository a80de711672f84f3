"""Errors of libraries, in one line."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; torch adds its stack to it."""
    return (str(error).splitlines() or ["no reason given"])[0]
