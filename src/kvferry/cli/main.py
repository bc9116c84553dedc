"""The `kvferry` command: collects the sub-commands, and turns every failure into one line.

docs/operations.md lists the exit codes.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer

import kvferry
from kvferry.cli.bench import bench
from kvferry.cli.clear import clear, pin
from kvferry.cli.demo import demo, demo_disaggregated
from kvferry.cli.doctor import doctor
from kvferry.cli.explain import explain
from kvferry.cli.generate import generate
from kvferry.cli.prompt_files import export, import_
from kvferry.cli.records import gc, ls, show, stat, verify
from kvferry.cli.report import report
from kvferry.cli.simulate import simulate
from kvferry.cli.size import size
from kvferry.cli.top import top
from kvferry.cli.warm import warm
from kvferry.config import printable
from kvferry.errors import KVError
from kvferry.store.kind import shown_url

EXIT_MISUSE = 2
EXIT_INTERRUPTED = 130
EXIT_READER_LEFT = 141
"""What a shell reports when SIGPIPE ended a command."""


# ClickException. Newer releases of typer bundle a click of their own, so the class is found as a
# base of typer's public exception. Both have the attributes that are used here.
_CLICK_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvferry {kvferry.__version__}")
        raise typer.Exit


def _root(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """KV cache that is either right or a miss: look at, check and use a store."""


def build_app() -> typer.Typer:
    """The command line as a typer application; every call makes a new one."""
    app = typer.Typer(
        name="kvferry",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",  # its paragraphs are not wrapped twice
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for command in (
        demo, demo_disaggregated, generate, ls, show, stat, verify, gc, clear, pin, export, import_,
        doctor, explain, top, report, simulate, size, warm, bench,
    ):  # fmt: skip
        app.command(command.__name__.rstrip("_").replace("_", "-"))(command)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code and lets no expected failure out as a traceback.

    Args:
        arguments: without the program's name; `sys.argv` if None.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    app = build_app()
    try:
        code = app(args=arguments, prog_name="kvferry", standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):
        # Here click and rich raise SystemExit for a broken pipe only.
        return _reader_left()
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except _CLICK_ERROR as error:
        message = _without_urls(error.format_message(), arguments)
        # An empty message: no arguments at all, and the help was printed.
        return _fail(message, error.exit_code) if message else error.exit_code
    except (KVError, OSError) as error:
        return _fail(str(error), EXIT_MISUSE)
    if code == EXIT_INTERRUPTED:
        return _fail("interrupted", EXIT_INTERRUPTED)
    return code if isinstance(code, int) else 0


class _Formatter(logging.Formatter):
    """Log lines that no terminal acts on."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def _reader_left() -> int:
    """Discard what Python would still write at its end, which would fail with a traceback."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return EXIT_READER_LEFT


def _without_urls(message: str, arguments: Sequence[str] | None) -> str:
    """What is said of arguments that no command takes, which may be URLs with a password."""
    for argument in sys.argv[1:] if arguments is None else arguments:
        if "@" in argument or "://" in argument:
            if not argument.isprintable():  # in which form it is shown, click decides
                return "an argument holds a character that cannot be printed"
            for form in (repr(argument)[1:-1], argument):
                message = message.replace(form, shown_url(argument))
    return message


def _fail(message: str, code: int) -> int:
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
