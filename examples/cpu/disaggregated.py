"""Prefill in one engine, decode in another that reads the first one's memory, and what that takes.

    python -m examples.cpu.disaggregated                  # two embedded engines
    python -m examples.cpu.disaggregated --engine vllm    # two servers of the vLLM installed here

Run it in the repository, or by `make demo-disaggregated`. The exit code is 1 if an answer is not
that of a single engine, or if less came over than could.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.pair import HandoverOptions, Round, embedded_pair, run_rounds
from benchmarks.vllm_servers import vllm_pair
from kvferry.demo.model import prepare_model
from kvferry.errors import KVError

MAX_LOGPROB_DIFF = 1e-3
"""Most that log-probabilities may differ in float32; see `kvferry.demo.run.MAX_LOGIT_DIFF`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What all rounds showed."""

    model: str
    engines: tuple[str, str]
    peer: str
    rounds: Sequence[Round]

    @property
    def worst_diff(self) -> float:
        """Largest difference of a log-probability; NaN if any is."""
        return float(np.max([each.logprob_diff for each in self.rounds]))

    def faults(self) -> list[str]:
        """What was wrong; empty if answers equal those of one engine, and all tokens came over."""
        faults = []
        if not all(each.same_answer for each in self.rounds):
            faults.append("an answer changed")
        if not self.worst_diff <= MAX_LOGPROB_DIFF:
            faults.append(f"log-probabilities differ by {self.worst_diff:.1e}")
        faults += [
            f"{moved:.0f} tokens came over instead of {each.expected_tokens}"
            for each in self.rounds
            if (moved := each.figures["moved_tokens"]) < each.expected_tokens
        ]
        return faults


def medians(result: Result) -> dict[str, float]:
    """Return medians of the figures over the rounds; `proxied_ttft_s` behind a proxy only."""
    names = result.rounds[0].figures
    found = {name: median(each.figures[name] for each in result.rounds) for name in names}
    seconds = found["moved_s"]
    found["gb_per_s"] = found["moved_bytes"] / seconds / 1e9 if seconds else 0.0
    return found


def as_json(result: Result) -> dict[str, object]:
    """Medians over the rounds, and what was wrong."""
    return {
        "model": result.model,
        "engines": list(result.engines),
        "peer": result.peer,
        "rounds": len(result.rounds),
        **medians(result),
        "max_abs_logprob_diff": float(np.nan_to_num(result.worst_diff, posinf=1e9, nan=1e9)),
        "faults": result.faults(),
    }


def lines(result: Result) -> list[str]:
    """One line for each stage and for each way to the first token, then right or what was wrong."""
    found = medians(result)
    prefiller, decoder = result.engines
    size = f"{found['moved_bytes'] / 1e6:.1f} MB, {found['gb_per_s']:.2f} GB/s"
    shown = [f"{result.model}, float32: medians of {len(result.rounds)} prompts"]
    for what, tokens, seconds, remark in (
        ("prefill", "prompt_tokens", "prefill_s", f"at P: {prefiller}"),
        ("transfer", "moved_tokens", "moved_s", f"{size} from {result.peer}"),
        ("first token, handed over", "prompt_tokens", "ttft_s", f"at D: {decoder}"),
        ("first token, own prefix hit", "prompt_tokens", "local_ttft_s", "at D"),
        ("first token, computed", "prompt_tokens", "computed_ttft_s", "at D"),
        ("first token, from the proxy", "prompt_tokens", "proxied_ttft_s", "P and D"),
    ):
        if seconds in found:
            shown.append(f"{what:28}{found[tokens]:6.0f} tokens {found[seconds]:8.3f} s  {remark}")
    if faults := result.faults():
        return [*shown, f"Wrong: {'; '.join(faults)}."]
    within = f"(log-probabilities within {result.worst_diff:.0e})"
    return [*shown, f"Right: every answer as of a single engine {within}."]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=("embedded", "vllm"), default="embedded")
    parser.add_argument(
        "--proxy", type=Path, help="vLLM's toy_proxy_server.py, between client and servers"
    )
    parser.add_argument("--rounds", type=int, default=3, help="prompts to hand over")
    parser.add_argument("--document-tokens", type=int, default=3050, help="tokens in each prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="most tokens of an answer")
    parser.add_argument("--chunk-tokens", type=int, default=128, help="tokens of a record")
    parser.add_argument("--model-dir", type=Path, help="instead of SmolLM2-135M-Instruct")
    parser.add_argument("--dir", type=Path, default=Path(".demo"), help="for the model and logs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    given = parser.parse_args(arguments)
    if given.proxy is not None and given.engine != "vllm":
        parser.error("--proxy needs vLLM's servers; add --engine vllm")
    return given


def run(given: argparse.Namespace) -> Result:
    say = partial(print, file=sys.stderr, flush=True)
    options = HandoverOptions(
        model_dir=given.model_dir or prepare_model(given.dir, report=say),
        rounds=given.rounds,
        document_tokens=given.document_tokens,
        work_dir=given.dir,
        max_tokens=given.max_tokens,
        chunk_tokens=given.chunk_tokens,
    )
    is_vllm = given.engine == "vllm"
    with vllm_pair(options, given.proxy) if is_vllm else embedded_pair(options) as pair:
        say("both engines run")
        started = time.monotonic()

        def advance(done: int, total: int, what: str) -> None:
            say(f"{done} of {total} requests: {what}; {time.monotonic() - started:.0f} s")

        rounds = run_rounds(options, pair, advance)
        model = options.model_dir.resolve().name
        return Result(model=model, engines=pair.shapes, peer=pair.peer, rounds=rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    try:
        result = run(given)
    except KVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130
    print(json.dumps(as_json(result), indent=2) if given.json else "\n".join(lines(result)))
    return 1 if result.faults() else 0


if __name__ == "__main__":
    sys.exit(main())
