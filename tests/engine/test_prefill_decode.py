"""Engines in processes of their own, of unequal shapes, with nothing between them but a connection:
what one prefills, another decodes as a single engine does."""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
import pytest

from kvferry.engine import SamplingParams
from tests.engine.engine_process import ASKED, EngineProcess
from tests.engine.rank_threads import ThreadedLLM
from tests.engine.test_llm import prompt
from tests.servers.namespaces import two_places
from tests.servers.process import LOCALHOST, free_ports

pytestmark = pytest.mark.slow

NUM_TOKENS, CHUNK_TOKENS, NUM_GENERATED = 230, 32, 6
MAX_DIFF = 5e-5
"""Of logits and log-probabilities, in float32."""

OPTIONS = {"chunk_tokens": CHUNK_TOKENS, "audit": "off", "load_timeout_seconds": 60.0}
"""A machine that stalls for seconds shall not cut a hit short."""


class Shape(NamedTuple):
    tensor_parallel_size: int
    block_size: int
    kv_layout: str

    @property
    def hit(self):
        return NUM_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS // self.block_size * self.block_size


# Each pair of them differs in ranks, blocks or layout; of both kinds one has one rank.
PREFILLS = (Shape(2, 16, "HND"), Shape(1, 128, "NHD"))
DECODES = (Shape(1, 32, "NHD"), Shape(2, 128, "cross_layer"))


@pytest.fixture
def key_file(tmp_path):
    path = tmp_path / "peers.key"
    path.touch(0o600)
    path.write_bytes(b"k" * 32)
    return path


@pytest.fixture
def start(key_file):
    """Factory of engines that are served at `here`, and read from all `others`."""
    with ExitStack() as running:

        def make(path, here, others, **config):
            key = f"key_file={key_file}"
            config = {"dtype": "float32", "store": f"peer://{','.join(others)}?{key}", **config}
            options = {**OPTIONS, "serve": f"{here}?{key}"}
            return running.enter_context(EngineProcess(path, connector_options=options, **config))

        yield make


def local_addresses(count):
    return [f"{LOCALHOST}:{port}" for port in free_ports(count)]


def single(path, prompts, dtype="float32", **config):
    """What one engine says: computing all, and by its own prefix hit."""
    wanted = SamplingParams(
        max_tokens=NUM_GENERATED, ignore_eos=True, return_logits=True, logprobs=20
    )
    with ThreadedLLM(path, dtype=dtype, **config) as llm:
        return llm.generate(prompts, wanted), llm.generate(prompts, wanted)


def difference(answer, own):
    """The largest of any logit of the first token, and of any log-probability of the others."""
    assert answer.token_ids == own.token_ids
    differences = [np.abs(answer.logits - own.first_logits).max()]
    for ours, theirs in zip(answer.logprobs, own.logprobs, strict=True):
        differences += [abs(ours[token] - theirs.top[token]) for token in ours & theirs.top.keys()]
    return max(differences)


def decode(decoder, prompts, prefilled):
    return decoder.ask(prompts, [each.params for each in prefilled], NUM_GENERATED)


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_two_prefill_and_two_decode(model_dir, start, arch):
    """kv heads: split evenly, in two windows, likewise with sinks, one latent. All four engines
    list the three others."""
    path, prompts = model_dir(arch), [prompt(NUM_TOKENS, seed=seed) for seed in range(4)]
    places = local_addresses(4)
    engines = [
        start(path, here, [each for each in places if each != here], **shape._asdict())
        for here, shape in zip(places, PREFILLS + DECODES, strict=True)
    ]
    cold, local = single(path, prompts)
    prefilled = [
        *engines[0].ask(prompts[:2], ASKED),
        *engines[1].ask(prompts[2:], ASKED),
    ]
    for decoder, shape in zip(engines[2:], DECODES, strict=True):
        answers = decode(decoder, prompts, prefilled)
        assert [each.num_external for each in answers] == [shape.hit] * 4
        for answer, *own in zip(answers, cold, local, strict=True):
            assert max(difference(answer, each) for each in own) <= MAX_DIFF
        counts = Counter(decoder.call("counts"))
        assert counts["hit_tokens/peer"] == 4 * shape.hit
        assert (counts["remote_prefills"], counts["remote_prefills_computed"]) == (4, 0)
        lines = [line for line in decoder.call("log") if "prefilled by another" in line]
        assert sorted(told(line, shape) for line in lines) == sorted(places[:2] * 2)


