"""Medians of what the processes measured, one row per case and phase."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

from kvferry.bench import Row
from kvferry.bench.vllm.cases import Json, Measured

TOLERANCE = 1e-3
"""Of logprobs against those of the engine's own prefix hit."""

COLUMNS = (
    "case",
    "phase",
    "cpu_s",
    "cpu_ratio",
    "own_cpu_ms",
    "wall_s",
    "beyond_ms",
    "hit_tokens",
    "bytes_per_token",
    "us_per_step",
    "p50_ms",
    "p99_ms",
    "tokens_s",
    "gb_s",
    "equal",
    "note",
)
"""All rows have these keys; docs/benchmarks.md says what each means."""


def rows_of(found: Sequence[Measured]) -> list[Row]:
    """All rows, in the order of the cases."""
    alone = found[0]
    rows: list[Row] = []
    for measured in found:
        note = measured.case.note
        if measured.failure is not None:
            note = f"not measured: {measured.failure}"
            rows.append(_row(measured, "cold", note=note))
            continue
        rows.append(_cold_row(measured, alone, note))
        if measured is alone:
            rows.append(_row(alone, "own_hit", **_prompt_values(_all(alone.cold, "again"))))
        elif measured.case.stores:
            rows.append(_warm_row(measured, alone, note))
        rows.append(_decode_row(measured, alone))
        rows.append(_serve_row(measured, alone))
    return rows


def machine_row(name: str, gb_s: float) -> Row:
    """A limit of the machine."""
    return {**dict.fromkeys(COLUMNS), "case": name, "phase": "machine", "gb_s": gb_s}


def _row(measured: Measured, phase: str, **values: str | float | None) -> Row:
    return {**dict.fromkeys(COLUMNS), "case": measured.case.name, "phase": phase, **values}


def _cold_row(measured: Measured, alone: Measured, note: str | None) -> Row:
    prompts, plain = _all(measured.cold, "prompts"), _all(alone.cold, "prompts")
    stored = [result["bytes_per_token"] for result in measured.cold]
    return _row(
        measured,
        "cold",
        **_prompt_values(prompts),
        cpu_ratio=_ratio(prompts, plain),
        bytes_per_token=_median(stored) if measured.case.stores else None,
        note=note,
    )


def _warm_row(measured: Measured, alone: Measured, note: str | None) -> Row:
    prompts, again = _all(measured.warm, "prompts"), _all(measured.warm, "again")
    own = _all(alone.cold, "again")
    return _row(
        measured,
        "warm",
        **_prompt_values(prompts),
        cpu_ratio=_ratio(prompts, again),
        beyond_ms=1e3 * _median(p["wall_s"] - a["wall_s"] for p, a in _pairs(prompts, again)),
        equal=all(is_equal(p, o) for p, o in _pairs(prompts, own)),
        note=note,
    )


def _prompt_values(prompts: Sequence[Json]) -> dict[str, float]:
    return {
        "cpu_s": _median(p["cpu_s"] for p in prompts),
        "own_cpu_ms": 1e3 * _median(p["own_cpu_s"] for p in prompts),
        "wall_s": _median(p["wall_s"] for p in prompts),
        "hit_tokens": _median(p["hit_tokens"] for p in prompts),
    }


def _decode_row(measured: Measured, alone: Measured) -> Row:
    decodes = [result["decode"] for result in measured.cold]
    plain = [result["decode"] for result in alone.cold]
    has_hooks = measured.case.connector is not None
    return _row(
        measured,
        "decode",
        cpu_s=_median(d["cpu_s"] for d in decodes),
        cpu_ratio=_ratio(decodes, plain),
        us_per_step=_median(_median(d["hooks_us"]) for d in decodes) if has_hooks else None,
        p50_ms=1e3 * _median(_median(d["steps_s"]) for d in decodes),
    )


def _serve_row(measured: Measured, alone: Measured) -> Row:
    served = [result["serve"] for result in measured.cold]
    return _row(
        measured,
        "serve",
        cpu_s=_median(s["cpu_s"] for s in served),
        cpu_ratio=_ratio(served, [result["serve"] for result in alone.cold]),
        p50_ms=1e3 * _median(_median(s["gaps_s"]) for s in served),
        p99_ms=1e3 * _median(_percentile(s["gaps_s"], 0.99) for s in served),
        tokens_s=_median(s["tokens"] / s["wall_s"] for s in served),
    )


def is_equal(ours: Json, reference: Json) -> bool:
    """Same tokens, and logprobs of the tokens that both list within `TOLERANCE`."""
    if ours["tokens"] != reference["tokens"] or len(ours["logprobs"]) != len(ours["tokens"]):
        return False
    return all(
        token in here and token in theirs and abs(theirs[token] - here[token]) <= TOLERANCE
        for chosen, here, theirs in zip(
            ours["tokens"], ours["logprobs"], reference["logprobs"], strict=True
        )
        # The last of the listed ones may change places with one that is not listed.
        for token in {str(chosen)} | (here.keys() & theirs.keys())
    )


def _all(results: Iterable[Json], name: str) -> list[Json]:
    return [one for result in results for one in result[name]]


def _pairs(ours: Sequence[Json], plain: Sequence[Json]) -> Iterator[tuple[Json, Json]]:
    return zip(ours, plain, strict=True)


def _ratio(ours: Sequence[Json], plain: Sequence[Json]) -> float:
    return _median(one["cpu_s"] / other["cpu_s"] for one, other in _pairs(ours, plain))


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def _percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
