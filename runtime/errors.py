"""Errors of others, told in one line."""


def first_line(error: BaseException) -> str:
    """The first line of what an error says; torch adds its stack to it."""
    return (str(error).splitlines() or ["no reason given"])[0]
