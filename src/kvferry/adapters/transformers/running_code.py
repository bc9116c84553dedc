"""Refuses classes whose file is no longer what this process runs: a digest of the file would name
other code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType

from kvferry.errors import ConfigError


def refuse_edited(kinds: Iterable[type]) -> None:
    """Compare the methods of classes with their files, which are compiled for it.

    Raises:
        ConfigError: a class whose file was edited since it was imported.
    """
    by_file: dict[str, set[CodeType]] = {}
    for kind in kinds:
        file = getattr(sys.modules.get(kind.__module__), "__file__", None)
        if file is None or kind.__module__.partition(".")[0] == "torch":
            continue
        if file not in by_file:
            by_file[file] = set(_codes(Path(file)))
        for name, code in _methods(kind):
            if code.co_filename == file and code not in by_file[file]:
                raise ConfigError(
                    f"{kind.__name__}.{name} runs otherwise than {file} says, which was edited "
                    "since this process imported it; start the process again"
                )


def _codes(file: Path) -> Iterator[CodeType]:
    """Yield the code of everything in a source file."""
    try:
        found = [compile(file.read_bytes(), str(file), "exec", dont_inherit=True)]
    except (OSError, SyntaxError, ValueError):  # gone, or half written
        return
    while found:
        code = found.pop()
        yield code
        found += [each for each in code.co_consts if isinstance(each, CodeType)]


def _methods(kind: type) -> Iterator[tuple[str, CodeType]]:
    for name, value in vars(kind).items():
        function = inspect.unwrap(value) if inspect.isfunction(value) else None
        if inspect.isfunction(function):
            yield name, function.__code__
