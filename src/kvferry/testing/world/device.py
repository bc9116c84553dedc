"""The device of a simulated host: it computes NaN when a scenario says so."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from kvferry.testing.world.kv import RankKV, Right, WrongToken
from kvferry.testing.world.loop import Loop
from kvferry.testing.world.requests import HostRequest, HostStep, Scheduled

HASH_SECONDS = 1.0
"""NaN shows while a chunk is hashed. Until then, memory may offer it, as a prefix cache does
(docs/identity.md)."""


class Device:
    """See the module.

    Args:
        is_stored: whether an older release has stored NaN of a token with this seed.

    Attributes:
        num_glitches: so many requests have NaN computed for them, soon, and on that.
        num_blips: so many have NaN in one block, and right KV behind it.
    """

    def __init__(
        self, loop: Loop, block_size: int, is_stored: Callable[[int], bool], rng: random.Random
    ) -> None:
        self.num_glitches = self.num_blips = 0
        self._loop = loop
        self._size = block_size
        self._is_stored = is_stored
        self._random = rng
        self._computed: dict[int, float] = {}  # by the seed of a token, when it was NaN last

    def heal(self) -> None:
        self.num_glitches = self.num_blips = 0

    def begin(self, step: HostStep) -> list[HostRequest]:
        """Choose for which requests of a step NaN is computed."""
        spoilt = step.scheduled[: self.num_glitches]
        for item in spoilt:
            item.request.is_spoilt = True
        self.num_glitches -= len(spoilt)
        blips = step.scheduled[: self.num_blips]
        for item in blips:
            start, size = item.num_computed_tokens, self._size
            place = self._random.choice((start, self._random.randrange(start, item.stop)))
            first = max(start, place // size * size)
            item.request.blip = range(first, min(first + size, item.stop))
            item.request.is_tainted = True
        self.num_blips -= len(blips)
        return [item.request for item in (*spoilt, *blips)]

    def compute(self, kv: RankKV, item: Scheduled, right: Right, more: float) -> None:
        """Write what a step computes for a request, and so much more than is right."""
        request, start, stop = item.request, item.num_computed_tokens, item.stop
        kv.compute(request.block_ids, right, start, stop, more=more)
        bad = range(start, stop) if math.isnan(more) else request.blip
        if bad and start <= bad.start < stop:
            kv.compute(request.block_ids, right, bad.start, bad.stop, more=math.nan)
            seeds = request.seeds[bad.start : bad.stop]
            self._computed.update(dict.fromkeys(seeds, self._loop.now))

    def may_show(self, request: HostRequest, token: WrongToken) -> bool:
        """Whether memory may have offered this: the device computed NaN for these very tokens, so
        short ago that it may not have shown yet; or an older release stored some. What a load left
        empty is no such thing."""
        seed = request.seeds[token.place]
        at = self._computed.get(seed, -math.inf)
        is_recent = self._loop.now < at + HASH_SECONDS
        is_stored = self._is_stored(seed) and not token.is_empty
        return token.is_nan and (is_recent or is_stored)
