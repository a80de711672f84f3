"""The entry point. It imports nothing but what Python has loaded already before Ctrl-C is handled."""

import sys

PROGRAM = "slipstream"
"""What commands find in their context where they are the whole program, which they may fork."""


def main() -> None:
    """Run the command line. At any time, Ctrl-C ends it with one line and exit 130, a full disk with exit 2."""
    try:
        import io

        # Else what goes to stderr meanwhile would come first in a file of both.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        _write_what_can_be_written()
        from slipstream.cli.app import app

        try:
            app(prog_name=PROGRAM, obj=PROGRAM)
        except SystemExit as ended:
            _flush()
            leave_plans(ended.code)
            raise
        finally:
            _flush()
    except KeyboardInterrupt:
        import signal

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C during cleanup ends it at once
        sys.stderr.write("slipstream: interrupted\n")
        sys.exit(130)
    except OSError as error:
        import errno

        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE):
            raise
        _drop_output()
        if error.errno == errno.EPIPE:  # nobody reads on, as in `| head`
            sys.exit(1)
        sys.stderr.write(f"slipstream: {error.filename or 'the answer'} cannot be written: {error.strerror}\n")
        sys.exit(2)


LIKE = {"·": ".", "╳": "x", "×": "x", "─": "-", "–": "-", "━": "-", "│": "|", "┃": "|", "█": "#", "→": ">", "µ": "u",
        "±": "~", "≥": ">", "≤": "<", "…": "."}
"""What stands for a character on a terminal or in a file that has not got it; `?` for all others."""


def _write_what_can_be_written() -> None:
    """Where stdout or stderr is of another encoding than UTF-8, such as ASCII, write what is most like it there."""
    import codecs
    import io

    def replace(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(LIKE.get(one, "?") for one in error.object[error.start:error.end]), error.end

    codecs.register_error("slipstream.like", replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="slipstream.like")


def _flush() -> None:
    """Flush stdout here: errors of the interpreter's own flush at exit could not be handled."""

    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def leave_plans(code: object) -> None:
    """Where a run has ended while threads plan for it, end here: at exit Python would wait for theirs for minutes."""
    import os
    import threading

    if any(thread.name == "planning" for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _drop_output() -> None:
    """Discard what is still in the buffer of stdout."""
    import os

    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
