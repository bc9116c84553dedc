"""The reader of prompts as clients send them: what decides the tokens is rendered, or refused by
name."""

from __future__ import annotations

import json
import shutil
from datetime import datetime

import pytest
from transformers import AutoTokenizer

from kvferry.cli import body as reader
from kvferry.cli.body import OF_ANSWER, encode, read_prompt
from kvferry.cli.prompts import model_identity
from kvferry.errors import ConfigError
from kvferry.keys import Namespace
from kvferry.types import ExtraKeys
from tests.cli.test_explain import GROUP, put_prompt
from tests.cli.test_warm import serving

TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}{% if mode %}M{{ mode }}{% endif %}"
    "{% for d in documents or [] %}D{{ d.text }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}{{ m.name or '' }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}C{{ c.function.arguments | tojson }}{% endfor %}"
    "{{ m.reasoning_content or '' }}{% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)
DATED = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
OF_PARTS = (
    "{% for m in messages %}{% generation %}{% for p in m.content %}[{{ p.text }}]{% endfor %}"
    "{% endgeneration %}{% endfor %}"
)
USER = {"role": "user", "content": "hello there"}
TOOL = {
    "type": "function",
    "function": {"name": "t", "description": "d", "parameters": {"type": "object"}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "t", "arguments": '{"q": 1}'}}


@pytest.fixture
def tokenizer(model_dir):
    found = AutoTokenizer.from_pretrained(model_dir)
    found.chat_template = TEMPLATE
    return found


def text_of(tokenizer, value, *, raw=False, day=None) -> str:
    return tokenizer.decode(encode(tokenizer, read_prompt(value), raw=raw, day=day))


@pytest.mark.parametrize(
    ("body", "rendered"),
    [
        ("hello there", "<user>hello there<answer>"),
        ({"prompt": "hello there"}, "<user>hello there<answer>"),
        ({"messages": [USER]}, "<user>hello there<answer>"),
        ({"messages": [{**USER, "name": "Jo"}]}, "<userJo>hello there<answer>"),
        ({"messages": [{"role": "system", "content": "be"}, USER]},
         "<system>be<user>hello there<answer>"),
        ({"messages": [USER], "tools": [TOOL]},
         'T[{"type": "function", "function": {"name": "t", "description": "d", '
         '"parameters": {"type": "object"}}}]<user>hello there<answer>'),
        ({"messages": [USER], "tools": [{"function": {"description": "d", "name": "t"}}]},
         'T[{"type": "function", "function": {"name": "t", "description": "d", '
         '"parameters": null}}]<user>hello there<answer>'),
        ({"messages": [USER], "tools": []}, "<user>hello there<answer>"),
        ({"messages": [USER], "documents": [{"title": "a", "text": "b"}]},
         "Db<user>hello there<answer>"),
        ({"messages": [USER], "chat_template_kwargs": {"mode": "x"}},
         "Mx<user>hello there<answer>"),
        ({"messages": [USER], "chat_template": "{{ reasoning_effort }}{{ enable_thinking }}",
          "reasoning_effort": "low"}, "lowTrue"),
        ({"messages": [USER], "add_generation_prompt": False}, "<user>hello there"),
        ({"messages": [USER, {"role": "assistant", "content": "well"}],
          "continue_final_message": True}, "<user>hello there<assistant>well"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]},
         "<user>a\nb<answer>"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]},
                       {"role": "tool", "content": "none", "tool_call_id": "1"}]},
         '<assistant>C{"q": 1}<tool>none<answer>'),
        ({"messages": [{"role": "assistant", "content": "a", "reasoning": "b", "refusal": None}]},
         "<assistant>ab<answer>"),
        ({"messages": [USER], "chat_template": OF_PARTS}, "[hello there]"),
        ({"messages": [USER], "temperature": 0.7, "max_tokens": 5, "stream": True, "n": 2,
          "stop": ["x"], "seed": 3, "user": "me", "logit_bias": {}}, "<user>hello there<answer>"),
    ],
)  # fmt: skip
def test_what_decides_the_tokens_is_rendered(tokenizer, body, rendered):
    assert text_of(tokenizer, body) == rendered


