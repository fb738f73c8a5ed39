"""``python -m paceline``, and where the command ``paceline`` begins."""

import signal


def main() -> None:
    """Run the command line; Ctrl-C while it is still being loaded ends it without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until cli.main can tell of it
    from paceline.cli.main import main as run  # loaded late: this is what takes the time

    run()


if __name__ == "__main__":
    main()
