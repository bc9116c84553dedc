"""The default store: one directory, shared by processes, size-bounded, consistent after a kill.

`kvferry.store.url` uses its `KIND` to read the options of `file:` URLs and to open directories.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import ConfigError
from kvferry.store.file.settings import DirectIO, FileSettings, Mode
from kvferry.store.file.store import FileStore
from kvferry.store.kind import HOST, Opening, StoreKind, StoreUrl, refuse_relative
from kvferry.store.memory import MemoryOptions

__all__ = ["KIND", "FileOptions", "FileSettings", "FileStore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(MemoryOptions):
    """Options of `file:` URLs; `FileStore` and `FileSettings` document them."""

    create: bool = True
    read_only: bool = False
    mode: Mode = "0700"
    direct_io: DirectIO = "auto"
    index_file: str | None = None

    def __post_init__(self) -> None:
        # `slots=True` replaces the class, so `super()` without arguments fails.
        MemoryOptions.__post_init__(self)
        refuse_relative(index_file=self.index_file)


def _check_path(where: str, raw_path: str, path: str) -> None:
    if path.strip("/") == "":
        raise ConfigError(f"{where}: names no directory; write file:///absolute/directory")
    if path.lstrip("/").startswith("~"):
        raise ConfigError(f"{where}: ~ is not expanded; write the absolute directory after file://")
    if path.startswith("/"):
        return
    host, slash, rest = raw_path.partition("/")
    if HOST.fullmatch(host) is None or "@" in rest:
        raise ConfigError(
            f"{where}: paths are absolute and local; write file:///absolute/directory"
        )
    raise ConfigError(
        f"{where}: {host!r} stands where a host would; paths are absolute and local: write "
        f"{'file:///' + rest!r}"
        + ("" if host == "localhost" else f" or {'file:///' + host + slash + rest!r}")
    )


def _open_url(url: StoreUrl, options: FileOptions, opening: Opening) -> FileStore:
    return FileStore(
        Path(url.path),
        max_bytes=options.max_bytes,
        read_only=options.read_only,
        observer=opening.observer,
        settings=FileSettings(
            create=options.create and opening.may_create,
            mode=options.mode,
            direct_io=options.direct_io,
            index=opening.index,
            index_file=None if options.index_file is None else Path(options.index_file),
        ),
    )


KIND = StoreKind(options=FileOptions, open=_open_url, check_path=_check_path, is_directory=True)
