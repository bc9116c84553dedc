"""Prefillers and decoders that are killed, stopped, cut off or silent at any instant, and clients
that go: every other request ends right, those that it concerns are computed, and nothing is left.

The engines are processes, and what is between them is a connection through a proxy.
"""

from __future__ import annotations

import itertools
import random
import signal
import socket
import statistics
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

from kvferry.engine import LLM, SamplingParams
from tests.engine.engine_process import ASKED, EngineProcess
from tests.engine.test_llm import prompt
from tests.engine.test_prefill_decode import MAX_DIFF, difference
from tests.servers.process import LOCALHOST, free_ports, let_run
from tests.servers.proxy import running_proxy

pytestmark = pytest.mark.slow

NUM_TOKENS, CHUNK_TOKENS, STEP_TOKENS, HIT = 230, 32, 64, 224
WAITING = {"do_remote_prefill": True}
"""Of a request that comes before the prefiller has answered."""

LOAD_SECONDS = 0.5
SLACK_SECONDS = 30.0
"""Tells late from for ever."""

BUSY_SECONDS = 4.0
"""What a busy machine adds in most cases."""

BACK_SECONDS = 60.0
FAULTS = ["killed", "stopped", "cut", "silent"]


def let_run_briefly(chance):
    """For up to a tenth of a second, mostly much less: all is over within some hundredths."""
    let_run(10 ** chance.uniform(-4, -1))


def instants(few):
    """How many failures of each kind there are."""
    marks = [pytest.mark.sweep, pytest.mark.timeout(3000)]
    return [
        pytest.param(few, id=f"{few} of a kind"),
        pytest.param(100, id="100 of a kind", marks=marks),
    ]


class Engines:
    """A prefiller at a fixed port, which needs four steps for a prompt, and a decoder that reaches
    it through a proxy.

    Attributes:
        num_handed: requests of the decoder that another engine prefills.
    """

    def __init__(self, path, key_file, stack):
        self._stack, self._path, self._key_file = stack, path, key_file
        (self._port,) = free_ports(1)
        self.proxy = stack.enter_context(running_proxy(self._port))
        self._cold = stack.enter_context(LLM(path))
        self._seeds = itertools.count(1)
        self._expected = {}
        self.num_handed = 0
        self.prefiller = self.start_prefiller()
        self.decoder = self.start_decoder()

    def _start(self, store, **options):
        options = {"chunk_tokens": CHUNK_TOKENS, "audit": "off", **options}
        options["load_timeout_seconds"] = LOAD_SECONDS
        engine = EngineProcess(
            self._path,
            store=store,
            connector_options=options,
            prefix_caching=False,
            max_batched_tokens=STEP_TOKENS,
        )
        return self._stack.enter_context(engine)

    def start_prefiller(self):
        """At the same port each time. It has no store of its own but one that never answers."""
        key = f"key_file={self._key_file}"
        return self._start(f"peer://{LOCALHOST}:1?{key}", serve=f"{LOCALHOST}:{self._port}?{key}")

    def start_decoder(self):
        return self._start(f"peer://{LOCALHOST}:{self.proxy.port}?key_file={self._key_file}")

    def new_prompts(self, count):
        return [prompt(NUM_TOKENS, seed=next(self._seeds)) for _ in range(count)]

    def begin(self, prompts, params):
        self.num_handed += sum(each is not None for each in params)
        self.decoder.send("ask", prompts, params, 2)

    def end(self, prompts):
        """Hits of what was begun, all of it right."""
        return self.check(prompts, self.decoder.receive())

    def check(self, prompts, answers):
        wanted = SamplingParams(max_tokens=2, ignore_eos=True, return_logits=True, logprobs=20)
        for answer, own in zip(answers, self._cold.generate(prompts, wanted), strict=True):
            num, said = len(answer.token_ids), own.logprobs
            same = replace(own, token_ids=own.token_ids[:num], logprobs=said[:num])
            assert difference(answer, same) <= MAX_DIFF
        return [answer.num_external for answer in answers]

    def wait_used(self):
        """Until what the prefiller computes is read again."""
        until = time.monotonic() + BACK_SECONDS
        while True:
            prompts = self.new_prompts(1)
            (prefilled,) = self.prefiller.ask(prompts, ASKED)
            self.begin(prompts, [prefilled.params])
            if self.end(prompts) == [HIT]:
                return
            assert time.monotonic() < until, "the prefiller is not read again"


@pytest.fixture
def engines(model_dir, tmp_path):
    path = tmp_path / "peers.key"
    path.touch(0o600)
    path.write_bytes(b"k" * 32)
    with ExitStack() as stack:
        yield Engines(model_dir(), path, stack)


def has_answered(engine):
    """Whether an engine that was killed had answered before."""
    try:
        engine.receive()
    except (EOFError, OSError):
        return False
    return True


def lines(engine, text):
    return [line for line in engine.call("log") if text in line]


def break_prefiller(engines, kind):
    match kind:
        case "killed":
            engines.prefiller.kill()
        case "stopped":
            engines.prefiller.signal(signal.SIGSTOP)
        case "cut":
            engines.proxy.refuse()
        case "silent":
            engines.proxy.black_hole()


def mend_prefiller(engines, kind):
    """The same engine, with the answer that is due, or another one at its port."""
    if kind == "killed":
        engines.prefiller = engines.start_prefiller().wait_ready()
        return
    if kind == "stopped":
        engines.prefiller.signal(signal.SIGCONT)
    engines.proxy.pass_all()
    engines.prefiller.receive()


