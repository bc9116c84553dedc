"""`make proof-wrong-model`: two models share a store and a name. What does the second model read?

Each case runs one model, then another, in two processes of real vLLM on a CPU over one store. It
does so for vLLM's `fs` tier, kvferry's tier and kvferry's connector. It compares the second model's
answer with its answer without a store. If `--sglang` leads to SGLang, SGLang's own file back end is
asked, too, by its own hashes (`sglang_pages.py`). Where `make test-sglang` has installed SGLang,
so is kvferry's back end in it (`real_sglang/other_models.py`). The models are tiny, with random
weights.

A miss is right. A hit is right if the answer is the model's own, within rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvferry.testing.models import make_tiny_model
from kvferry.testing.stores.hooks import wait_until
from tests.real_vllm.harness import CONNECTOR, Answers, Process, assert_same, kvferry
from tests.real_vllm.test_identity import make_adapter

HIT = 256 + 768
"""Tokens of the prompts that are whole chunks of 128."""
NUM_CHUNKS = HIT // 128
SGLANG_PYTHON = Path(".venv-sglang/bin/python")
WAIT_SECONDS = 60.0
# kvferry serves no adapter until its files are hashed, which happens beside the first requests.
NUM_TRIES = 10

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 384,
    "max_position_embeddings": 4096,
}
ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case: how the second model differs from the first.

    Attributes:
        model: name of the second model's weights.
        is_at_one_path: whether the second model replaces the directory of the first; otherwise each
            has a path of its own.
        adapters: adapters of the first and of the second model, at one path.
        engine: further options of the second engine.
        is_updated: whether the weights change in the running engine, whose caches are then reset.
    """

    name: str
    model: str = "first"
    is_at_one_path: bool = True
    adapters: tuple[str, str] | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    is_updated: bool = False


CASES = (
    Case(name="the same model again"),
    Case(name="another model under the served name", model="second", is_at_one_path=False),
    Case(name="another revision at the model's path", model="second"),
    Case(name="changed rope", engine={"hf_overrides": ROPE}),
    Case(name="weights updated in the running engine", model="second", is_updated=True),
    Case(name="the same LoRA adapter again", adapters=("a", "a")),
    Case(name="another LoRA adapter under its name and path", adapters=("a", "b")),
)


def offloading(tier: Mapping[str, Any], **extra: Any) -> dict[str, Any]:
    """Return the configuration of vLLM's connector, with a tier behind it."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "vllm_tiers",
            "cpu_bytes_to_use": 32 << 20,
            "block_size": 128,
            "secondary_tiers": [tier],
            **extra,
        },
    }


STORES = {
    "vLLM fs tier": lambda store: offloading({"type": "fs", "root_dir": str(store)}),
    "kvferry tier": lambda store: offloading(
        {
            "type": "KVFerryTier",
            "module_path": "kvferry.adapters.vllm.tier",
            "store": store.as_uri(),
            "load_timeout_seconds": 60.0,
        }
    ),
    # No hit is audited, so that the table shows what the model's identity alone does.
    "kvferry connector": lambda store: kvferry(store, load_timeout_seconds=60),
}
"""Functions that make an operator's `kv_transfer_config`, by their names in the table."""


class Proof:
    """Runs cases, each with a store of its own below `root`."""

    def __init__(self, root: Path, writer: Process, reader: Process) -> None:
        self._root = root
        self._writer = writer
        self._reader = reader
        self._models = {
            name: make_tiny_model(root / name, seed=seed, **SHAPE)
            for seed, name in enumerate(("first", "second"), 1)
        }
        self._adapters = {
            name: make_adapter(root / f"adapter-{name}", seed)
            for seed, name in enumerate(("a", "b"))
        }
        source = random.Random(1)
        self._prompts = [[source.randrange(3, 320) for _ in range(size)] for size in (300, 777)]

    def own(self, case: Case) -> Answers:
        """Return the second model's answers without a store."""
        options = {**self._options(case), **case.engine, "enable_prefix_caching": False}
        with self._reader.engine(self._place(case, second=True), None, **options) as engine:
            return engine.generate(self._requests(case, second=True))

    def verdict(self, case: Case, store_name: str, own: Answers) -> str:
        """Run both models over one store. Return "miss", "right", or how wrong the second model's
        answer is."""
        store = self._root / "stores" / f"{case.name} {store_name}".replace(" ", "-")
        connector, options = STORES[store_name](store), self._options(case)
        with self._writer.engine(self._place(case), connector, **options) as engine:
            for _ in range(NUM_TRIES):
                engine.generate(self._requests(case))
                engine.generate([self._prompts[0][:20]])  # vLLM offloads in the steps that follow
                if case.adapters is None or num_files(store) >= NUM_CHUNKS:
                    break
                self._writer.call("reset", 30, connector=False)
            if case.adapters is None or store_name != "kvferry tier":
                wait_for_files(store)
            if case.is_updated:
                path = str(self._models[case.model])
                self._writer.call("call_workers", 60, method="reload_weights", weights_path=path)
                assert self._writer.call("reset", 30, connector=True)["done"]
                return said(own, engine.generate(self._requests(case, second=True)))
        options |= case.engine
        num_tries = 1
        if case.adapters is not None and connector["kv_connector"] == CONNECTOR["kv_connector"]:
            # If the reader stored KV, the next try would hit it.
            connector, num_tries = {**connector, "kv_role": "kv_consumer"}, NUM_TRIES
        with self._reader.engine(self._place(case, second=True), connector, **options) as engine:
            for _ in range(num_tries):
                answers = engine.generate(self._requests(case, second=True))
                if answers.external:
                    break
                self._reader.call("reset", 30, connector=False)
        return said(own, answers)

    def _options(self, case: Case) -> dict[str, Any]:
        return {"served_model_name": "served", **(LORA if case.adapters else {})}

    def _place(self, case: Case, *, second: bool = False) -> Path:
        """Put a model's weights where the case wants them; return the engine's model directory."""
        weights = self._models[case.model if second else "first"]
        return self._at("served", weights) if case.is_at_one_path else weights

    def _requests(self, case: Case, *, second: bool = False) -> list[dict[str, Any]]:
        lora = None
        if case.adapters is not None:
            path = self._at("adapter", self._adapters[case.adapters[second]])
            lora = {"name": "tuned", "id": 1, "path": str(path)}
        return [{"token_ids": prompt, "lora": lora} for prompt in self._prompts]

    def _at(self, name: str, source: Path) -> Path:
        """Copy a directory to the one path of that name."""
        place = self._root / name
        shutil.rmtree(place, ignore_errors=True)
        return Path(shutil.copytree(source, place))


