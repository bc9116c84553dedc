"""Options of `StoredKV`."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredKVConfig:
    """What a caller may set; each has a default that is right for one machine.

    Attributes:
        chunk_tokens: tokens per stored record. Part of the identity: records of another value are
            not read.
        load_timeout_seconds: after this, `load` returns what has arrived.
        save_timeout_seconds: after this, `save` starts no more records and returns.
        io_threads: threads for reads, and as many for writes.
        tenant: keeps what is stored apart from every other tenant's.
        weights_version: a name for weights that are not those of the model's directory. Whoever
            gives it vouches that different weights never share a name.
    """

    chunk_tokens: int = 128
    load_timeout_seconds: float = 5.0
    save_timeout_seconds: float = 60.0
    io_threads: int = 2
    tenant: str = ""
    weights_version: str | None = None

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens must be at least 1, not {self.chunk_tokens}")
        if not 1 <= self.io_threads <= 64:
            raise ConfigError(f"io_threads must be between 1 and 64, not {self.io_threads}")
        for name in ("load_timeout_seconds", "save_timeout_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}")