@pytest.mark.slow
@pytest.mark.parametrize("count", instants(6))
def test_a_prefiller_that_fails_at_any_instant_costs_its_hits_only(engines, count):
    """Each time two prompts that it has, one that it is to compute meanwhile, and one of a client
    that no proxy sent."""
    chance, hits, seconds = random.Random(count), [], {kind: [] for kind in FAULTS}
    kinds = FAULTS * count
    chance.shuffle(kinds)
    for kind in kinds:
        engines.wait_used()
        prompts = engines.new_prompts(4)
        prefilled = engines.prefiller.ask(prompts[:2], ASKED)
        engines.begin(prompts, [*(each.params for each in prefilled), WAITING, None])
        engines.prefiller.send("ask", prompts[2:3], ASKED, 1)
        let_run_briefly(chance)
        break_prefiller(engines, kind)
        started = time.monotonic()
        found, took = engines.end(prompts)[:3], time.monotonic() - started
        assert took < LOAD_SECONDS + SLACK_SECONDS
        hits += found
        if min(found) < HIT:
            seconds[kind].append(took)
        mend_prefiller(engines, kind)
        assert engines.decoder.call("settled", SLACK_SECONDS) == (0, 0, 0)
    engines.wait_used()
    assert engines.prefiller.call("settled", SLACK_SECONDS) == (0, 0, 0)
    assert all(seconds.values()), "a kind of failure met nothing"
    assert statistics.median(itertools.chain(*seconds.values())) < LOAD_SECONDS + BUSY_SECONDS
    assert HIT in hits
    counts = engines.decoder.call("counts")
    assert counts["remote_prefills"] == engines.num_handed
    assert counts["remote_prefills_computed"] > 0
    assert len(lines(engines.decoder, "prefilled by another engine")) == engines.num_handed
    left, used = (len(lines(engines.decoder, text)) for text in ("not used until", "used again"))
    assert 1 <= left == used <= len(kinds)


@pytest.mark.slow
@pytest.mark.parametrize("count", instants(6))
def test_a_decoder_that_fails_at_any_instant_costs_the_prefiller_nothing(engines, count):
    chance, kinds, num_cut = random.Random(count), ["killed", "stopped"] * count, 0
    chance.shuffle(kinds)
    for kind in kinds:
        prompts = engines.new_prompts(3)
        prefilled = engines.prefiller.ask(prompts[:2], ASKED)
        engines.begin(prompts[:2], [each.params for each in prefilled])
        engines.prefiller.send("ask", prompts[2:], ASKED, 1)
        let_run_briefly(chance)
        engines.decoder.signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
        engines.check(prompts[2:], engines.prefiller.receive())
        engines.check(prompts[:1], engines.prefiller.ask(prompts[:1]))
        assert engines.prefiller.call("settled", SLACK_SECONDS)[:2] == (0, 0)
        if kind == "killed":
            engines.decoder.kill()
            num_cut += not has_answered(engines.decoder)
            engines.decoder = engines.start_decoder()
        else:
            engines.decoder.signal(signal.SIGCONT)
            engines.end(prompts[:2])
    engines.wait_used()
    assert num_cut, "no decoder was killed before it answered"
    # What is lent comes back with the end of its reader.
    assert engines.prefiller.call("settled", SLACK_SECONDS) == (0, 0, 0)
    assert lines(engines.prefiller, "a peer is refused") == []
    assert lines(engines.prefiller, "a connection of a peer failed") == []


def test_a_client_that_goes_in_any_step_leaves_nothing(engines):
    """At the prefiller and at the decoder; some go while it fetches, some while it generates."""
    engines.wait_used()
    has_run = 0
    for num_steps in (*range(8), 20):
        prompts = engines.new_prompts(2)
        (prefilled,) = engines.prefiller.ask(prompts[:1], ASKED)
        assert engines.decoder.call("abort", prompts[0], prefilled.params, num_steps)
        assert engines.decoder.call("abort", prompts[1], WAITING, num_steps)
        assert engines.prefiller.call("abort", prompts[1], ASKED, num_steps)
        for engine in (engines.prefiller, engines.decoder):
            assert engine.call("settled", SLACK_SECONDS) == (0, 0, 0)
        engines.begin(prompts[:1], [prefilled.params])
        has_run += engines.end(prompts[:1]) == [HIT]
    assert has_run >= 5, "hits are rare, so aborts met none"


WRITTEN = [
    {"remote_block_ids": []},
    {"remote_block_ids": "abc", "remote_engine_id": [1], "tp_size": "2"},
    {"remote_num_tokens": "9", "do_remote_decode": True},
    {"remote_num_tokens": -1, "remote_request_id": {}, "transfer_mode": 3},
    {"kvferry": {"v": 7}},
    {"kvferry": {"v": 1, "namespace": "0" * 16, "chunks": 7, "key": "00" * 32}},
    # Of NIXL's connector.
    {"remote_block_ids": [[3, 4, 5]], "remote_engine_id": "e", "remote_request_id": "r"},
]
"""Some of these end an engine with NIXL's connector."""


def test_parameters_that_a_client_wrote_open_nothing(engines):
    """They name an address where somebody listens, which no one comes to."""
    with socket.create_server((LOCALHOST, 0)) as stranger:
        address = {"remote_host": LOCALHOST, "remote_port": stranger.getsockname()[1]}
        named = [{"remote_prefiller": address}, {"remote_kv_source": address}]
        params = [{**WAITING, **address, **each} for each in WRITTEN] + named
        prompts = engines.new_prompts(len(params) + 1)
        (prefilled,) = engines.prefiller.ask(prompts[:1], ASKED)
        engines.begin(prompts, [{**prefilled.params, **address}, *params])
        # That of an engine with another address is found by its key.
        assert engines.end(prompts) == [HIT, *[0] * len(params)]
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()
    assert engines.decoder.call("settled", SLACK_SECONDS) == (0, 0, 0)
