"""Options of single requests in the embedded engine."""

from __future__ import annotations

import json

import pytest

from kvferry.engine import LLM, SamplingParams
from kvferry.errors import ConfigError
from kvferry.store.url import open_one
from kvferry.testing.models import make_tiny_model
from tests.engine.test_llm import prompt


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def asked(**options):
    return SamplingParams(max_tokens=2, ignore_eos=True, kvferry=options)


def test_each_request_of_a_batch_has_options_of_its_own(model, tmp_path):
    url = f"{(tmp_path / 'store').as_uri()}?max_bytes=1GiB"
    options = {"chunk_tokens": 16, "audit": "off"}
    with LLM(model, store=url, connector_options=options) as llm:
        private, kept = prompt(40, seed=1), prompt(40, seed=2)
        llm.generate([private, kept], [asked(store=False), asked(pin=3600)])
        assert llm.drain(60.0)
    with open_one(url) as store:
        assert store.wait_indexed(60.0)
        assert [entry.pinned_until > 0 for entry in store.catalogue().scan()] == [True, True]
    with LLM(model, store=url, connector_options=options) as llm:
        limited = SamplingParams(kv_transfer_params={"kvferry": {"max_load_tokens": 16}})
        answers = []
        for tokens, params in (
            (private, asked(explain=True)),
            (kept, asked(explain=True)),
            (kept, asked(explain=True, load=False)),
            (kept, limited),
        ):
            answers += llm.generate([tokens], params)
            llm.reset_prefix_cache()
    reasons = [each.params and each.params["kvferry"]["miss_reason"] for each in answers]
    assert reasons == ["absent", "partial", "not_loading", None]
    assert answers[1].params["kvferry"]["hit_tokens"] == 32
    assert [each.num_external_tokens for each in answers] == [0, 32, 0, 16]
    json.dumps([each.params for each in answers])


@pytest.mark.parametrize(
    ("options", "says"),
    [({"stor": 1}, "did you mean 'store'"), ({"pin": 1e9}, "pin"), ([], "not an object")],
)
def test_wrong_options_are_refused_before_anything_runs(options, says):
    for given in ({"kvferry": options}, {"kv_transfer_params": {"kvferry": options}}):
        with pytest.raises(ConfigError, match=says):
            SamplingParams(**given)
    assert issubclass(ConfigError, ValueError)


def test_an_aborted_prefill_has_no_answer(model, tmp_path):
    wanted = SamplingParams(max_tokens=30, kv_transfer_params={"do_remote_decode": True})
    with LLM(model, store=f"file://{tmp_path / 'store'}") as llm:
        events = llm.stream(prompt(40, seed=5), wanted)
        next(events)
        (request,) = llm.scheduler.requests
        events.close()
        assert request.outcome.params is None
