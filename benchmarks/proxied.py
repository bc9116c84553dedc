"""Two vLLM servers behind vLLM's own proxy: kvferry's peers, and NixlConnector where it is
installed (`nixl_reads`).

One pair of servers at a time; the cases take turns. The prompts are long texts, of which one is
handed over and asked again of the decoder, which then has it in its own prefix cache, and another
one is computed there (`kvferry.demo.disaggregated`). At the end of each turn a prompt is
prefilled, the prefiller is killed, and the decoder is asked with the parameters of its answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil  # type: ignore[import-untyped]  # of vLLM's environment

from benchmarks import Options
from benchmarks.nixl_reads import IS_INSTALLED
from kvferry.bench import Row
from kvferry.demo.disaggregated import (
    PREFILL,
    HandoverOptions,
    Pair,
    free_ports,
    prompt_of,
    run_rounds,
)
from kvferry.demo.model import prepare_model
from kvferry.demo.vllm_servers import Launch, Server, peers, vllm_pair
from kvferry.errors import ConfigError, StoreError

Figures = dict[str, str | int | float | None]

ROOT = Path(__file__).parents[1]
PROXY = ROOT / ".vllm-connectors" / "0.32.0" / "toy_proxy_server.py"
BLOCK_SIZE = 128
MEMORY_BYTES = 256 << 20
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
"""Threads that wait for each other at a barrier of OpenMP spin. More of them than cores, in two
servers, make a forward of 80 ms last a second."""
TURNS = 2
MAX_TOKENS = 8
SHOWN = {
    "prefill_ms": "prefill_s",
    "handed_over_ms": "ttft_s",
    "own_hit_ms": "local_ttft_s",
    "computed_ms": "computed_ttft_s",
    "through_proxy_ms": "proxied_ttft_s",
}
"""Columns: the first two are what the engines themselves measured."""


def of_kvferry(options: HandoverOptions) -> tuple[Launch, Launch]:
    """With the blocks that NixlConnector has to have, and with so little memory that all of it was
    used after two prompts: the first use of memory is no part of the figures."""
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
    """A row for each case: medians over all turns."""
    if not PROXY.is_file():
        raise ConfigError(f"{PROXY} is not there; `make bench NAME=proxied` fetches it")
    handover = HandoverOptions(
        model_dir=prepare_model(ROOT / ".demo", report=print).absolute(),
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
            result = run_rounds(options, pair, lambda _: None)
            figures = [each.figures for each in result.rounds]
            row: Figures = {
                column: 1e3 * median(each[figure] for each in figures)
                for column, figure in SHOWN.items()
            }
            killed = _kill(options, pair)
    except StoreError as error:
        if name == "kvferry":
            raise
        return {"case": name, "note": f"not measured: {error}"}
    return {
        "case": name,
        "prompt_tokens": figures[0]["prompt_tokens"],
        **row,
        "equal": all(each.same_answer for each in result.rounds),
        **killed,
    }


def _kill(options: HandoverOptions, pair: Pair) -> Row:
    """What the decoder says of a prompt whose prefiller died behind its answer."""
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
    except StoreError as error:
        answer = f"an error: {error}"[-60:]
    else:
        answer = "right" if said.text == expected.text else "wrong"
        if not said.logprobs:
            answer = "an error"  # in the place of a token
    return {"after_kill": answer, "after_kill_ms": 1e3 * (time.perf_counter() - began)}


def _together(turns: list[Row]) -> Row:
    """One row of all turns: the medians of numbers, and of the rest what is worst."""
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
