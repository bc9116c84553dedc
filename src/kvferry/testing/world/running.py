"""Runs scenarios: puts the seam in place, and returns how each went."""

from __future__ import annotations

import gc
import logging
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kvferry.store.file  # noqa: F401 - loaded before the seam looks for modules
from kvferry.blocks.copies import BlockCopies, ChunkCopy
from kvferry.cache import build
from kvferry.errors import TransferError
from kvferry.store import kinds
from kvferry.store.file.settings import FileBounds
from kvferry.store.file.upkeep import Upkeep
from kvferry.store.servers import peer
from kvferry.testing.world.life import live
from kvferry.testing.world.loop import START, Killed, Loop, Stuck, Wrong
from kvferry.testing.world.media import Media, Peers
from kvferry.testing.world.scenario import Outcome, Scenario
from kvferry.testing.world.threads import EPOCH, Seam, in_world
from kvferry.testing.world.world import World

DEVICE_FAULT = "the device of this world failed"

DIRECTORY_SECONDS = 1.0
"""How often an idle directory store looks for what other processes did. It takes real reads."""

MOST_LINES = 500
"""Most warnings and errors that kvferry logs in one scenario."""


class _Errors(logging.Handler):
    """Errors that kvferry logs: it logs none unless something is wrong with it or its host."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        self.num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_lines += 1
        if record.levelno < logging.ERROR:
            return
        error = record.exc_info[1] if record.exc_info else None
        said = record.getMessage()
        is_counted = said.startswith("load of ")  # see NEVER
        if not (is_counted or isinstance(error, Killed | Wrong | ZeroDivisionError)):
            self.lines.append(f"{said}: {error!r}" if error else said)


@contextmanager
def _watched() -> Iterator[_Errors]:
    """Collect errors that are logged; show nothing."""
    logger = logging.getLogger("kvferry")
    errors, before = _Errors(), (logger.propagate, logger.level)
    logger.addHandler(errors)
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    was_enabled = gc.isenabled()
    gc.disable()  # finalisers run when references go, at the same place in every run
    try:
        yield errors
    finally:
        logger.removeHandler(errors)
        logger.propagate, level = before
        logger.setLevel(level)
        if was_enabled:
            gc.enable()


def run(scenario: Scenario, seam: Seam) -> Outcome:
    """Run a scenario. Needs the block of `worlds` around it."""
    loop = seam.loop = Loop(scenario.seed)
    seam.random = random.Random(f"seam {scenario.seed}")
    media, peers = seam.media, seam.peers = Media(loop), Peers(loop, scenario.seed)
    files = ExitStack()
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    directory = files.enter_context(TemporaryDirectory(prefix="world-", dir=place))
    seam.epoch = float(int(time.time())) if scenario.has_files else EPOCH
    world = seam.world = World(scenario, loop, media, peers, seam.wall, directory)
    failure: Wrong | None = None
    with _watched() as errors:
        main = loop.spawn(lambda: live(world), "main", owner="world")
        try:
            loop.run(main)
        except Wrong as wrong:
            failure = wrong
        except Stuck as stuck:
            failure = Wrong("stuck", str(stuck))
        except Exception as error:  # of kvferry: whatever it is, the world found it
            failure = Wrong("raised", f"{type(error).__name__}: {error}")
            failure.__cause__ = error
        if failure is None and errors.lines:
            failure = Wrong("logged", errors.lines[0])
        if failure is None and errors.num_lines > MOST_LINES:
            failure = Wrong("logs too much", f"{errors.num_lines} lines")
        seconds = loop.now - START
        world.note(f"ended after {loop.num_turns} turns: {failure}")
        errors.lines.clear()
        loop.dispose()
    files.close()
    return Outcome(failure, world.trace, seconds, world.happened)


class _Point:
    """The entry point of the kind of store that a world brings."""

    value = "kvferry.testing.world.media"
    dist = None

    def __init__(self, seam: Seam) -> None:
        self._seam = seam

    def load(self) -> Any:
        return self._seam.media.load()


@contextmanager
def worlds() -> Iterator[Seam]:
    """The block in which worlds run: kvferry's modules find virtual time, and no sockets."""
    with in_world() as seam:
        point = _Point(seam)
        seam.put(kinds, "_installed", lambda: {"sim": (point,)})
        seam.put(build, "PeerServer", lambda *a, **k: seam.peers.server(*a, **k))
        seam.put(peer, "PeerClient", lambda *a, **k: seam.peers.client(*a, **k))
        seam.put(Upkeep, "_bounds", FileBounds(tick_seconds=DIRECTORY_SECONDS))
        scatter = BlockCopies.scatter

        def scatter_or_fail(self: BlockCopies, copy: ChunkCopy) -> None:
            if seam.world.begin_copy():
                raise TransferError(DEVICE_FAULT)
            scatter(self, copy)

        seam.put(BlockCopies, "scatter", scatter_or_fail)
        yield seam