def test_ids_raw_texts_and_texts_without_a_template_are_taken_as_they_are(tokenizer):
    assert encode(None, read_prompt([5, 6, 7]), raw=False, day=None) == [5, 6, 7]
    assert encode(None, read_prompt({"prompt": [5, 6]}), raw=False, day=None) == [5, 6]
    assert text_of(tokenizer, "hello there", raw=True) == "hello there"
    tokenizer.chat_template = None
    assert text_of(tokenizer, "hello there") == "hello there"
    with pytest.raises(ConfigError, match="no tokenizer"):
        encode(None, read_prompt("a"), raw=True, day=None)
    with pytest.raises(ConfigError, match="no chat template"):
        text_of(tokenizer, {"messages": [USER]})


def test_a_template_that_prints_the_date_gets_the_date_that_is_given(tokenizer):
    tokenizer.chat_template = DATED
    day = datetime(2026, 1, 31)
    assert text_of(tokenizer, {"messages": [USER]}, day=day).startswith("31 Jan 2026<user>")
    assert reader.prints_date(tokenizer, read_prompt("a"))
    tokenizer.chat_template = TEMPLATE
    assert not reader.prints_date(tokenizer, read_prompt("a"))


CHAT = {"messages": [USER]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({**CHAT, "toolz": []}, "unknown key 'toolz'; did you mean 'tools'?"),
        ({**CHAT, "temprature": 1}, "did you mean 'temperature'?"),
        ({**CHAT, "extra_body": {}}, "unknown key 'extra_body'; known: "),
        ({**CHAT, "mm_processor_kwargs": {}}, "'mm_processor_kwargs'"),
        ({**CHAT, "truncate_prompt_tokens": 5}, "'truncate_prompt_tokens'"),
        ({"messages": [{**USER, "contents": "x"}]}, "did you mean 'content'?"),
        ({"messages": [{**USER, "function_call": {}}]}, "'function_call'"),
        ({"messages": [{"content": "x"}]}, "a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "'image_url'"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}]},
         "unknown key of a part 'x'"),
        ({**CHAT, "tools": [{**TOOL, "kind": 1}]}, "unknown key of a tool 'kind'"),
        ({**CHAT, "tools": [{"function": {"name": "t", "paramters": {}}}]},
         "did you mean 'parameters'?"),
        ({**CHAT, "tools": {}}, "'tools' must be a list"),
        ({**CHAT, "documents": ["a"]}, "a document must be an object"),
        ({**CHAT, "chat_template_kwargs": {"tokenize": True}}, "cannot set 'tokenize'"),
        ({**CHAT, "add_generation_prompt": 1}, "must be true or false"),
        ({**CHAT, "continue_final_message": True, "add_generation_prompt": True}, "to be false"),
        ({**CHAT, "cache_salt": 5}, "'cache_salt' must be a text"),
        ({**CHAT, "prompt": "a"}, "give one of them"),
        ({"prompt": "a", "tools": [TOOL]}, "'tools' goes with messages"),
        ({"temperature": 0}, "no prompt"),
        ({}, "no prompt"),
        (None, "no prompt"),
    ],
)  # fmt: skip
def test_any_other_key_is_refused_by_name(body, says):
    with pytest.raises(ConfigError) as refused:
        read_prompt(body)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_no_name_is_in_two_lists():
    assert not OF_ANSWER & set(reader._OF_PROMPT)


# -- in the commands ------------------------------------------------------------------------------

COMMANDS = {
    "explain": [],
    "pin": ["--until", "1h"],
    "copy": [],
    "rm": ["--yes"],
}


@pytest.fixture
def chat_model(model_dir, tmp_path):
    directory = tmp_path / "served"
    shutil.copytree(model_dir, directory)
    (directory / "chat_template.jinja").write_text(DATED)
    return directory


