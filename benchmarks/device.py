"""All that a machine with a GPU should be asked, in parts that can be run apart (`--part`).

    machine    the device, and the versions of what runs on it
    tests      the tests of kernels, streams and the engine on a device
    sanitizer  the tests of kernels under compute-sanitizer, where it is installed
    copies     KV of models in and out of slots, beside plain copies to and from pinned memory
    stall      how long the engine's stream waits for the saves of a step
    launches   a thread of tiny calls beside threads that verify records (the benchmark `launches`)
    soak       random saves, loads, evictions and sleeps under delays; controls that must be found
    rounding   how far honest KV of a chunk differs, computed again in a batch of another shape

Each part runs in a process of its own, so that one that breaks its device's context ends no other.
A row whose figure `failed` is not 0 makes the exit code 1. Without a CUDA device every part runs in
little on the CPU, to see that it runs; its figures mean nothing.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version

import torch

from benchmarks import Options, launches
from benchmarks.report import Row
from kvferry.errors import ConfigError


def run(options: Options) -> Sequence[Row]:
    """Run the parts that the options name, or all."""
    unknown = set(options.parts) - PARTS.keys()
    if unknown:
        raise ConfigError(f"no part {min(unknown)!r}; there are {', '.join(PARTS)}")
    if len(options.parts) == 1:
        return run_part(options.parts[0], options)
    return [row for name in options.parts or PARTS for row in run_apart(name, options)]


def run_part(name: str, options: Options) -> list[Row]:
    """Run one part in this process."""
    if not torch.cuda.is_available():
        options = replace(options, quick=True)
    part, _ = PARTS[name]
    return [{"part": name, **row} for row in part(options)]


def run_apart(name: str, options: Options) -> list[Row]:
    """Run one part in a process of its own. What ends it, or takes too long, is a row, too."""
    out = options.directory / f"{name}.json"
    command = [sys.executable, "-m", "benchmarks", "device", "--part", name, "--json", str(out)]
    command += ["--dir", str(options.directory), "--seed", str(options.seed)]
    command += ["--quick"] if options.quick else []
    print(f"device: {name} ...", file=sys.stderr, flush=True)
    _, seconds = PARTS[name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return [
            {"part": name, "case": "all of it", "failed": 1, "note": f"not done after {seconds} s"}
        ]
    if out.exists():
        found: list[Row] = json.loads(out.read_text())["rows"]
        return found
    last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    return [{"part": name, "case": "all of it", "failed": 1, "note": last}]


def _machine(_options: Options) -> Sequence[Row]:
    row: dict[str, str | int | float | None] = {
        "case": "no CUDA device: only checks that the parts run",
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "device_gib": None,
        "failed": 0,
    }
    if torch.cuda.is_available():
        row["case"] = torch.cuda.get_device_name()
        row["device_gib"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    return [row]


def _lazily(module: str, name: str) -> Callable[[Options], Sequence[Row]]:
    def part(options: Options) -> Sequence[Row]:
        found: Callable[[Options], Sequence[Row]] = getattr(importlib.import_module(module), name)
        return found(options)

    return part


def _launches(options: Options) -> Sequence[Row]:
    return [
        {"case": f"{row.pop('threads')} threads", **row}
        for row in map(dict[str, str | int | float | None], launches.run(options))
    ]


def _soak(options: Options) -> Sequence[Row]:
    # The engine is that of the tests, which no package of this repository may import.
    soak = importlib.import_module("tests.cache.moving.soak").soak
    rows: Sequence[Row] = soak(0.5 if options.quick else 40.0, options.seed)
    return rows


PARTS: Mapping[str, tuple[Callable[[Options], Sequence[Row]], int]] = {
    "machine": (_machine, 120),
    "tests": (_lazily("benchmarks.device_tests", "tests"), 320),
    "sanitizer": (_lazily("benchmarks.device_tests", "sanitizer"), 200),
    "copies": (_lazily("benchmarks.device_copies", "copies"), 120),
    "stall": (_lazily("benchmarks.device_copies", "stall"), 120),
    "launches": (_launches, 120),
    "soak": (_soak, 180),
    "rounding": (_lazily("benchmarks.device_rounding", "rounding"), 120),
}
"""What each part calls, and after how many seconds it hangs. On an H100 all are meant to take less
than ten minutes together."""
