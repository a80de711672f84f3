"""Where the program starts. Imports nothing before it is ready for Ctrl-C."""


def main() -> None:
    """Run the command line. Ctrl-C ends it with one line and exit 130, at any time, a full disk with one and exit 2."""
    try:
        from cli.app import app

        try:
            app(prog_name="slipstream")
        finally:
            _flush()
    except KeyboardInterrupt:
        import signal
        import sys

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one while things are taken down ends it at once
        sys.stderr.write("slipstream: interrupted\n")
        sys.exit(130)
    except OSError as error:
        import errno
        import sys

        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE):
            raise
        _drop_output()
        if error.errno == errno.EPIPE:  # nobody reads on, as in `| head`
            sys.exit(1)
        sys.stderr.write(f"slipstream: {error.filename or 'the answer'} cannot be written: {error.strerror}\n")
        sys.exit(2)


def _flush() -> None:
    """Write what is left of the answer: the interpreter would do so at its end, where errors have no one to meet."""
    import sys

    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def _drop_output() -> None:
    """What is still in the buffer of stdout has nowhere to go."""
    import os
    import sys

    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
