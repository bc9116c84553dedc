"""The program `kvferry`, also `python -m kvferry.cli`. Ctrl-C prints one line instead of a
traceback, from the first moment to the last."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command line and return the exit code."""
    try:
        # Not at the top: this import takes a while, and Ctrl-C may come meanwhile.
        from kvferry.cli.main import main as run

        code = run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # now Ctrl-C ends all without a traceback
    return code


if __name__ == "__main__":
    sys.exit(main())
