"""Ways in which tests damage the files of stored chunks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from kvferry.record.check import RecordInfo
from kvferry.store.maintenance import inspect
from kvferry.store.url import open_store

Damage = Callable[[list[Path]], None]
"""Damages some of the files of one prompt's chunks, which it gets first chunk first."""


def by_position(store: Path) -> dict[Path, int]:
    """Return, by file, the position in its prompt of each stored chunk's first token."""
    with open_store(f"file://{store}?read_only=true") as opened:
        found = {}
        for entry in opened.catalogue().scan():
            info = inspect(opened, entry)
            assert isinstance(info, RecordInfo), f"{entry.key.hex()} is not sound: {info}"
            [path] = (store / "records").glob(f"*/{entry.key.hex()}.safetensors")
            found[path] = info.first_token
    return found


def truncate(files: list[Path]) -> None:
    os.truncate(files[1], files[1].stat().st_size // 2)


def truncate_in_header(files: list[Path]) -> None:
    os.truncate(files[1], 100)


def empty(files: list[Path]) -> None:
    os.truncate(files[1], 0)


def grow(files: list[Path]) -> None:
    with files[1].open("ab") as file:
        file.write(bytes(4096))


def flip_in_payload(files: list[Path]) -> None:
    _flip(files[1], files[1].stat().st_size * 2 // 3)


def flip_in_header(files: list[Path]) -> None:
    _flip(files[1], 60)


def flip_in_length(files: list[Path]) -> None:
    _flip(files[1], 6)


def _flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        [byte] = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))


def zero(files: list[Path]) -> None:
    """Zero all bytes, as after a power loss."""
    size = files[1].stat().st_size
    files[1].write_bytes(bytes(size))


def zero_a_page(files: list[Path]) -> None:
    """Zero one page of the payload."""
    with files[1].open("r+b") as file:
        file.seek(files[1].stat().st_size // 2 // 4096 * 4096)
        file.write(bytes(4096))


def delete(files: list[Path]) -> None:
    files[1].unlink()


def swap(files: list[Path]) -> None:
    """Exchange two chunks of one prompt."""
    aside = files[0].with_suffix(".aside")
    files[0].rename(aside)
    files[1].rename(files[0])
    aside.rename(files[1])


def become_directory(files: list[Path]) -> None:
    files[1].unlink()
    files[1].mkdir()


def become_fifo(files: list[Path]) -> None:
    files[1].unlink()
    os.mkfifo(files[1])


def become_link(files: list[Path]) -> None:
    """Replace a file with a link to an endless device."""
    files[1].unlink()
    files[1].symlink_to("/dev/zero")


def all_become_directories(files: list[Path]) -> None:
    for file in files:
        file.unlink()
        file.mkdir()


DAMAGES: tuple[Damage, ...] = (
    truncate,
    truncate_in_header,
    empty,
    grow,
    flip_in_payload,
    flip_in_header,
    flip_in_length,
    zero,
    zero_a_page,
    delete,
    swap,
    become_directory,
    become_fifo,
    become_link,
    all_become_directories,
)
