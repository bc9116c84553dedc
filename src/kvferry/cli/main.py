"""The `kvferry` command: collects the sub-commands and turns each expected failure into one line.

`kvferry.cli.__main__` runs `main`. `kvferry.cli.output.Exit` has the exit codes.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand

import kvferry
from kvferry.cli.change import pin, rm
from kvferry.cli.copy import copy
from kvferry.cli.demo import demo
from kvferry.cli.doctor import doctor
from kvferry.cli.explain import explain
from kvferry.cli.generate import generate
from kvferry.cli.output import Exit, NothingFound
from kvferry.cli.records import ls, verify
from kvferry.cli.report import report
from kvferry.cli.simulate import simulate
from kvferry.cli.status import status
from kvferry.cli.warm import warm
from kvferry.config import printable
from kvferry.errors import ConfigError, KVError
from kvferry.store.kind import shown_url

# ClickException, the base of click's errors. Newer releases of typer bundle their own click, so the
# class is taken from the bases of a public exception of typer. Both classes have what is used here.
_CLICK_ERROR = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])


_COMMANDS: Mapping[str, Sequence[Callable[..., None]]] = {
    "Try it": (demo, generate),
    "Look": (ls, status, explain, doctor, report),
    "Change": (rm, pin, copy, verify),
    "Plan and fill": (simulate, warm),
}
"""All commands, by their heading in the help."""

_RENAMED = {
    "bench": "make bench NAME=stores, in the repository",
    "clear": "kvferry rm URL",
    "demo-disaggregated": "make demo-disaggregated, in the repository",
    "export": "kvferry copy URL TO --prompt-file FILE",
    "gc": "kvferry rm URL --max-bytes SIZE --older-than AGE",
    "import": "kvferry copy URL TO",
    "show": "kvferry ls URL KEY",
    "size": "kvferry doctor --model DIR",
    "stat": "kvferry ls URL --by namespace",
    "top": "kvferry status URL --watch",
}
"""What does now what a command of an earlier name did."""


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
    """Look at, check and use a store of KV cache; a record is either right or counts as a miss."""


class _Command(TyperCommand):
    """A command whose options are given once, unless they take a list: of two values, one would be
    dropped without a word."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401 - click's, bundled
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for param in given:
            is_option = param.param_type_name == "option" and not getattr(param, "multiple", False)
            if is_option and given.count(param) > 1:
                raise ConfigError(f"{param.opts[0]} is given {given.count(param)} times; give one")
        return super().parse_args(ctx, args)


def build_app() -> typer.Typer:
    """Make a new typer application with all commands."""
    app = typer.Typer(
        name="kvferry",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",  # others keep the line breaks of docstrings
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for panel, commands in _COMMANDS.items():
        for command in commands:
            app.command(command.__name__, cls=_Command, rich_help_panel=panel)(command)
    return app


def build_command() -> Any:  # noqa: ANN401 - of click, which may be typer's own
    """Make the command line of `build_app`. Newer releases of typer show types of Python in the
    help; here a flag takes nothing, an option a number or a text, and an argument has its name."""
    root: Any = typer.main.get_command(build_app())
    for command in (root, *root.commands.values()):
        command.get_help_option = partial(_help_option, command.get_help_option)
        for each in command.params:
            _hide_type(each)
    return root


def _help_option(make: Callable[[Any], Any], context: Any) -> Any:  # noqa: ANN401 - of click
    option = make(context)
    _hide_type(option)
    return option


def _hide_type(parameter: Any) -> None:  # noqa: ANN401 - of click
    if not hasattr(parameter, "display_type"):
        return  # this release of typer shows none
    if not parameter.opts[0].startswith("-"):
        parameter.display_type = lambda _context: None
    elif parameter.metavar is None:
        is_number = re.search("int|float", parameter.display_type(None)) is not None
        parameter.metavar = "" if parameter.is_flag else "N" if is_number else "TEXT"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; expected failures become one line on stderr.

    Args:
        arguments: what follows the program's name; taken from `sys.argv` if None.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    command = build_command()
    try:
        code = command(args=arguments, prog_name="kvferry", standalone_mode=False)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as end:
        # Outside of standalone mode, click and rich raise SystemExit only for a broken pipe, and
        # without an error when they have completed a line for a shell.
        is_over = isinstance(end, SystemExit) and not end.code
        return 0 if is_over else _reader_left()
    except (KeyboardInterrupt, typer.Abort):
        return _fail("interrupted", Exit.INTERRUPTED)
    except _CLICK_ERROR as error:
        message = _without_urls(error.format_message(), arguments)
        first = next(iter(sys.argv[1:] if arguments is None else arguments), "")
        if first in _RENAMED:
            message = f"`kvferry {first}` is gone; its work does: {_RENAMED[first]}"
        # The message is empty if there were no arguments: then the help was printed.
        return _fail(message, error.exit_code) if message else error.exit_code
    except (KVError, OSError) as error:
        if _follows_interrupt(error):
            return _fail("interrupted", Exit.INTERRUPTED)
        if isinstance(error, NothingFound):
            return _fail(str(error), Exit.NO, "nothing found")
        return _fail(str(error), Exit.MISUSE)
    if code == Exit.INTERRUPTED:  # what typer makes of Ctrl-C in a command
        return _fail("interrupted", Exit.INTERRUPTED)
    return code if isinstance(code, int) else Exit.DONE


def _follows_interrupt(error: BaseException | None) -> bool:
    """Whether an error was raised while a command cleaned up after Ctrl-C."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


class _Formatter(logging.Formatter):
    """Log lines whose control characters are escaped, so that no terminal obeys them."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: ANN401 - as `logging` has it
        return "\n".join(map(printable, super().formatException(ei).split("\n")))


def _reader_left() -> int:
    """Send stdout to nowhere: else Python flushes it at exit, and fails with a traceback."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return Exit.READER_LEFT


def _without_urls(message: str, arguments: Sequence[str] | None) -> str:
    """Return the message of a click error with URLs masked: they may hold a password."""
    given = sys.argv[1:] if arguments is None else arguments
    # Of `--option=URL`, click names the value alone.
    values = [argument.partition("=")[2] for argument in given if argument.startswith("--")]
    for argument in [*given, *values]:
        if "@" in argument or "://" in argument:
            if not argument.isprintable():  # click may show it escaped in another way
                return "an argument holds a character that cannot be printed"
            for form in (repr(argument)[1:-1], argument):
                message = message.replace(form, shown_url(argument))
    return message


def _fail(message: str, code: int, kind: str = "error") -> int:
    print(f"{kind}: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
