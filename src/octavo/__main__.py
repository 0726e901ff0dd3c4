"""`octavo`, or `python -m octavo`: the command line, which takes a moment to load."""

import signal


def main() -> None:
    """Load the command line and run it. Ctrl-C before it is loaded ends the process without a word."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from octavo.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
