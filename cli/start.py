"""Define the entry point, which handles Ctrl-C before it imports anything else."""

import sys

PROGRAM = "slipstream"
"""Name of the program.

It is also the context object of a command that was started from the command line, and may therefore
fork the process.
"""


def main() -> None:
    """Run the command line.

    At any time, Ctrl-C ends the program with one line and exit status 130, and a full disk with
    exit status 2.
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

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C during cleanup ends it at once
        sys.stderr.write("slipstream: interrupted\n")
        sys.exit(130)
    except OSError as error:
        import errno

        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE):
            raise
        _discard_output()
        if error.errno == errno.EPIPE:  # nobody reads on, as in `| head`: no answer, and so not the status of a "no"
            sys.exit(141)
        sys.stderr.write(f"slipstream: {error.filename or 'the answer'} cannot be written: {error.strerror}\n")
        sys.exit(2)


SIMILAR = {"·": ".", "╳": "x", "×": "x", "─": "-", "–": "-", "━": "-", "│": "|", "┃": "|", "█": "#", "→": ">", "µ": "u",
           "±": "~", "≥": ">", "≤": "<", "…": "."}
"""Replacement of characters that an encoding may lack; any other becomes `?`."""


def _substitute_unencodable() -> None:
    """Make stdout and stderr write similar characters for those their encoding lacks."""
    import codecs
    import io

    def replace_unencodable(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(SIMILAR.get(character, "?") for character in error.object[error.start:error.end]), error.end

    codecs.register_error("slipstream.like", replace_unencodable)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="slipstream.like")


def _flush_stdout() -> None:
    """Flush stdout here: errors of the interpreter's flush could not be handled."""

    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def exit_despite_planning(code: object) -> None:
    """Exit with status `code` at once if threads still plan for an ended run."""
    import os
    import threading

    if any(thread.name == "planning" for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def _discard_output() -> None:
    """Discard the output that is still in the buffer of stdout."""
    import os

    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