@pytest.mark.parametrize("command", COMMANDS)
def test_a_chat_of_yesterday_is_found_by_every_command(run, chat_model, url, tmp_path, command):
    """With its system message, its tools, its salt and its date; without any of them it is not."""
    body = {
        "messages": [{"role": "system", "content": "be kind"}, USER], "tools": [TOOL],
        "cache_salt": "s", "model": "org/Served", "temperature": 0,
    }  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(chat_model)
    day = datetime(2026, 1, 31)
    ids = encode(tokenizer, read_prompt(body), raw=False, day=day)
    space = Namespace.of(model_identity(chat_model), (GROUP,), 7)
    put_prompt(url, space, ids, ExtraKeys(cache_salt="s"))
    num_records = len(ids) // 7
    chat = tmp_path / "chat.json"
    given = [command, f"{url}?max_bytes=1GiB" if command == "pin" else url]
    given += [(tmp_path / "copy").as_uri()] if command == "copy" else []
    given += ["--model", chat_model, "--chat", chat, *COMMANDS[command], "--json", "-"]

    def found(value: dict, *options: str) -> int:
        chat.write_text(json.dumps(value))
        ran = run(*given, *options)
        result = json.loads(ran.out)
        if command == "explain":
            return result["hit_tokens"] // 7
        assert ran.code == (0 if result["records"] else 1), ran
        return result["records"]

    of_day = "--date", "2026-01-31"
    for left_out, most in (("tools", 2), ("cache_salt", 0)):
        assert found({k: v for k, v in body.items() if k != left_out}, *of_day) <= most
    chat.write_text(json.dumps(body))
    ran = run(*given)
    assert "give --date" in " ".join((ran.out + ran.err).split())
    assert found(body, *of_day) >= num_records - 2 > 9  # of whole blocks; and some are removed
    chat.write_text(json.dumps({**body, "model": "an-adapter"}))
    ran = run(*given, *of_day)
    assert (ran.code, "asks for model 'an-adapter'" in ran.error_line) == (2, True)
    chat.write_text(json.dumps({**body, "toolz": 1}))
    assert "unknown key 'toolz'" in run(*given).error_line


def test_a_server_gets_all_but_what_steers_the_answer(run, tmp_path):
    """Also what is not known here: the server refuses what it does not know."""
    body = {
        "messages": [USER], "tools": [TOOL], "documents": [{"text": "a"}], "cache_salt": "s",
        "chat_template_kwargs": {"mode": "x"}, "model": "an-adapter", "of_its_own": {"a": 1},
        "stream": True, "n": 4, "max_completion_tokens": 99, "min_tokens": 9, "temperature": 1,
    }  # fmt: skip
    prompts = tmp_path / "prompts"
    prompts.write_text(json.dumps(body))
    with serving() as (place, asked):
        assert run("warm", "--openai", place, "--prompts", prompts).code == 0
        ran = run("warm", "m", "--openai", place, "--prompts", prompts)
        assert (ran.code, "it asks for model 'an-adapter'" in ran.error_line) == (2, True)
    kept = {name: each for name, each in body.items() if name not in OF_ANSWER}
    assert set(body) - set(kept) == {"stream", "n", "max_completion_tokens", "min_tokens",
                                     "temperature"}  # fmt: skip
    assert asked == [("/v1/chat/completions", {**kept, "max_tokens": 1, "temperature": 0})]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({**CHAT, "cache_salt": "s"}, "the embedded engine has no cache_salt"),
        ({**CHAT, "model": "other"}, "asks for model 'other'"),
        ({**CHAT, "toolz": 1}, "unknown key 'toolz'"),
    ],
)
def test_warm_refuses_what_would_have_other_keys(run, model_dir, url, tmp_path, body, says):
    (prompts := tmp_path / "prompts").write_text(f"[1]\n{json.dumps(body)}\n")
    ran = run("warm", model_dir, "--store", url, "--prompts", prompts)
    assert (ran.code, "line 2: " in ran.error_line, says in ran.error_line) == (2, True, True)


def test_warm_without_a_prompt_found_nothing(run, model_dir, url, tmp_path):
    (prompts := tmp_path / "prompts").write_text("\n\n")
    ran = run("warm", model_dir, "--store", url, "--prompts", prompts)
    assert (ran.code, "has no prompts" in ran.error_line) == (1, True)
