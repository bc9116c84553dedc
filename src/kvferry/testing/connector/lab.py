"""The bench of a case: models, prompts, engines over one store, and the wait for hits."""

# ruff: noqa: ANN401 - fields of setups and requests

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kvferry.testing.connector.content import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    STATE,
    STATE_SHAPE,
    Ask,
    LoraAdapter,
    Row,
    Setup,
)
from kvferry.testing.connector.host import CaseEnd, KitHost

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {},
    "rope": {"rope_theta": 500_000.0},
    "dtype": {"torch_dtype": "bfloat16"},
    "windows": {"sliding_window": 40},
    "narrow": {"sliding_window": 24},
    "states": {"sliding_window": STATE},
}
"""What each model has of its own, besides its weights. A window is that of the first layer."""
MODEL = "model"
"""Where, in the directory of a case, the model lies whose files are replaced (`Rule.models`)."""


MODEL_CHANGE = 1_700_000_000
"""When files of models last changed, as they tell: images are built with equal times."""


def write_models(directory: Path) -> None:
    """Write all of `MODELS`, each in a directory of its name."""
    for name in MODELS:
        write_model(directory / name, name)


def write_model(path: Path, name: str) -> None:
    """Write one of `MODELS`, over the files of the one that is there, as large and as old."""
    own = MODELS[name]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": 2 * HEADS * HEAD_DIM, "intermediate_size": 64,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2 * HEADS,
        "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "vocab_size": 320,
        "max_position_embeddings": 2_048, "rope_theta": 10_000.0, "torch_dtype": "float32",
    }  # fmt: skip
    if own.get("sliding_window") == STATE:
        layers = ["conv"] + ["full_attention"] * (LAYERS - 1)
        config |= {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}
        config |= {"layer_types": layers, "conv_L_cache": 1 + STATE_SHAPE[0]}
        own = {}
    elif "sliding_window" in own:
        layers = ["sliding_attention"] + ["full_attention"] * (LAYERS - 1)
        config |= {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
        config |= {"layer_types": layers}
    _write(path, "config", "model", config | own, str(name == "weights"))
    for each in path.iterdir():
        os.utime(each, (MODEL_CHANGE, MODEL_CHANGE))


def _write(path: Path, config: str, weights: str, content: dict[str, Any], seed: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / f"{config}.json").write_text(json.dumps(content))
    source = torch.Generator().manual_seed(random.Random(seed).randrange(1 << 32))
    tensor = torch.rand((8, 8), generator=source)
    save_file({"model.embed_tokens.weight": tensor}, path / f"{weights}.safetensors")


@dataclass
class Lab:
    """What a case works with. Each part of a case runs in a process and a lab of its own, over the
    same directory."""

    connector: type[Any]
    options: dict[str, Any]  # of the connector, as the operator gave them
    make_host: Callable[[type[Any], dict[str, Any], Setup], KitHost]
    directory: Path  # of this case; the connector's store is in it
    models: Path  # where `MODELS` are
    seed: int  # decides every prompt
    part: int  # which process of the case this is
    patience: float  # seconds without a change of the store until what is not found is missed
    notes: list[str] = field(default_factory=list)  # facts for the report
    max_steps: int = 6_000  # until an engine that waits is said to wait for ever

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.store = self.directory / "store"  # what `{dir}` in the options stands for
        self.host: KitHost
        self._hosts: list[KitHost] = []
        self._number = 0
        self._seen: tuple[object, float, int] = (None, 0.0, 0)  # state, since when, looks

    # --- engines

    def start(self, model: str = "plain", **changes: Any) -> KitHost:
        """Start an engine of one of `MODELS`; `changes` are fields of `Setup`. Raises CaseEnd, see
        `KitHost`."""
        self.store.mkdir(exist_ok=True)
        options = json.loads(json.dumps(self.options).replace("{dir}", str(self.store)))
        own, directory = MODELS[model], self.directory / MODEL
        setup = Setup(
            directory=str(directory if directory.exists() else self.models / model),
            identity=model,
            dtype=own.get("torch_dtype", "float32"),
            windows=(own.get("sliding_window"),) + (None,) * (LAYERS - 1),
            **changes,
        )
        self.host = self.make_host(self.connector, options, setup)
        self.host.is_hopeful, self.host.max_steps = self._is_hopeful, self.max_steps
        self._hosts.append(self.host)
        return self.host

    def started(self) -> Lab:
        """This lab, with an engine."""
        self.start()
        return self

    def close(self) -> None:
        """Shut all engines down."""
        while self._hosts:
            self._hosts.pop().close()

    def forget(self) -> None:
        """Empty the engine's own prefix cache, once nothing is under way."""
        self.host.run()
        self.host.forget()

    # --- requests

    def tokens(self, count: int) -> tuple[int, ...]:
        """Random tokens; others at each call."""
        return tuple(self.random.randrange(3, 300) for _ in range(count))

    def ask(self, tokens: int | Sequence[int], **more: Any) -> Ask:
        """A request for a random prompt of a length, or for a given one."""
        prompt = self.tokens(tokens) if isinstance(tokens, int) else tuple(tokens)
        return self.again(Ask(name="", tokens=prompt, **more))

    def again(self, ask: Ask, **changes: Any) -> Ask:
        """The same request, changed so, under a new name."""
        self._number += 1
        return replace(ask, name=f"r{self.part}.{self._number}", **changes)

    def adapter(self, name: str, content: str, number: int = 1) -> LoraAdapter:
        """An adapter whose files hold `content`."""
        path = self.directory / name
        _write(path, "adapter_config", "adapter_model", {"r": 8, "peft_type": "LORA"}, content)
        return LoraAdapter(name, number, str(path), content)

    def serve(self, *asks: Ask) -> list[Row]:
        """Run requests together until all have ended and nothing is under way."""
        rows = [self.host.add(ask) for ask in asks]
        self.host.run()
        return rows

    def expect(self, ask: Ask, tokens: int, what: str = "a stored prompt") -> Row:
        """Serve a request, and expect a hit of so many tokens that the engine itself has not. The
        look-up is repeated for as long as the store changes. Raises CaseEnd: a "miss"."""
        self.forget()
        self._seen = (None, 0.0, 0)
        self.host.wanted[ask.name] = tokens
        (row,) = self.serve(ask)
        if row.hit < tokens:
            raise CaseEnd("miss", f"{what}: {row.hit} of {tokens} tokens were reused")
        return row

    def expect_none(self, ask: Ask, what: str) -> None:
        """Serve a request that must not be given KV of another one."""
        self.forget()
        with self.during(what):
            (row,) = self.serve(ask)
        if row.hit:
            raise CaseEnd("wrong", f"{what}: {row.hit} tokens were reused")

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Say during what a case ended."""
        try:
            yield
        except CaseEnd as end:
            raise CaseEnd(end.verdict, f"{what}: {end}") from end

    @contextmanager
    def unless(self, verdict: str) -> Iterator[None]:
        """Go on after an end of this verdict: another rule forbids it."""
        try:
            yield
        except CaseEnd as end:
            if end.verdict != verdict:
                raise

    def store_prompt(self, ask: Ask) -> Ask:
        """Serve a request, and make sure that its whole blocks are reused. Raises CaseEnd if they
        are not: the case shows nothing."""
        self.serve(ask)
        size = self.host.setup.block_size
        self.expect(self.again(ask, max_tokens=1), (len(ask.tokens) - 1) // size * size)
        return ask

    def stored(self, count: int = 69, **setup: Any) -> Ask:
        """A prompt that a new engine has stored, and forgot itself."""
        self.start(**setup)
        ask = self.store_prompt(self.ask(count))
        self.forget()
        return ask

    # --- the store

    def files(self) -> list[Path]:
        """All files of the store, in order of their names."""
        return sorted(path for path in self.store.rglob("*") if path.is_file())

    def state(self) -> object:
        """The sizes and times of the store's files."""
        found = []
        for path in self.files():
            with suppress(FileNotFoundError):
                found.append((str(path), path.stat().st_size, path.stat().st_mtime_ns))
        return found

    def _is_hopeful(self) -> bool:
        """Whether the store has changed lately, or the first look at it is not long ago: in time,
        and in looks, since a machine that stalls writes nothing meanwhile."""
        now, (state, since, looks) = self.state(), self._seen
        if state is None or now != state:
            since, looks = time.monotonic(), 0
        self._seen = (now, since, looks + 1)
        return time.monotonic() - since < self.patience or looks + 1 < 100 * self.patience
