"""`kvferry size`: bytes of a model's KV, from its config alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.cli.output import (
    JsonOption,
    JsonRow,
    emit,
    make_fact_table,
    make_table,
    require_extra,
)
from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from kvferry.types import KVGroup

_GIB = 1 << 30


def size(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL|CONFIG", help="Model directory, or its config.json.")
    ],
    tokens: Annotated[int, typer.Option(min=1, max=1 << 40, help="Length of a prompt.")] = 1024,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, max=1 << 20, help="Tokens per stored record.")
    ] = 128,
    dtype: Annotated[
        str, typer.Option(help="Data type of the KV; auto takes that of the model's config.")
    ] = "auto",
    prefill_tokens_per_second: Annotated[
        float | None,
        typer.Option(metavar="TOKENS/S", help="Measured prefill speed of the engine."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Show the KV size per token, chunk and prompt, and when loading is faster than computing.

    The store keeps every token of all layers. For sliding-window layers, a hit reads only the
    chunks that the window reaches. This command does not read the weights.

    Example: kvferry size path/to/model --tokens 32000
    """
    if prefill_tokens_per_second is not None and not 1e-6 <= prefill_tokens_per_second <= 1e15:
        raise ConfigError(
            f"--prefill-tokens-per-second {prefill_tokens_per_second}: must be from 1e-6 to 1e15"
        )
    groups = groups_of(model, dtype)
    from kvferry.keys.namespace import describe_group
    from kvferry.record.schema import RecordSchema

    schema = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=chunk_tokens, groups=groups)
    num_chunks = tokens // chunk_tokens
    read_bytes = 0
    for group, component in zip(groups, schema.components, strict=True):
        needed = num_chunks
        if group.window is not None:  # the token after the hit sees window - 1 before it
            first = max(0, num_chunks * chunk_tokens - (group.window - 1)) // chunk_tokens
            needed = num_chunks - first
        read_bytes += needed * component.num_bytes
    facts: JsonRow = {
        "token_bytes": schema.payload_bytes // chunk_tokens,
        "chunk_tokens": chunk_tokens,
        "record_bytes": schema.record_bytes,
        "tokens": tokens,
        "whole_chunks": num_chunks,
        "stored_bytes": num_chunks * schema.record_bytes,
        "read_for_a_hit_bytes": read_bytes,
        "tokens_per_gib": _GIB // schema.record_bytes * chunk_tokens,
    }
    if prefill_tokens_per_second is not None and num_chunks:
        seconds = num_chunks * chunk_tokens / prefill_tokens_per_second
        rate = float(f"{read_bytes / seconds / 1e9:.4g}")
        facts["loading_beats_computing_from_gb_per_second"] = rate
    rows = [describe_group(group) for group in groups]
    columns = {"layers": "num_layers", "kv heads": "num_kv_heads", "elements": "content_size"}
    columns |= {"dtype": "dtype", "window": "window"}
    emit({**facts, "groups": list(rows)}, json, make_table(columns, rows), make_fact_table(facts))


def groups_of(model: Path, dtype: str = "auto") -> tuple[KVGroup, ...]:
    require_extra("reading a config", "transformers", "transformers")
    from kvferry.config import build_config
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.connector import kv_groups
    from kvferry.engine.model_config import ModelConfig

    if model.is_file():
        if model.name != "config.json":
            raise ConfigError(f"{model} is no config.json; give the model directory, or that file")
        model = model.parent
    engine = build_config(EngineConfig, {"dtype": dtype}, where="--dtype")
    return kv_groups(ModelConfig(model, engine).geometry, engine.block_size)
