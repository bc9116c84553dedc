"""The benchmarks for developers, which `python -m benchmarks NAME` runs.

Each benchmark is a module of this package with

    def run(options: Options) -> Sequence[Row]: ...

which measures its subject beside a limit of the machine in the same run. If a row lacks a figure,
the cell of the table stays empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvferry.errors import ConfigError

BENCHMARKS: Mapping[str, str] = {
    "audit": "hits that are compared with what the engine computes, beside hits that are not",
    "away": "an engine whose store is away, beside one without; look-ups beside a tier that hangs",
    "datapath": "KV of an 8B model in and out of paged blocks, beside memcpy and plain file I/O",
    "device": "a GPU: tests, sanitizer, copies, stalls, a race soak, rounding (--part NAME)",
    "handover": "first tokens at a decoder that another engine prefilled for, idle and loaded",
    "launches": "a thread of tiny calls, as a GPU step makes, beside threads that verify records",
    "layout": "reads that convert TP, block size and layout, beside reads that need not",
    "lookup": "finding the stored prefix of a prompt among many chunks",
    "peer": "records of another process's memory over TCP, beside a plain socket and memcpy",
    "proxied": "two vLLM servers behind vLLM's own proxy, with kvferry and with NixlConnector",
    "serving": "prefill while another process reads what was computed, beside nobody reading",
    "states": "a Transformers model with states: starts, first tokens and bytes, beside no store",
    "step": "time inside our hooks on a decode step without hits",
    "stores": "stores beside the plain clients of their servers (--store URL)",
    "tier": "kvferry as a tier of vLLM's offloading, beside vLLM's own file tier",
    "vllm": "real vLLM with kvferry, with other connectors and with none",
}
"""What each benchmark measures, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of every benchmark.

    Attributes:
        directory: directory for files; the results depend on its file system.
        quick: whether sizes are small, to see that the benchmark runs; its figures mean little.
        threads: number of threads for I/O and copies.
        seed: seed of all random content.
        rounds: rounds of the vllm, away, handover and proxied benchmarks; None for their defaults.
        stores: URLs of the stores benchmark; if empty, those that need no server.
        parts: parts of the device benchmark; if empty, all.
    """

    directory: Path
    quick: bool = False
    threads: int = 2
    seed: int = 0
    rounds: int | None = None
    stores: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"threads is {self.threads}; it must be 1 or more")
        if self.rounds is not None and self.rounds < 1:
            raise ConfigError(f"rounds is {self.rounds}; it must be 1 or more")
