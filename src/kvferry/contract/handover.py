"""Reads and writes the parameters of a request: those by which proxies let one engine prefill a
prompt and another decode it, and the client's options.

Proxies for vLLM send them as `kv_transfer_params` of a request, and copy those of the prefill's
answer into the decode's request. Only this file knows their fields (docs/proxies.md). They
come from clients: a value that does not have the form of its field counts as absent.

Our own field holds, side by side, a producer's stamp (what it stored of the prompt), an answer's
explanation (what was hit, what was missed) and options (docs/operate.md). Only wrong
options are refused, since only these are written by hand. Parameters are read when a request
arrives, and written into its answer when it ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvferry.config import printable, unknown
from kvferry.errors import ConfigError
from kvferry.types import DEFAULT_OPTIONS, Handover, KVSource, ProducerStamp, RequestOptions

STAMP = "kvferry"
"""Our only field: proxies copy it unread."""

STAMP_VERSION = 1
NAMESPACE_DIGITS = 16

_MAX_HOST = 253
_MAX_TOKENS = 1 << 31
_MAX_PORT = 65535

_STAMPED = frozenset(("v", "namespace", "chunks", "key"))
_EXPLAINED = frozenset(
    (
        "prompt_tokens",
        "local_tokens",
        "hit_tokens",
        "by_tier",
        "miss_reason",
        "miss_tokens",
        "why",
        "not_stored",
        "not_stored_why",
        "kind",
        "not_stored_kind",
    )
)
_OPTIONS = RequestOptions.__struct_fields__
_MAX_SHOWN = 40


def read_handover(params: object) -> Handover | None:
    """Return what the parameters of a request ask for; None if nothing that we know. Never raises.
    Does not change the object, which other connectors read, too."""
    if not isinstance(params, Mapping):
        return None
    answers = params.get("do_remote_decode") is True
    gives = answers or isinstance(params.get("remote_decoder"), Mapping)
    source = _source(params, answers=answers)
    if not gives and source is None:
        return None
    return Handover(gives=gives, answers=answers, source=source)


def read_options(params: object, arguments: object = None) -> RequestOptions:
    """Read the options of a request. Changes nothing.

    Args:
        params: `kv_transfer_params` of the request.
        arguments: its other extra arguments. An option here overrides the same one in `params`.

    Raises:
        ConfigError: an unknown option, or one of a wrong type or size. The message names it.
    """
    asked: dict[str, Any] = {}
    for given in (params, arguments):
        value = given.get(STAMP) if isinstance(given, Mapping) else None
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{STAMP} is a {type(value).__name__}, not an object of options")
        asked.update(value or {})
    for name in asked.keys() - _STAMPED - _EXPLAINED - set(_OPTIONS):
        raise ConfigError(f"{STAMP}: {unknown('option', str(name)[:_MAX_SHOWN], _OPTIONS)}")
    options = {name: asked[name] for name in _OPTIONS if name in asked}
    if not options:
        return DEFAULT_OPTIONS
    try:
        return msgspec.convert(options, RequestOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{STAMP}: {printable(str(error))}") from None


def write_explanation(
    *,
    local: int,
    hits: Mapping[str, int],
    misses: Mapping[str, int],
    why: str,
    not_stored: Mapping[str, int],
    not_stored_why: str,
    kind: str,
    not_stored_kind: str,
) -> dict[str, Any]:
    """Return what an answer says under our field about the tokens of a prompt.

    Args:
        local: tokens that the engine's own prefix cache had.
        hits: loaded tokens by `Store.tier_of`. Clients do not see the addresses of peers.
        misses: computed tokens by reason; the reason of the first such token comes first.
        why: details of that reason; empty for most.
        kind: the `FaultKind` of that reason, if a store is at fault.
        not_stored, not_stored_why, not_stored_kind: the same for computed tokens that are not
            stored.
    """
    num_hit = sum(hits.values())
    by_tier: Counter[str] = Counter()
    for source, tokens in hits.items():
        by_tier[source.partition(" ")[0]] += tokens
    explained: dict[str, Any] = {
        "prompt_tokens": local + num_hit + sum(misses.values()),
        "local_tokens": local,
        "hit_tokens": num_hit,
        "by_tier": dict(by_tier),
        "miss_reason": str(next(iter(misses), "")) or None,
        "miss_tokens": {str(reason): tokens for reason, tokens in misses.items()},
        "not_stored": {str(reason): tokens for reason, tokens in not_stored.items()},
    }
    more = {"why": why, "kind": kind}
    more |= {"not_stored_why": not_stored_why, "not_stored_kind": not_stored_kind}
    return explained | {name: text for name, text in more.items() if text}


def write_handover(
    stamp: ProducerStamp,
    *,
    is_prefill: bool,
    engine_id: str,
    request_id: str,
    num_tokens: int,
    num_groups: int,
    tp_size: int,
    address: tuple[str, int] | None,
) -> dict[str, Any]:
    """Return the parameters of an answer: what the next engine needs to find the KV of this one.

    Args:
        is_prefill: True for a prefill that another engine decodes; False for a decode whose
            conversation another engine continues.
        engine_id: id of this run of the engine.
        num_tokens: tokens whose KV was computed.
        num_groups: number of block tables of a request.
        address: where this engine serves peers; None if it does not.
    """
    host, port = address or (None, None)
    return {
        "do_remote_prefill": is_prefill,
        "do_remote_decode": not is_prefill,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_host": host,
        "remote_port": port,
        # No block is held, but some proxies and hosts look into the lists.
        "remote_block_ids": [[] for _ in range(num_groups)],
        "remote_num_tokens": num_tokens,
        "tp_size": tp_size,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_mode": "pull",
        "remote_blocks_expiry_time": None,
        STAMP: {
            "v": stamp.version,
            "namespace": stamp.namespace,
            "chunks": stamp.num_chunks,
            "key": stamp.last_key.hex() or None,
        },
    }


def _source(params: Mapping[str, Any], *, answers: bool) -> KVSource | None:
    prefiller, cache = params.get("remote_prefiller"), params.get("remote_kv_source")
    for named in (prefiller, cache):
        if isinstance(named, Mapping):
            host, port = _address(named)
            return KVSource(waits=named is prefiller, host=host, port=port)
    # A turn that continues a decode of another engine is a prefill with that decode's stamp.
    is_stamped = _is_stamped(params)
    if params.get("do_remote_prefill") is not True and not (answers and is_stamped):
        return None
    host, port = _address(params)
    return KVSource(
        waits=True,
        host=host,
        port=port,
        num_tokens=_number(params.get("remote_num_tokens"), _MAX_TOKENS),
        has_blocks=_has_any(params.get("remote_block_ids")),
        stamp=_stamp(params[STAMP]) if is_stamped else None,
    )


def _is_stamped(params: Mapping[str, Any]) -> bool:
    """Whether our field is there, even empty or malformed, and not just options or explanation."""
    value = params.get(STAMP)
    if not isinstance(value, Mapping) or not value:
        return STAMP in params
    return not value.keys() <= _EXPLAINED.union(_OPTIONS)


def _address(params: Mapping[str, Any]) -> tuple[str | None, int | None]:
    host = params.get("remote_host")
    is_name = isinstance(host, str) and 0 < len(host) <= _MAX_HOST and host.isprintable()
    return host if is_name else None, _number(params.get("remote_port"), _MAX_PORT)


def _number(value: object, most: int) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value <= most else None


def _has_any(block_ids: object) -> bool:
    """Whether a block is named. True, too, for a value that is no list: we write lists."""
    if block_ids is None:
        return False
    return not isinstance(block_ids, list) or any(group != [] for group in block_ids)


class _Stamp(msgspec.Struct):
    """A stamp of our version, but for its version."""

    namespace: Annotated[str, msgspec.Meta(pattern=rf"\A[0-9a-f]{{{NAMESPACE_DIGITS}}}\Z")]
    chunks: Annotated[int, msgspec.Meta(ge=0, le=_MAX_TOKENS)]
    key: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")] | None = None


def _stamp(value: object) -> ProducerStamp:
    """Read a stamp. Version 0 means that it is not one of ours."""
    version = _number(value.get("v"), _MAX_TOKENS) if isinstance(value, Mapping) else None
    if version != STAMP_VERSION:
        return ProducerStamp(version=version or 0)
    try:
        read = msgspec.convert(value, _Stamp)
    except msgspec.ValidationError:
        return ProducerStamp(version=0)
    if (read.key is None) != (read.chunks == 0):
        return ProducerStamp(version=0)
    last_key = bytes.fromhex(read.key or "")
    return ProducerStamp(
        version=version, namespace=read.namespace, num_chunks=read.chunks, last_key=last_key
    )
