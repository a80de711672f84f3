"""Where the program starts. Imports nothing before it is ready for Ctrl-C."""


def main() -> None:
    """Run the command line. Ctrl-C ends it with one line and exit 130, at any time."""
    try:
        from cli.app import app

        app(prog_name="slipstream")
    except KeyboardInterrupt:
        import signal
        import sys

        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one while things are taken down ends it at once
        sys.stderr.write("slipstream: interrupted\n")
        sys.exit(130)
