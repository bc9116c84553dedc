"""Options and store for a host that keeps rows of its own cache with kvferry.

A row (for SGLang, a page) is a piece of the host's memory, stored as it is under the host's own
hash. vLLM's tier and SGLang's storage back end call this while the host sets them up.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.config import StoreOptions
from kvferry.errors import ConfigError
from kvferry.keys import Namespace
from kvferry.observe import Observer
from kvferry.record.schema import RecordSchema
from kvferry.store.base import Store
from kvferry.store.kinds import is_peer
from kvferry.store.recordio import value_check
from kvferry.store.url import open_store

INDEX_SECONDS = 5.0
"""How long start-up waits for the store to list its records; look-ups before that may miss."""

CLOSE_SECONDS = 5.0
"""How long shutdown waits for I/O threads."""

R = TypeVar("R")


def guarded(
    otherwise: Callable[..., Any] = lambda *_, **__: None,
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Keep faults of a method from the host: note them in the `HookFaults` that `self.faults` is,
    and return what `otherwise` makes of the method's arguments."""

    def wrap(hook: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(hook)
        def call(self: Any, *args: Any, **options: Any) -> R:  # noqa: ANN401 - as of the method
            try:
                return hook(self, *args, **options)
            except Exception:  # the host boundary
                self.faults.fault(hook.__name__, "the host goes on as if nothing was stored")
                found: R = otherwise(*args, **options)
                return found

        return call

    return wrap


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsOptions(StoreOptions):
    """The options of storage behind a host's own cache, with those of `StoreOptions`.

    Attributes:
        store: URL of the store, or URLs of several tiers, nearest first.
        start_timeout_seconds: how long an engine's start waits for the store to open.
    """

    store: str | tuple[str, ...] = field(repr=False)  # a URL may hold a password
    start_timeout_seconds: float = 10.0

    def __post_init__(self) -> None:
        StoreOptions.__post_init__(self)
        urls = (self.store,) if isinstance(self.store, str) else self.store
        if any(is_peer(url.lower()) for url in urls):
            raise ConfigError(
                "store: peer:// reads from engines with kvferry's own connector, and those hold no "
                "rows of this host, so nothing would ever be found; name a directory or a server"
            )


def adapters_name(options: RowsOptions, logger: logging.Logger) -> str | None:
    """Return what stands for LoRA adapters in the namespace of a host whose hashes do not cover
    their content: None if the operator names the weights, else a random name of this process."""
    if options.weights_version is not None:
        return None
    logger.warning(
        "kvferry: the host's hashes name LoRA adapters without their content, so nothing is "
        'shared with another start; set "weights_version" to a name that changes whenever an '
        "adapter does"
    )
    return secrets.token_hex(16)


def open_rows(
    options: RowsOptions,
    namespace: Namespace,
    observer: Observer,
    *,
    sized_by: str,
    values: str = "",
    late: Future[bytes] | None = None,
) -> tuple[Store, RecordSchema]:
    """Open the store of a namespace of rows, in the background if slow; return it and its schema.

    Args:
        sized_by: the host's option that says how large rows are, for messages.
        values: dtype of all values of a row, so that none with NaN or Inf is stored; empty if a row
            may hold anything else.
        late: gets the weights' digest once it is known, if `namespace` is without it. The store is
            opened then. Until then the schema's namespace is a random one.

    Raises:
        ConfigError: the store cannot be used.
    """
    row_bytes = namespace.description["row_bytes"]
    chunk_tokens = namespace.description["chunk_tokens"]
    assert isinstance(row_bytes, int), "a namespace of rows has both"
    assert isinstance(chunk_tokens, int), "a namespace of rows has both"
    schema = RecordSchema.for_rows(
        namespace=namespace.digest if late is None else secrets.token_bytes(32),
        chunk_tokens=chunk_tokens,
        row_bytes=row_bytes,
        values=values,
    )

    def named() -> tuple[bytes, str | None]:
        name = namespace if late is None else namespace.of_weights(late.result())
        return name.digest, name.as_text()

    store = open_store(
        options.store,
        observer=observer,
        check=value_check(schema)._replace(sized_by=sized_by),
        named=named,
        start_seconds=options.start_timeout_seconds if late is None else 0.0,
    )
    store.wait_indexed(INDEX_SECONDS)
    return store, schema
