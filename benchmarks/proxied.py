"""Two vLLM servers behind vLLM's own proxy, one prefilling and one decoding.

One case is kvferry's peers; the other is NixlConnector, if NIXL is installed. The cases take turns,
and one pair of servers runs at a time. Each round has two long texts (see
`benchmarks.pair`). The first is handed over, then asked again of the decoder, which has
it in its own prefix cache by then. The decoder computes the second. At the end of a turn the
prefiller computes one more prompt and is killed; the decoder gets the parameters of its answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]  # of vLLM's environment

from benchmarks import Options
from benchmarks.nixl_reads import IS_INSTALLED
from benchmarks.pair import (
    PREFILL,
    HandoverOptions,
    Pair,
    free_ports,
    prompt_of,
    run_rounds,
)
from benchmarks.report import Row
from benchmarks.vllm_servers import Launch, Server, peers, vllm_pair
from kvferry.demo.model import prepare_model
from kvferry.errors import ConfigError, KVError

Figures = dict[str, str | int | float | None]

ROOT = Path(__file__).parents[1]
PROXY = ROOT / ".vllm-connectors" / "0.32.0" / "toy_proxy_server.py"
BLOCK_SIZE = 128
MEMORY_BYTES = 256 << 20
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Threads that wait for each other at a barrier of OpenMP spin. If two servers have more of them
than the machine has cores, a forward takes many times as long."""
TURNS = 2
MAX_TOKENS = 8
SHOWN = {
    "prefill_ms": "prefill_s",
    "handed_over_ms": "ttft_s",
    "own_hit_ms": "local_ttft_s",
    "computed_ms": "computed_ttft_s",
    "through_proxy_ms": "proxied_ttft_s",
}
"""Columns, and the figures that they show. The engines themselves measure the first two."""


def of_kvferry(options: HandoverOptions) -> tuple[Launch, Launch]:
    """Launch kvferry's peers with the block size that NixlConnector needs. Two prompts use all of
    their memory, so that the figures leave out the first use of memory."""
    launches = peers(options)
    for launch in launches:
        launch.connector["kv_connector_extra_config"]["memory_bytes"] = MEMORY_BYTES
    one, other = (
        launch._replace(block_size=BLOCK_SIZE, environment=ENVIRONMENT) for launch in launches
    )
    return one, other


def of_nixl(options: HandoverOptions) -> tuple[Launch, Launch]:
    del options
    connector = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    one, other = (
        Launch(connector, BLOCK_SIZE, ENVIRONMENT | {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)})
        for port in free_ports()
    )
    return one, other


CASES: Mapping[str, Callable[[HandoverOptions], tuple[Launch, Launch]]] = {
    "kvferry": of_kvferry,
    "NixlConnector": of_nixl,
}


def run(options: Options) -> list[Row]:
    """Return a row for each case, with medians over all turns."""
    if not PROXY.is_file():
        raise ConfigError(f"{PROXY} is not there; `make bench NAME=proxied` fetches it")
    handover = HandoverOptions(
        model_dir=prepare_model(ROOT / ".demo", report=partial(print, file=sys.stderr)).absolute(),
        rounds=1 if options.quick else 5,
        document_tokens=300 if options.quick else 2000,
        work_dir=options.directory,
        max_tokens=MAX_TOKENS,
        chunk_tokens=128,
    )
    turns = 1 if options.quick else (options.rounds or TURNS)
    found: dict[str, list[Row]] = {name: [] for name in CASES if name == "kvferry" or IS_INSTALLED}
    for _ in range(turns):
        for name, rows in found.items():
            rows.append(_turn(name, handover))
    return [_together(rows) for rows in found.values()]


def _turn(name: str, options: HandoverOptions) -> Row:
    try:
        with vllm_pair(options, PROXY, CASES[name](options)) as pair:
            rounds = run_rounds(options, pair, lambda *_: None)
            figures = [each.figures for each in rounds]
            row: Figures = {
                column: 1e3 * median(each[figure] for each in figures)
                for column, figure in SHOWN.items()
            }
            killed = _kill(options, pair)
    except KVError as error:
        if name == "kvferry":
            raise
        return {"case": name, "note": f"not measured: {error}"}
    return {
        "case": name,
        "prompt_tokens": figures[0]["prompt_tokens"],
        **row,
        "equal": all(each.same_answer for each in rounds),
        **killed,
    }


def _kill(options: HandoverOptions, pair: Pair) -> Row:
    """Kill the prefiller after its answer; tell how the decoder answers the handed-over prompt."""
    prompt = prompt_of(options, "last one", options.document_tokens)
    prefilled = pair.prefiller.ask(prompt, 1, PREFILL)
    expected = pair.prefiller.ask(prompt, options.max_tokens)
    assert isinstance(pair.prefiller, Server)
    assert pair.prefiller.running is not None
    server = psutil.Process(pair.prefiller.running.process.pid)
    for process in [*server.children(recursive=True), server]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    began = time.perf_counter()
    try:
        said = pair.decoder.ask(prompt, options.max_tokens, prefilled.params)
    except KVError as error:
        answer = f"an error: {error}"[-60:]
    else:
        answer = "right" if said.text == expected.text else "wrong"
        if not said.logprobs:
            answer = "an error"  # came in place of a token
    return {"after_kill": answer, "after_kill_ms": 1e3 * (time.perf_counter() - began)}


def _together(turns: list[Row]) -> Row:
    """Merge the rows of all turns: medians of numbers, `all` of bools, every other value."""
    measured = [row for row in turns if "note" not in row]
    if not measured:
        return turns[0]
    first = measured[0]
    together: Figures = {}
    for name, value in first.items():
        values: list[Any] = [row[name] for row in measured]
        if isinstance(value, bool):
            together[name] = all(values)
        elif isinstance(value, float | int):
            together[name] = median(values)
        else:
            together[name] = ", ".join(dict.fromkeys(map(str, values)))
    return together
