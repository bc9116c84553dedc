"""The bench of a case: models, prompts, engines over one store, and the wait for hits."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvferry.testing.connector.host import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    Answer,
    Ask,
    EngineDeadError,
    KitHost,
    LoraAdapter,
    MissedError,
    RuleBrokenError,
    Setup,
)

PLACEHOLDER = 2

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights": {"weights": 1},
    "rope": {"rope_theta": 500_000.0},
    "dtype": {"torch_dtype": "bfloat16"},
    "windows": {"sliding_window": 40},
    "narrow": {"sliding_window": 24},
}
"""What each model has of its own. Models with a window have it in the first layer."""


def write_models(directory: Path) -> None:
    """Write all of `MODELS`, each in a directory of its name: a configuration and few weights."""
    for name, own in MODELS.items():
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama",
            "hidden_size": 2 * HEADS * HEAD_DIM, "intermediate_size": 64,
            "num_hidden_layers": LAYERS, "num_attention_heads": 2 * HEADS,
            "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "vocab_size": 320,
            "max_position_embeddings": 2_048, "rope_theta": 10_000.0, "torch_dtype": "float32",
        }  # fmt: skip
        if "sliding_window" in own:
            layers = ["sliding_attention"] + ["full_attention"] * (LAYERS - 1)
            config |= {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
            config |= {"layer_types": layers}
        write_tensor(directory / name, "model", own.get("weights", 0), config | own)


def write_tensor(path: Path, name: str, seed: int, config: dict[str, Any]) -> None:
    """Write `config.json`, or an adapter's, and a safetensors file with one random tensor."""
    path.mkdir(parents=True, exist_ok=True)
    file = "config.json" if name == "model" else "adapter_config.json"
    (path / file).write_text(json.dumps({k: v for k, v in config.items() if k != "weights"}))
    entry = {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    header += b" " * (-len(header) % 8)
    content = len(header).to_bytes(8, "little") + header + random.Random(seed).randbytes(256)
    (path / f"{name}.safetensors").write_bytes(content)


@dataclass
class Lab:
    """What a case works with. Each part of a case runs in a process and a lab of its own, over the
    same directory.

    Attributes:
        options: of the connector, as the operator gave them.
        directory: of this case; the connector's store is in it.
        models: where `MODELS` are.
        seed: decides every prompt.
        part: which process of the case this is.
        patience: seconds without a change of the store after which what is not found is missed.
        notes: facts for the report.
    """

    connector: type[Any]
    options: dict[str, Any]
    make_host: Callable[[type[Any], dict[str, Any], Setup], KitHost]
    directory: Path
    models: Path
    seed: int
    part: int
    patience: float
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.host: KitHost
        self._hosts: list[KitHost] = []
        self._number = 0
        self._seen: object = None
        self._seen_at = 0.0
        self._num_looks = 0

    @property
    def store(self) -> Path:
        """What `{dir}` in the options stands for."""
        return self.directory / "store"

    @property
    def keeps_files(self) -> bool:
        """Whether the operator's options name the store's directory."""
        return "{dir}" in json.dumps(self.options)

    # --- engines

    def start(self, model: str = "plain", **changes: Any) -> KitHost:  # noqa: ANN401
        """Start an engine of one of `MODELS`. `changes` are fields of `Setup`.

        Raises:
            RefusedError: the connector or the host did not start.
            NotHereError: the host cannot run so.
        """
        self.store.mkdir(exist_ok=True)
        options = json.loads(json.dumps(self.options).replace("{dir}", str(self.store)))
        own = MODELS[model]
        window = own.get("sliding_window")
        setup = Setup(
            directory=str(self.models / model),
            identity=repr({k: v for k, v in own.items() if k != "torch_dtype"}),
            dtype=own.get("torch_dtype", "float32"),
            windows=(window,) + (None,) * (LAYERS - 1),
            **changes,
        )
        self.host = self.make_host(self.connector, options, setup)
        self.host.is_hopeful = self._is_hopeful
        self._hosts.append(self.host)
        return self.host

    def stop(self) -> None:
        """Shut the running engine down."""
        self._hosts.remove(self.host)
        self.host.close()

    def close(self) -> None:
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

    def ask(self, tokens: int | Sequence[int], **more: Any) -> Ask:  # noqa: ANN401
        """A request for a random prompt of a length, or for a given one."""
        prompt = self.tokens(tokens) if isinstance(tokens, int) else tuple(tokens)
        return self.again(Ask(name="", tokens=prompt, **more))

    def again(self, ask: Ask, **changes: Any) -> Ask:  # noqa: ANN401
        """The same request, changed so, under a new name."""
        self._number += 1
        return replace(ask, name=f"r{self.part}.{self._number}", **changes)

    def adapter(self, name: str, content: str, number: int = 1) -> LoraAdapter:
        """An adapter whose files hold `content`."""
        path = self.directory / name
        seed = int.from_bytes(content.encode())
        write_tensor(path, "adapter_model", seed, {"r": 8, "peft_type": "LORA"})
        return LoraAdapter(name, number, str(path), content)

    def serve(self, *asks: Ask) -> list[Answer]:
        """Run requests together until all have ended and nothing is under way."""
        answers = [self.host.add(ask) for ask in asks]
        self.host.run()
        return answers

    def expect(self, ask: Ask, tokens: int, what: str = "a stored prompt") -> Answer:
        """Serve a request, and expect a hit of so many tokens that the engine itself has not. The
        look-up is repeated for as long as the store changes.

        Raises:
            MissedError: there was no such hit.
        """
        self.forget()
        self._seen = None
        self.host.watch.wanted[ask.name] = tokens
        (answer,) = self.serve(ask)
        if answer.hit < tokens:
            raise MissedError(f"{what}: {answer.hit} of {tokens} tokens were reused")
        return answer

    def expect_none(self, ask: Ask, what: str) -> None:
        """Serve a request that must not be given KV of another one.

        Raises:
            RuleBrokenError: a hit.
        """
        self.forget()
        with self.during(what):
            (answer,) = self.serve(ask)
        if answer.hit:
            raise RuleBrokenError(f"{what}: {answer.hit} tokens were reused")

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Say during what a rule was broken."""
        try:
            yield
        except (RuleBrokenError, EngineDeadError) as error:
            raise type(error)(f"{what}: {error}") from error

    def store_prompt(self, ask: Ask) -> Ask:
        """Serve a request, and make sure that its whole blocks are reused.

        Raises:
            MissedError: they are not, so the case shows nothing.
        """
        self.serve(ask)
        size = self.host.setup.block_size
        self.expect(self.again(ask, max_tokens=1), (len(ask.tokens) - 1) // size * size)
        return ask

    # --- the store

    def files(self) -> list[Path]:
        """All files of the store, in order of their names."""
        return sorted(path for path in self.store.rglob("*") if path.is_file())

    def state(self) -> object:
        """The sizes and times of the store's files."""
        found = []
        for path in self.files():
            try:
                found.append((str(path), path.stat().st_size, path.stat().st_mtime_ns))
            except FileNotFoundError:
                continue
        return found

    def _is_hopeful(self) -> bool:
        """Whether the store has changed lately, or the first look at it is not long ago: in time,
        and in looks, since a machine that stalls writes nothing meanwhile."""
        state, now = self.state(), time.monotonic()
        if self._seen is None or state != self._seen:
            self._seen, self._seen_at, self._num_looks = state, now, 0
        self._num_looks += 1
        return now - self._seen_at < self.patience or self._num_looks < 100 * self.patience
