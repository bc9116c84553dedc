"""Options, model identity and store for a host that keeps rows of its own cache with kvferry.

A row (for SGLang, a page) is a piece of the host's memory, stored as it is under the host's own
hash. vLLM's tier and SGLang's storage back end call this while the host sets them up.
"""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from kvferry.config import StoreOptions
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue, Namespace, opaque_namespace
from kvferry.observe import Observer
from kvferry.record.schema import RecordSchema
from kvferry.store.base import Store
from kvferry.store.recordio import value_check
from kvferry.store.url import open_store
from kvferry.v1.running_model import ConfigReader, local_model, model_identity

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
        identity: "name" lets the model's name stand for weights that are not on disk.
    """

    store: str | tuple[str, ...] = field(repr=False)  # a URL may hold a password
    start_timeout_seconds: float = 10.0
    identity: Literal["content", "name"] = "content"

    def __post_init__(self) -> None:
        StoreOptions.__post_init__(self)
        urls = (self.store,) if isinstance(self.store, str) else self.store
        if any(url.lower().startswith("peer://") for url in urls):
            raise ConfigError(
                "store: peer:// reads from engines with kvferry's own connector, and those hold no "
                "rows of this host, so nothing would ever be found; name a directory or a server"
            )


class RowsModel:
    """The model whose rows are kept, identified once.

    Args:
        host_config: the host's configuration, under vLLM's attribute names.
        load_config: the host's function that reads a model's configuration as it is written.
        logger: a logger of the host.

    Raises:
        ConfigError: KV that cannot be identified.
    """

    def __init__(
        self,
        host_config: Any,  # noqa: ANN401 - the host's
        load_config: ConfigReader | None,
        options: RowsOptions,
        logger: logging.Logger,
    ) -> None:
        version = options.weights_version
        found_no_weights = version is None and local_model(host_config) is None
        self._options = options
        self._by_name = options.identity == "name" and found_no_weights
        name = str(host_config.model_config.model)
        if self._by_name:
            version = f"by name: {name}"
            logger.warning(
                "kvferry: the weights of %s are not on this machine's disk: its name stands for "
                "them, so every model of this name shares these records",
                name,
            )
        try:
            self._identity = model_identity(host_config, version, load_config)
        except ConfigError as error:
            if not found_no_weights or self._by_name:
                raise
            raise ConfigError(f'{error}; or set "identity": "name" to trust the name') from error

    def namespace(
        self, host: Mapping[str, JsonValue], *, row_bytes: int, chunk_tokens: int
    ) -> Namespace:
        """Return the namespace of the model's rows; see `opaque_namespace`."""
        return opaque_namespace(
            self._identity,
            host,
            row_bytes=row_bytes,
            chunk_tokens=chunk_tokens,
            tenant=self._options.tenant,
            by_name=self._by_name,
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
    options: RowsOptions, namespace: Namespace, observer: Observer, *, sized_by: str
) -> tuple[Store, RecordSchema]:
    """Open the store of a namespace of rows, in the background if slow; return it and its schema.

    Args:
        sized_by: the host's option that says how large rows are, for messages.

    Raises:
        ConfigError: the store cannot be used.
    """
    row_bytes = namespace.description["row_bytes"]
    chunk_tokens = namespace.description["chunk_tokens"]
    assert isinstance(row_bytes, int), "a namespace of rows has both"
    assert isinstance(chunk_tokens, int), "a namespace of rows has both"
    schema = RecordSchema.for_rows(
        namespace=namespace.digest, chunk_tokens=chunk_tokens, row_bytes=row_bytes
    )
    store = open_store(
        options.store,
        observer=observer,
        namespace=namespace.digest,
        check=value_check(schema)._replace(sized_by=sized_by),
        description=namespace.as_text(),
        start_seconds=options.start_timeout_seconds,
    )
    store.wait_indexed(INDEX_SECONDS)
    return store, schema
