"""``python -m trtspec`` and the ``trtspec`` program."""

import sys


def run() -> int:
    """:func:`trtspec.cli.main`, where a Ctrl-C during the imports is no traceback either."""
    try:
        from trtspec.cli import main
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return main()


if __name__ == "__main__":
    sys.exit(run())
