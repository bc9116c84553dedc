"""`kvferry` as a program, also `python -m kvferry.cli`: Ctrl-C is one line from the first moment to
the last."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line; returns the exit code."""
    try:
        # Not at the top: what it imports takes most of a second, in which Ctrl-C comes as well.
        from kvferry.cli.main import main as run

        code = run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # all is said: threads end without a traceback
    return code


if __name__ == "__main__":
    sys.exit(main())
