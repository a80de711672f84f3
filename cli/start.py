"""Define the program's entry point, which can handle Ctrl-C before all else is imported."""

import sys

PROGRAM = "slipstream"
"""Name of the program; as a command's context object, it says that forking is allowed."""


def main() -> None:
    """Run the command line, and exit with its status.

    Ctrl-C ends it at any time with one line and status 130, a file that cannot be written, as on a
    full disk, with status 2, and a closed pipe without a line and with status 141.
    """
    try:
        import io

        # Otherwise output to stderr would come first in a file that receives both.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        _substitute_unencodable()
        from slipstream.cli.app import app

        try:
            app(prog_name=PROGRAM, obj=PROGRAM)
        except SystemExit as ended:
            _flush_stdout()
            exit_despite_planning(ended.code)
            raise
        finally:
            _flush_stdout()
    except KeyboardInterrupt:
        import signal

        # A second Ctrl-C during cleanup ends it at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        sys.stderr.write("slipstream: interrupted\n")
        sys.exit(130)
    except OSError as error:
        import errno

        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE):
            raise
        _discard_output()
        # Nobody reads on, as in `| head`: no answer, and so not the status of a "no".
        if error.errno == errno.EPIPE:
            sys.exit(141)
        sys.stderr.write(
            f"slipstream: {error.filename or 'the answer'} cannot be written: {error.strerror}\n"
        )
        sys.exit(2)


SIMILAR = {
    "·": ".",
    "╳": "x",
    "×": "x",
    "─": "-",
    "–": "-",
    "━": "-",
    "│": "|",
    "┃": "|",
    "█": "#",
    "→": ">",
    "µ": "u",
    "±": "~",
    "≥": ">",
    "≤": "<",
    "…": ".",
}
"""Replacements of characters that an encoding may lack; all others become `?`."""


def _substitute_unencodable() -> None:
    """Make stdout and stderr replace characters that their encoding lacks by similar ones."""
    import codecs
    import io

    def replace_unencodable(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(
            SIMILAR.get(character, "?") for character in error.object[error.start : error.end]
        ), error.end

    codecs.register_error("slipstream.like", replace_unencodable)
    for stream in (sys.stdout, sys.stderr):
        if (
            isinstance(stream, io.TextIOWrapper)
            and stream.encoding.lower().replace("-", "") != "utf8"
        ):
            stream.reconfigure(errors="slipstream.like")


def _flush_stdout() -> None:
    """Flush stdout while errors can still be handled; the interpreter does it too late."""

    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def exit_despite_planning(code: object) -> None:
    """Exit at once with status `code` (None: 0), if threads still plan a run."""
    # Otherwise the interpreter would wait for them.
    import os
    import threading

    if any(thread.name == "planning" for thread in threading.enumerate()):
        sys.stderr.flush()
        if code is None:
            os._exit(0)
        os._exit(code if isinstance(code, int) else 1)


def _discard_output() -> None:
    """Discard the output that is still in the buffer of stdout."""
    # The interpreter writes the buffer at its end, which would fail again.
    import os

    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
