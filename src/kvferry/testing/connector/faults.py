"""Cases: the connector's store and its process fail."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from kvferry.testing.connector.content import Ask
from kvferry.testing.connector.host import CaseEnd
from kvferry.testing.connector.lab import Lab
from kvferry.testing.connector.rules import Case, Table, flags

KILLED = 91
"""Exit status of a process that a case ended."""

_AHEAD = time.time() + 40 * 86_400


def _die() -> NoReturn:
    """End this process as a crash would, without any clean-up."""
    os._exit(KILLED)


def _stored(lab: Lab) -> Ask:
    """The first part stores a prompt. Later ones are to ask for it."""
    ask = lab.ask(69)
    if lab.part == 0:
        lab.start()
        lab.store_prompt(ask)
        lab.close()
    return ask


def _serve_twice(lab: Lab, ask: Ask, *others: Ask) -> None:
    """The prompt must be right, reused or not."""
    lab.serve(lab.again(ask, max_tokens=3), *others)
    lab.forget()
    lab.serve(lab.again(ask))


def _damaged(damage: Callable[[Path], object]) -> Case:
    """A case: an engine starts over the store with one kind of files, by suffix, damaged, and then
    over the next."""

    @flags(parts=2, may=("refused",))
    def case(lab: Lab) -> None:
        ask = _stored(lab)
        if lab.part == 0:
            return
        whole, refusals = lab.directory / "whole", []
        shutil.copytree(lab.store, whole)
        kinds = sorted({path.suffix for path in lab.files()})
        if not kinds:
            raise CaseEnd("not run", "the connector keeps no files in {dir}")
        for kind in kinds:
            shutil.rmtree(lab.store)
            shutil.copytree(whole, lab.store)
            for path in lab.files():
                if path.suffix == kind:
                    damage(path)
            try:
                with lab.during(kind or "files"):
                    lab.start()
                    _serve_twice(lab, ask)
                    lab.close()
            except CaseEnd as end:
                if end.verdict != "refused":
                    raise
                refusals.append(str(end))
        if len(refusals) == len(kinds):
            raise CaseEnd("refused", "; ".join(refusals))

    return case


def _flip(divisor: int, path: Path) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[len(content) // divisor] ^= 4
        path.write_bytes(content)


TABLE: Table = tuple(
    (name, f"{expects} [scheduler.py, _handle_invalid_blocks]", _damaged(damage))
    for name, expects, damage in (
        ("truncated", "Files that end half-way are a miss.",
         lambda path: os.truncate(path, path.stat().st_size // 2)),
        ("emptied", "Empty files are a miss.", lambda path: os.truncate(path, 0)),
        ("flipped", "A flipped bit is a miss.", partial(_flip, 2)),
        ("flipped_header", "A flipped bit near the start of a file is a miss.", partial(_flip, 50)),
        ("removed", "Files that are gone are a miss.", Path.unlink),
        ("clock_set_back", "Files may be newer than the clock.",
         lambda path: os.utime(path, (_AHEAD, _AHEAD))),
    )
)  # fmt: skip


def _empty_after_promise(lab: Lab) -> None:
    def empty() -> None:
        for path in lab.store.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    lab.start().after_promise = empty


@flags(parts=2)
def gone_after_promise(lab: Lab) -> None:
    """A store that is emptied between look-up and load fails the load, not the engine.
    [scheduler.py, _handle_invalid_blocks: report, not raise]"""
    ask = _stored(lab)
    if lab.part == 1:
        _empty_after_promise(lab)
        lab.serve(ask)
        lab.serve(lab.ask(50))


@flags(parts=3, killed=1)
def after_a_failed_load(lab: Lab) -> None:
    """A load that failed leaves nothing that a later look-up takes for a hit. [scheduler.py: it
    looks up again]"""
    ask = _stored(lab)
    if lab.part == 1:
        _empty_after_promise(lab)
        with lab.unless("engine dead"):
            lab.serve(ask)
        _die()
    if lab.part == 2:
        lab.start()
        lab.serve(ask)


def directory_removed(lab: Lab) -> None:
    """A directory that is removed under the engine costs hits alone. [operators: caches are
    cleared]"""
    stored = lab.stored()
    shutil.rmtree(lab.store)
    _serve_twice(lab, stored, lab.ask(50))


def disk_full(lab: Lab) -> None:
    """A full disk costs hits alone, and these only until there is room again. [operators]"""
    stored = lab.stored()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_024, hard))
    lab.serve(lab.again(stored, max_tokens=3), lab.ask(69))
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    lab.store_prompt(lab.ask(85))


@flags(parts=2, may=("refused",))
def read_only(lab: Lab) -> None:
    """A directory that may not be written costs what is not stored. [operators]"""
    ask = _stored(lab)
    if lab.part == 0:
        return
    for path in (lab.store, *lab.store.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    _give_up_root()
    if os.access(lab.store, os.W_OK, effective_ids=True):
        raise CaseEnd("not run", "this user may write anywhere")
    lab.start()
    _serve_twice(lab, ask, lab.ask(50))


def _give_up_root() -> None:
    """Drop the capabilities by which Linux lets root write where it may not."""
    if os.geteuid() == 0 and os.uname().sysname == "Linux":
        header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        libc = ctypes.CDLL(None)
        libc.capget(header, sets)
        for index in range(3):  # effective, permitted, inheritable
            sets[index] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        libc.capset(header, sets)


@flags(parts=2, killed=0)
def killed_in_write(lab: Lab) -> None:
    """What a killed engine left half-written is no hit. [operators: machines crash]"""
    host, ask = lab.start(), lab.ask(69)
    if lab.part == 0:
        before = lab.state()

        def die_if_changed() -> None:
            if lab.state() != before:
                _die()

        host.after_layer = die_if_changed
        host.add(ask)
        for _ in range(1_000):
            host.step()
            die_if_changed()
        _die()
    _serve_twice(lab, ask)


@flags(parts=2, killed=0)
def killed_after_write(lab: Lab) -> None:
    """What was stored is reused after the engine was killed. [operators: machines crash]"""
    host, ask = lab.start(), lab.ask(69)
    if lab.part == 0:
        lab.store_prompt(ask)
        host.add(lab.ask(101))
        host.step()
        _die()
    lab.expect(ask, 64)


def private_files(lab: Lab) -> None:
    """Stored KV is for its owner's eyes. [operators: prompts are secrets]"""
    lab.stored()
    lab.notes.append(f"{len(lab.files())} files for a prompt of 4 blocks and 2 layers")
    for path in lab.files():
        way = [path, *(up for up in path.parents if lab.store in up.parents)]
        if all(each.stat().st_mode & (0o011 if each.is_dir() else 0o044) for each in way):
            raise CaseEnd("wrong", f"others may read files such as *{path.suffix}")
