"""Prompts, generation and record writing for the tests of `StoredKV`."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

from kvferry.adapters.transformers import StoredKV, StoredKVConfig
from kvferry.adapters.transformers.cache_copies import form_of
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.keys import ChunkKeys
from kvferry.observe import Counters
from kvferry.store.record_client import RecordClient
from kvferry.store.url import open_store

CHUNK = 16
ROOT = Path(__file__).parents[3]


class Generated(NamedTuple):
    num_loaded: int
    num_saved: int
    token_ids: list[int]
    """All token ids, the prompt's first."""
    logits: torch.Tensor
    """`[new tokens, vocab]`."""
    counts: Counters


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 320, (1, length), generator=generator)


class Batch(NamedTuple):
    input_ids: torch.Tensor
    """`[rows, tokens]`, padded on the left."""
    attention_mask: torch.Tensor


def batch(*lengths: int, seed: int = 0) -> Batch:
    """Make a batch whose rows start alike."""
    most = max(lengths)
    rows = [prompt(length, seed)[0] for length in lengths]
    input_ids = [torch.nn.functional.pad(row, (most - len(row), 0), value=7) for row in rows]
    masks = [torch.arange(most) >= most - len(row) for row in rows]
    return Batch(torch.stack(input_ids), torch.stack(masks).long())


def generate(by, input_ids, *, attention_mask=None, new_tokens: int = 5, **options):
    """Generate greedily by a model or a `StoredKV`. Return tokens `[rows, tokens]`, logits
    `[new tokens * rows, vocab]`."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    output = by.generate(
        input_ids,
        attention_mask=mask,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
        **options,
    )
    return output.sequences, torch.cat(output.logits)


def reuse(model, store_url: str, input_ids, **options) -> Generated:
    """Generate with a new `StoredKV`."""
    counts = Counters()
    options = {"chunk_tokens": CHUNK, **options}
    with StoredKV(model, store_url, observer=counts, **options) as kv:
        sequences, logits = generate(kv, input_ids)
        num_saved = counts["put_stored"] * options["chunk_tokens"]
        return Generated(kv.num_loaded, num_saved, sequences[0].tolist(), logits, counts)


def loaded(kv: StoredKV, input_ids, attention_mask=None) -> int:
    """Return how many tokens of each row a prefill reads, padding included."""
    cache = kv.prefill(input_ids, attention_mask)
    assert cache.get_seq_length() == torch.as_tensor(input_ids).shape[-1] - 1
    return kv.num_loaded


class RecordWriter:
    """Writes records under the keys of a model's prompts, whatever KV is in them."""

    def __init__(self, model, url: str, **config) -> None:
        self.config = StoredKVConfig(chunk_tokens=CHUNK, **config)
        self.host = HostModel(model, None, self.config.weights_version)
        self.form = form_of(self.host, self.config)
        self.namespace, self.rows = self.form.namespace, self.form.rows
        self.store = open_store(url, namespace=self.namespace.digest)
        self.records = RecordClient(
            self.store, self.rows.schema, Counters(), self.config.io_threads
        )

    def keys(self, input_ids):
        """Return the keys of the chunks of one prompt."""
        chain = ChunkKeys(self.namespace.digest, CHUNK)
        chain.extend(input_ids[0].tolist())
        return chain.keys

    def write(self, images):
        """Store images of records; return how many were stored."""
        return self.records.put_all(images, time.monotonic() + self.config.save_timeout_seconds)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.records.close(10.0)
        self.store.close()


def assert_same_as_cold(model, input_ids, generated: Generated, within: float = 1e-4) -> None:
    """Assert that logits and greedy tokens are those of the model without a stored cache."""
    sequences, logits = generate(model, input_ids)
    assert (generated.logits - logits).abs().max() <= within
    assert generated.token_ids == sequences[0].tolist()


def run_elsewhere(code: str, *arguments: object) -> list[str]:
    """Run code in another process. Return the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


_CHAT = """
import sys
import torch
from transformers import AutoModelForCausalLM
from kvferry.adapters.transformers import StoredKV
from tests.adapters.transformers.generating import generate, prompt

store_url, chunk, num_turns, path = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
with StoredKV(model, store_url, chunk_tokens=int(chunk)) as kv:
    token_ids = prompt(40).clamp(max=250)
    for turn in range(int(num_turns)):
        sequences, logits = generate(kv, token_ids)
        print(kv.num_loaded)
        cold_sequences, cold = generate(model, token_ids)
        assert torch.equal(sequences, cold_sequences)
        assert (logits - cold).abs().max() <= 1e-4 * cold.abs().max().clamp(max=1)
        more = prompt(30, seed=turn + 1).clamp(max=250)
        token_ids = torch.cat((sequences, more), dim=1)
"""


def chat_elsewhere(store_url: str, chunk: int, num_turns: int, path: Path) -> list[int]:
    """Have another process go through turns of a conversation, whose prompts have 40, 75, 110, ...
    tokens. Return how many tokens of each it read; its answers are right."""
    return [int(line) for line in run_elsewhere(_CHAT, store_url, chunk, num_turns, path)]