def told(line, shape):
    """The address in the line of a request, which says what came from whom at what rate. A decoder
    that was the first to read a chunk may be read, too."""
    found = re.fullmatch(
        r"request \S+, prefilled by another engine at (\S+), as the parameters say: of 230 tokens "
        r"((?:\d+ from peer 127\.0\.0\.1:\d+ at \d+\.\d{3} GB/s, )+)"
        rf"{230 - shape.hit} computed \(partial\)",
        line,
    )
    assert found, line
    assert sum(map(int, re.findall(r"(\d+) from", found[2]))) == shape.hit
    return found[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_in_bfloat16_a_handover_is_as_near_as_a_local_hit(model_dir, start, ranks):
    """From one rank to the bit. Two ranks round other sums, in a single engine, too."""
    path, prompts = model_dir(), [prompt(NUM_TOKENS, seed=seed) for seed in range(3)]
    one, other = local_addresses(2)
    shape = {"block_size": 32, "kv_layout": "NHD"}
    prefiller = start(path, one, [other], dtype="bfloat16", tensor_parallel_size=ranks)
    decoder = start(path, other, [one], dtype="bfloat16", **shape)
    _, local = single(path, prompts, dtype="bfloat16", **shape)
    _, of_ranks = single(path, prompts, dtype="bfloat16", tensor_parallel_size=ranks)
    answers = decode(decoder, prompts, prefiller.ask(prompts, ASKED))
    assert [each.num_external for each in answers] == [224] * 3
    rounding = max(
        np.abs(ours.first_logits - theirs.first_logits).max()
        for ours, theirs in zip(local, of_ranks, strict=True)
    )
    for answer, hit in zip(answers, local, strict=True):
        assert np.abs(answer.logits - hit.first_logits).max() <= 2 * rounding


@pytest.mark.filterwarnings("default:no network namespaces")
def test_across_two_networks(model_dir, start, key_file, tmp_path):
    """Each engine in a network of its own, and nothing but a cable between them; there and back.
    Who has another key gets nothing."""
    path = model_dir()
    prompts = [prompt(NUM_TOKENS, seed=seed) for seed in range(3)]
    (other_key := tmp_path / "other.key").write_bytes(b"o" * 32)
    other_key.chmod(0o600)
    with two_places() as places:
        # Other ports, too, for where both are on loopback.
        near, far = (
            f"{place.address}:{port}" for place, port in zip(places, free_ports(2), strict=True)
        )
        prefiller = start(path, near, [far], namespace=places[0].pid, **PREFILLS[0]._asdict())
        decoder = start(path, far, [near], namespace=places[1].pid, **DECODES[0]._asdict())
        cold, _ = single(path, prompts)
        prefilled = prefiller.ask(prompts[:2], ASKED)
        assert [each.params["remote_host"] for each in prefilled] == [places[0].address] * 2
        answers = decode(decoder, prompts[:2], prefilled)
        answers += decode(prefiller, prompts[2:], decoder.ask(prompts[2:], ASKED))
        hits = [DECODES[0].hit] * 2 + [PREFILLS[0].hit]
        assert [each.num_external for each in answers] == hits
        for answer, own in zip(answers, cold, strict=True):
            assert difference(answer, own) <= MAX_DIFF
        with EngineProcess(
            path,
            namespace=places[1].pid,
            store=f"peer://{near}?key_file={other_key}",
            connector_options={**OPTIONS, "load_timeout_seconds": 0.5},
        ) as stranger:
            (answer,) = decode(stranger, prompts[:1], prefilled[:1])
            assert answer.num_external == 0
            assert difference(answer, cold[0]) <= MAX_DIFF
        assert Counter(prefiller.call("counts"))["peer_refused"] > 0
        if places[0].pid is not None:
            pids = ["self", prefiller.process.pid, decoder.process.pid]
            assert len({os.readlink(f"/proc/{pid}/ns/net") for pid in pids}) == 3
