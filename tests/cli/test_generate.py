"""`kvferry generate`: text on stdout, facts on stderr, reuse between runs."""

from __future__ import annotations

import io
import json
import sys

import pytest

from kvferry.testing.models import make_tiny_model
from tests.tokenizers import save_tiny_tokenizer

PROMPT = "the statement was executed, and " * 20


def test_the_second_run_reads_what_the_first_computed(run, model_dir, tmp_path):
    options = ["--store", (tmp_path / "store").as_uri(), "--chunk-tokens", 16, "--max-tokens", 4]
    cold = run("generate", model_dir, PROMPT, *options, "--json", tmp_path / "cold.json")
    for _ in range(30):  # an audit may cut the hit to nothing
        warm = run("generate", model_dir, PROMPT, *options, "--json", tmp_path / "warm.json")
        if " 0 read" not in warm.err:
            break
        assert "computed for an audit" in warm.err
    assert (cold.code, warm.code) == (0, 0)
    first, second = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("cold", "warm")
    )
    assert first["hit_tokens"] == 0
    # Whole chunks but for the last one, which is audited.
    assert second["hit_tokens"] == (second["prompt_tokens"] // 16 - 1) * 16
    assert second["text"] == first["text"]
    assert cold.out == warm.out == first["text"] + "\n"
    assert f"{second['hit_tokens']} read from the store" in warm.err


def test_a_prompt_from_stdin_or_a_file_is_the_same_prompt(run, model_dir, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))
    texts = {
        json.loads(run("generate", model_dir, *how, "--max-tokens", 3, "--json", "-").out)["text"]
        for how in ([PROMPT], ["-"], ["--prompt-file", tmp_path / "prompt.txt"])
    }
    assert len(texts) == 1


def test_prompts_are_recorded_for_simulate(run, model_dir, tmp_path):
    recording = tmp_path / "requests.jsonl"
    options = ["--store", (tmp_path / "store").as_uri(), "--max-tokens", 1, "--chunk-tokens", 16]
    for _ in range(2):
        assert run("generate", model_dir, PROMPT, *options, "--record", recording).code == 0
    ran = run("simulate", recording, "--sizes", 1000, "--json", "-")
    value = json.loads(ran.out)
    assert value["trace"]["requests"] == 2
    assert value["curve"][0]["lru"] == 0.5
    refused = run("generate", model_dir, PROMPT, "--record", recording)
    assert (refused.code, "needs --store" in refused.error_line) == (2, True)


@pytest.fixture(scope="module")
def chat_model_dir(tmp_path_factory):
    directory = make_tiny_model(tmp_path_factory.mktemp("chat"))
    save_tiny_tokenizer(directory)
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}reply:"
    (directory / "chat_template.jinja").write_text(template)
    return directory


def test_the_chat_template_of_a_model_is_applied_unless_raw_is_asked_for(
    run, model_dir, chat_model_dir
):
    def asked(directory, *options):
        ran = run("generate", directory, *options, "--max-tokens", 5, "--json", "-")
        assert ran.code == 0, ran.err
        value = json.loads(ran.out)
        return value["prompt_tokens"], value["text"]

    rendered = f"<s>user: {PROMPT}</s>reply:"
    assert asked(chat_model_dir, PROMPT) == asked(model_dir, rendered)
    assert asked(chat_model_dir, PROMPT, "--raw") == asked(model_dir, PROMPT)
    assert asked(chat_model_dir, PROMPT) != asked(model_dir, PROMPT)


def test_a_chat_template_that_is_wrong_is_refused_in_one_line(run, chat_model_dir):
    (chat_model_dir / "chat_template.jinja").write_text("{{ raise_exception('not for you') }}")
    assert "not for you" in run("generate", chat_model_dir, PROMPT).error_line
