"""The identity of a model as an engine runs it: its directory, and in what it differs from that."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.keys import JsonValue, ModelIdentity


def identify(
    weights: bytes,
    written: Mapping[str, JsonValue],
    *,
    dtype: str,
    deviations: Mapping[str, JsonValue],
    weights_version: str | None,
    name: str | None,
) -> ModelIdentity:
    """The identity of a running model. Engines that deviate in nothing from one directory agree on
    it, whatever library read the directory.

    Args:
        weights: from `weights_digest`.
        written: the model's configuration as it is written, from `written_config`.
        dtype: that the model computes in, such as "bfloat16"; replaces the written one, which two
            fields may name.
        deviations: every other thing that decides KV bytes and is not written: overrides,
            quantisation while loading, foreign code. Each host answers this question itself.
        weights_version: from the operator; see `ModelIdentity`.
        name: the user's name of the model.
    """
    config = {field: value for field, value in written.items() if field != "torch_dtype"}
    return ModelIdentity(
        weights=weights,
        config={**config, "dtype": dtype, **deviations},
        weights_version=weights_version,
        name=name,
    )
