"""Proves on the real model that a cache restored from records computes what a cache in memory does.

A cache of which this is not shown is not served. The proof compares, for a prompt of a few chunks:

- leaves of a prefill in pieces with those of one piece: what Transformers itself computes wrongly
  in pieces (as the state of Mamba 1) is found here;
- each leaf of a restored cache with the one that was stored, after another prompt ran in the model;
- logits of further tokens on the restored cache, on the stored one, and of a run without a cache;
- logits of `generate` with the restored cache and without.

The result is kept beside the namespace's description, under the code and libraries of the proof.
"""

# ruff: noqa: ANN401 - the caches of Transformers share no typed surface.

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from blake3 import blake3

from kvferry.adapters.transformers.cache_copies import StoredRow, TreeForm
from kvferry.adapters.transformers.cache_leaves import Path, name_of, slots
from kvferry.adapters.transformers.host_model import UNRUNNABLE, HostModel
from kvferry.blocks.tolerance import TOLERANCE
from kvferry.engine.model_config import first_line
from kvferry.errors import ConfigError
from kvferry.store.base import Catalogue

logger = logging.getLogger(__name__)

NUM_CHUNKS, NUM_MORE, NUM_GENERATED = 3, 37, 4
"""Size of the proof: chunks that are stored, tokens computed on top, tokens generated."""

KERNELS = ("torch", "flash_attn", "flash-linear-attention", "causal_conv1d", "mamba_ssm", "kernels")
"""Packages whose kernels may compute a cache otherwise in pieces."""

PROOF_VERSION = 1

