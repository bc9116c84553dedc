"""Reads traces: which blocks each request asked for, in order of arrival. No tokens, no text.

Two formats of JSON lines are read, distinguished by the fields of the first line:

- Mooncake's: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids` (of blocks
  of 512 tokens; the last one may be partial);
- journals of engines (option `record`, see `JournalLine`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvferry.errors import ConfigError
from kvferry.journal import JournalLine, is_json, journal_lines

Ints = NDArray[np.int64]

MOONCAKE_BLOCK_TOKENS = 512

MAX_BLOCK_TOKENS = 1 << 20
MAX_TOKENS = 1 << 40
"""Most tokens of one prompt. More cannot be a real trace."""


class MooncakeLine(msgspec.Struct, frozen=True):
    """A request of a Mooncake trace."""

    timestamp: float
    input_length: int
    hash_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The requests of a trace. A reference is one block of one request.

    Attributes:
        block_tokens: tokens of a whole block.
        blocks: block of each reference, numbered from 0: [num_references].
        starts: first reference of each request, then the number of references: [num_requests + 1].
        num_tokens: length of each prompt: [num_requests].
        seconds: time from the first request to the last.
    """

    block_tokens: int
    blocks: Ints
    starts: Ints
    num_tokens: Ints
    seconds: float

    @property
    def num_requests(self) -> int:
        return len(self.num_tokens)

    @property
    def num_references(self) -> int:
        return len(self.blocks)

    @property
    def num_unique(self) -> int:
        """Number of different blocks."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    def tokens(self) -> Ints:
        """Return the tokens of each reference: [num_references]. The last reference of a prompt may
        have less than `block_tokens`."""
        tokens = np.full(self.num_references, self.block_tokens)
        counts = np.diff(self.starts)
        has_blocks = counts > 0
        beyond = counts * self.block_tokens - self.num_tokens
        tokens[self.starts[1:][has_blocks] - 1] -= np.maximum(beyond, 0)[has_blocks]
        return tokens


def trace_of(
    flat: Ints, counts: Sequence[int], num_tokens: Sequence[int], block_tokens: int, seconds: float
) -> Trace:
    """Make a trace of blocks with any numbers. Request i has the next `counts[i]` of `flat`."""
    return Trace(
        block_tokens=block_tokens,
        blocks=np.unique(flat, return_inverse=True)[1].astype(np.int64),
        starts=np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]),
        num_tokens=np.asarray(num_tokens, np.int64),
        seconds=seconds,
    )


class _TraceRows:
    """The requests of one file, collected line by line."""

    def __init__(self) -> None:
        self.blocks = array("q")
        self.counts = array("q")
        self.num_tokens = array("q")
        self.block_tokens = 0
        self.first_time = self.last_time = 0.0
        self._numbers: dict[str, int] = {}

    def add(self, line: MooncakeLine | JournalLine) -> None:
        """Add one request.

        Raises:
            ValueError: its fields contradict each other or earlier lines.
        """
        if isinstance(line, MooncakeLine):
            time, num_tokens, ids = line.timestamp / 1000, line.input_length, line.hash_ids
            block_tokens = MOONCAKE_BLOCK_TOKENS
            is_too_long = (len(ids) - 1) * block_tokens >= num_tokens
        else:
            numbers = self._numbers
            ids = [numbers.setdefault(key, len(numbers)) for key in line.keys]
            time, num_tokens, block_tokens = line.time, line.num_tokens, line.chunk_tokens
            is_too_long = len(ids) * block_tokens > num_tokens
        if not 1 <= block_tokens <= MAX_BLOCK_TOKENS or not 0 <= num_tokens <= MAX_TOKENS:
            raise ValueError(f"{num_tokens} tokens in blocks of {block_tokens}")
        if ids and is_too_long:
            raise ValueError(f"{len(ids)} blocks of {block_tokens} tokens for {num_tokens} tokens")
        if self.counts and block_tokens != self.block_tokens:
            raise ValueError(
                f"blocks of {block_tokens} tokens after blocks of {self.block_tokens}; simulate "
                "one chunk size at a time"
            )
        if not self.counts:
            self.first_time = time
        self.block_tokens, self.last_time = block_tokens, time
        self.blocks.extend(ids)
        self.counts.append(len(ids))
        self.num_tokens.append(num_tokens)


def read_trace(path: Path) -> Trace:
    """Read a trace of either format.

    Raises:
        ConfigError: the file cannot be read or has no blocks, or a line is wrong or of another
            format than the first. The message names the line.
    """
    rows = _TraceRows()
    number = 0
    decoder = msgspec.json.Decoder(MooncakeLine)
    try:
        if _is_journal(path):
            for number, request in journal_lines(path):  # noqa: B007 - errors name it
                rows.add(request)
        else:
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):  # noqa: B007
                    if line.strip():
                        rows.add(decoder.decode(line))
    except OSError as error:
        raise ConfigError(f"cannot read trace {path}: {error.strerror}") from error
    except ConfigError:
        raise
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"trace {path}, line {number}: {error}") from error
    if not rows.blocks:
        raise ConfigError(f"trace {path} has no blocks: {len(rows.counts)} requests")
    return trace_of(
        np.frombuffer(rows.blocks, np.int64),
        rows.counts,
        rows.num_tokens,
        rows.block_tokens,
        max(0.0, rows.last_time - rows.first_time),
    )


def _is_journal(path: Path) -> bool:
    """Return the format of a file by its first line that is JSON: of a journal, those before it may
    be damaged. Raises as `read_trace` does."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not is_json(line):
                continue
            found = msgspec.json.decode(line)
            if isinstance(found, dict) and ("hash_ids" in found or "keys" in found):
                return "hash_ids" not in found
            raise ConfigError(
                f"trace {path}, line {number}: neither a Mooncake trace (fields timestamp, "
                "input_length, hash_ids) nor a journal (time, chunk_tokens, num_tokens, keys)"
            )
    return False