def said(own: Answers, answers: Answers) -> str:
    is_same, how = True, ""
    try:
        assert_same(own, answers)
    except AssertionError as error:
        is_same, how = False, str(error).splitlines()[0].partition(": ")[2]
    if not answers.external:
        assert is_same, f"wrong without a hit: {how}"
        return "miss"
    return "right" if is_same else f"**wrong output** ({how})"


def num_files(store: Path) -> int:
    """Count the stored chunks, of vLLM's tier or of ours."""
    return sum(path.suffix in (".bin", ".safetensors") for path in store.rglob("*"))


def wait_for_files(store: Path) -> None:
    is_full = f"{NUM_CHUNKS} chunks in {store}"
    wait_until(lambda: num_files(store) >= NUM_CHUNKS, is_full, WAIT_SECONDS)


def sglang_verdicts(paths: list[str], root: Path) -> list[str]:
    """Return for each case what SGLang's file back end gives the second model."""
    if not paths:
        return ["not run"] * len(CASES)
    cases = [
        {
            "directory": str(root / "sglang" / str(number)),
            "is_other": case.model != "first" or bool(case.engine) or _other_adapter(case),
            "has_adapter": case.adapters is not None,
        }
        for number, case in enumerate(CASES)
    ]
    script = Path(__file__).with_name("sglang_pages.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(cases)],
        env=environment, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    verdicts: list[str] = json.loads(done.stdout.splitlines()[-1])
    return verdicts


def storage_verdicts(root: Path) -> list[str]:
    """Return for each case what kvferry's back end in SGLang gives the second model."""
    if not SGLANG_PYTHON.exists():
        return ["not run"] * len(CASES)
    models = {
        name: make_tiny_model(root / f"{name}-in-sglang", seed=seed, **SHAPE)
        for seed, name in enumerate(("first", "second"), 1)
    }
    places = [root / "in-sglang" / str(number) for number in range(len(CASES))]

    def asked(process: str) -> list[str]:
        cases = []
        for case, place in zip(CASES, places, strict=True):
            source = models["first" if process == "first" else case.model]
            model = source
            if case.is_at_one_path:
                shutil.rmtree(place / "served", ignore_errors=True)
                model = shutil.copytree(source, place / "served")
            cases.append(
                {
                    "model": str(model),
                    "store": (place / "store").as_uri(),
                    "overrides": case.engine.get("hf_overrides", {}),
                    "is_other": case.model != "first" or bool(case.engine) or _other_adapter(case),
                    "has_adapter": case.adapters is not None,
                    "is_updated": case.is_updated,
                }
            )
        command = [SGLANG_PYTHON, "-m", "tests.real_sglang.other_models", process]
        done = subprocess.run(
            [*command, json.dumps(cases)], capture_output=True, text=True, timeout=300, check=True
        )
        verdicts: list[str] = json.loads(done.stdout.splitlines()[-1])
        return verdicts

    return [first or second for first, second in zip(asked("first"), asked("second"), strict=True)]


def _other_adapter(case: Case) -> bool:
    return case.adapters is not None and case.adapters[0] != case.adapters[1]


@contextmanager
def processes(root: Path) -> Iterator[tuple[Process, Process]]:
    with ExitStack() as closing:
        writer, reader = (
            closing.enter_context(Process(root / f"{name}.log")) for name in ("writer", "reader")
        )
        yield writer, reader


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--sglang", action="append", default=[], metavar="DIR",
        help="on the path of Python for SGLang: its unpacked wheel, and what it imports",
    )  # fmt: skip
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvferry-proof-") as name:
        root = Path(name)
        theirs = sglang_verdicts(given.sglang, root)
        ours = storage_verdicts(root)
        columns = ("SGLang file back end", "kvferry in SGLang", *STORES)
        print("| second model |", *(f"{store} |" for store in columns))
        print("|---|" + "---|" * len(columns))
        is_right = not any("wrong" in each for each in ours)
        with processes(root) as (writer, reader):
            proof = Proof(root, writer, reader)
            for case, *in_sglang in zip(CASES, theirs, ours, strict=True):
                own = proof.own(case)
                found = {store: proof.verdict(case, store, own) for store in STORES}
                print("|", *(f"{each} |" for each in (case.name, *in_sglang, *found.values())))
                sys.stdout.flush()
                is_right &= all("wrong" not in found[each] for each in found if "kvferry" in each)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