_LOGITS = {"float64": 1e-4, "float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
"""Largest difference of logits, relative to the largest, that rounding explains."""


def ensure_proven(host: HostModel, form: TreeForm, store: Catalogue) -> float | None:
    """Prove the form of a cache, unless the store has a proof of the same code. Return the seconds
    that it took; None if it was kept.

    Raises:
        ConfigError: it is not right; names the leaf, or the comparison, and the difference.
    """
    digest, mark = form.namespace.digest, _mark(host, form)
    if _kept(store.describe(digest)) == mark:
        return None
    name = type(host.model).__name__
    num_tokens = 7 * NUM_CHUNKS * form.tree.chunk_tokens
    logger.info("%s: its cache is proven first, on about %d tokens", name, num_tokens)
    started = time.monotonic()
    try:
        prove(host, form)
    except ConfigError as error:  # it is a ValueError, too
        names = host.hidden
        hidden = f" (it keeps {', '.join(names)} outside its cache)" if names else ""
        raise ConfigError(f"{name} cannot be served: {error}{hidden}") from error
    except UNRUNNABLE as error:
        raise ConfigError(f"{name} cannot go on from a cache: {first_line(error)}") from error
    text = json.dumps({**json.loads(form.namespace.as_text()), "proof": mark}, indent=1) + "\n"
    store.describe(digest, text)
    seconds = time.monotonic() - started
    logger.info("%s: its cache is proven, in %.1f s", name, seconds)
    return seconds


def _mark(host: HostModel, form: TreeForm) -> str:
    """Return a digest of all that a proof depends on."""
    facts = [PROOF_VERSION, form.namespace.digest.hex(), str(host.model.device.type)]
    return blake3(repr([*facts, *map(_version, KERNELS)]).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _kept(text: str | None) -> object:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):  # the text is untrusted
        return None
    return value.get("proof") if isinstance(value, dict) else None


def prove(host: HostModel, form: TreeForm) -> None:
    """Compare runs on restored caches with runs without, as the module says.

    Raises:
        ConfigError: a difference.
    """
    tree = form.tree
    size = tree.chunk_tokens
    end = NUM_CHUNKS * size
    ids = host.probe_ids(end + NUM_MORE, 5)
    dtype = str(host.model.dtype).removeprefix("torch.")
    limit = _LOGITS.get(dtype, _LOGITS["bfloat16"])
    error = host.tolerances.get(dtype, TOLERANCE.get(dtype, TOLERANCE["bfloat16"])).error

    one = _leaves(tree.leaves(_in_pieces(host, ids[:, :end], [end])))
    two = _leaves(tree.leaves(_in_pieces(host, ids[:, :end], [2 * size, end])))
    cache = _in_pieces(host, ids[:, :end], [size * (number + 1) for number in range(NUM_CHUNKS)])
    kept = _leaves({path: slot.value for path, slot in slots(cache).items()})
    for other in (two, kept):
        for path, value in one.items():
            _refuse_difference(name_of(path), value, other[path], error)

    images = [form.gather(cache, 0, number * size) for number in range(NUM_CHUNKS)]
    state = tree.state(cache) if tree.states else None
    _, expected = host.run(ids[:, end:], cache, end, num_logits=NUM_MORE)
    _in_pieces(host, host.probe_ids(size + 5, 77), [size + 5])
    host.reset_all()
    restored = form.cache_of([StoredRow(0, images)], end, state)
    _refuse_changed_leaves(kept, restored)
    _, logits = host.run(ids[:, end:], restored, end, num_logits=NUM_MORE)
    _refuse_logits("a restored cache and the one in memory", expected, logits, limit / 10)
    _, whole = host.run(ids, host.new_cache(), 0, num_logits=NUM_MORE)
    _refuse_logits("a restored cache and a run without one", whole, logits, limit)

    restored = form.cache_of([StoredRow(0, images)], end, state)
    for number, (alone, reused) in enumerate(_generated(host, ids, restored)):
        what = f"token {number + 1} of generate() with a restored cache and without one"
        _refuse_logits(what, alone, reused, limit)


def _in_pieces(host: HostModel, ids: torch.Tensor, stops: list[int]) -> Any:
    """Prefill a new prompt in pieces."""
    cache, at = host.new_cache(), 0
    for stop in stops:
        cache, _ = host.run(ids[:, at:stop], cache, at)
        at = stop
    return cache


def _leaves(found: dict[Path, Any]) -> dict[Path, Any]:
    """Copy leaves, which further tokens may change."""
    return {
        path: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for path, value in found.items()
    }


def _generated(
    host: HostModel, ids: torch.Tensor, restored: Any
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the logits of each generated token without and with the restored cache, as long as both
    chose the same tokens."""
    ids = ids.to(host.model.device)
    outputs = []
    for cache in ({}, {host.cache_argument: restored}):
        host.reset_all()
        output = host.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_GENERATED,
            min_new_tokens=NUM_GENERATED,
            do_sample=False,
            num_beams=1,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **cache,
        )
        outputs.append((output.logits, output.sequences[:, ids.shape[1] :]))
    (alone, tokens), (reused, others) = outputs
    for step in range(min(len(alone), len(reused))):
        if not torch.equal(tokens[:, :step], others[:, :step]):
            return
        yield alone[step], reused[step]


def _refuse_difference(name: str, one: torch.Tensor, other: torch.Tensor, limit: float) -> None:
    """Compare a leaf of a prefill in one piece with that in pieces."""
    if one.shape != other.shape:
        raise ConfigError(
            f"leaf {name} of its cache is {list(one.shape)} after a prefill in one piece and "
            f"{list(other.shape)} in pieces"
        )
    if not one.is_floating_point():
        return
    one, other = one.double(), other.double()
    found = float((one - other).norm() / one.norm().clamp_min(1e-30))
    if not found <= limit:
        raise ConfigError(
            f"Transformers computes leaf {name} of its cache otherwise in pieces than in one "
            f"piece, by {found:.1e} of its norm, so that no stored piece can be gone on from"
        )


def _refuse_changed_leaves(kept: dict[Path, Any], restored: Any) -> None:
    """Compare every leaf of a restored cache with the stored one, bit for bit."""
    found = slots(restored)
    for path, value in kept.items():
        other = found[path].value if path in found else None
        if isinstance(value, torch.Tensor):
            is_same = isinstance(other, torch.Tensor) and torch.equal(value, other)
        else:
            is_same = type(value) is type(other) and value == other
        if not is_same:
            raise ConfigError(f"leaf {name_of(path)} of its cache is not restored as it was")


def _refuse_logits(what: str, expected: torch.Tensor, logits: torch.Tensor, limit: float) -> None:
    found = float((expected.double() - logits.double()).abs().max() / expected.abs().max())
    if not found <= limit:
        raise ConfigError(f"logits of {what} differ by {found:.1e} of the largest")
