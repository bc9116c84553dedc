"""One prompt as a client sends it: a text, token ids, or the JSON body of a request.

Every command that takes prompts reads them here. A chat becomes text as vLLM's server does it:
parts of a content are joined by line breaks unless the template goes through them, and the
arguments of tool calls are parsed. What decides the tokens or keys of a request is honoured, or
refused by name; what steers only the answer is known and left out; any other name is refused.
"""

from __future__ import annotations

import difflib
import json as json_module
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from kvferry.config import unknown
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue

Message = dict[str, Any]

_RENDERED = (
    "tools", "documents", "chat_template", "chat_template_kwargs", "reasoning_effort",
    "add_generation_prompt", "continue_final_message", "add_special_tokens",
)  # fmt: skip
"""What decides how a chat is rendered, besides its messages."""

_OF_PROMPT = ("messages", "prompt", *_RENDERED, "cache_salt", "model")
"""What decides the tokens and keys of a request, as far as commands can honour it."""

OF_ANSWER = frozenset({
    "allowed_token_ids", "bad_words", "best_of", "echo", "frequency_penalty", "guided_choice",
    "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex", "ignore_eos",
    "include_reasoning", "include_stop_str_in_output", "kv_transfer_params", "length_penalty",
    "logit_bias", "logprob_token_ids", "logprobs", "max_completion_tokens", "max_tokens",
    "metadata", "min_p", "min_tokens", "n", "parallel_tool_calls", "presence_penalty", "priority",
    "prompt_logprobs", "repetition_detection", "repetition_penalty", "request_id",
    "response_format", "return_prompt_text", "return_token_ids", "return_token_offsets",
    "return_tokens_as_token_ids", "safety_identifier", "seed", "service_tier", "session_id",
    "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids", "store",
    "stream", "stream_interval", "stream_options", "structured_outputs", "temperature",
    "thinking_token_budget", "tool_choice", "top_k", "top_logprobs", "top_p", "use_beam_search",
    "user", "verbosity", "watermarking",
})  # fmt: skip
"""What steers the answer alone, or says where KV goes, but not under which keys."""

_OF_MESSAGE = (
    "role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content",
)  # fmt: skip
_EMPTY_OF_MESSAGE = ("annotations", "audio", "function_call", "refusal")
"""What OpenAI's client writes into the messages of an answer. Only null says nothing."""

_OF_TEMPLATE_CALL = frozenset({
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents",
    "messages", "tokenize", "tools",
})  # fmt: skip
"""Names that `chat_template_kwargs` cannot take from the body itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What one request computes.

    Attributes:
        content: a text, token ids, or the messages of a chat.
        arguments: what the chat template gets besides the messages, by name.
        has_special: whether the tokenizer adds special tokens to a rendered chat.
        salt: the request's cache salt; None: it has none.
        model: name by which the client asks for the model, or for an adapter; None: it has none.
        body: what a server is to get: the body as it was given, without what steers the answer.
    """

    content: str | list[int] | list[Message]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    has_special: bool = False
    salt: str | None = None
    model: str | None = None
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.content, list) and isinstance(self.content[0], dict)

    @property
    def is_rendered(self) -> bool:
        """Whether a chat template may make its tokens."""
        return self.is_chat or isinstance(self.content, str)


def read_prompt(value: JsonValue, *, renders: bool = True) -> Prompt:
    """Read one prompt: a JSON text, a list of token ids, or an object with one of these as
    `prompt`, or with `messages`.

    Args:
        renders: whether its text is rendered here. Else a server renders it, and it also gets names
            that are not known here.

    Raises:
        ConfigError: it is none, or has a key that decides the prompt and is not known.
    """
    if not isinstance(value, Mapping):
        return Prompt(content=_text_or_ids(value), body={"prompt": value})
    if "messages" in value and "prompt" in value:
        raise ConfigError("messages and a prompt; give one of them")
    if renders:
        _refuse_unknown("key", value, _OF_PROMPT, OF_ANSWER)
    body = {name: each for name, each in value.items() if name not in OF_ANSWER}
    salt, model = (_text_at(value, name) for name in ("cache_salt", "model"))
    if "messages" not in value:
        if renders and (extra := [name for name in _RENDERED if value.get(name) is not None]):
            raise ConfigError(f"{extra[0]!r} goes with messages, not with a prompt")
        content = _text_or_ids(value.get("prompt"))
        return Prompt(content=content, salt=salt, model=model, body=body)
    given = value["messages"]
    if not isinstance(given, list) or not given:
        raise ConfigError("messages must be a list of objects with a role and a content")
    messages = [_object("a message", each) for each in given]
    if not renders:
        return Prompt(content=messages, salt=salt, model=model, body=body)
    return Prompt(
        content=[_message(each) for each in messages],
        arguments=_arguments(value),
        has_special=_flag(value, "add_special_tokens", default=False),
        salt=salt,
        model=model,
        body=body,
    )


def encode(tokenizer: Any, prompt: Prompt, *, raw: bool, day: datetime | None) -> list[int]:  # noqa: ANN401 - a host's
    """Return the token ids of a prompt.

    Args:
        tokenizer: of the model; None if it has none, which is enough for token ids.
        raw: whether a text is taken as it is; else it is a user's message.
        day: the time that a template which prints the date is given; None: now.

    Raises:
        ConfigError: there is no tokenizer or template, or the template cannot be rendered.
    """
    from kvferry.engine.model import encode_chat, goes_through_parts

    content = prompt.content
    if not isinstance(content, str) and not prompt.is_chat:
        return [each for each in content if isinstance(each, int)]
    if tokenizer is None:
        raise ConfigError("the model directory has no tokenizer; give prompts as token ids")
    if isinstance(content, str):
        if raw or not tokenizer.chat_template:
            return list(tokenizer(content, verbose=False)["input_ids"])
        content = [{"role": "user", "content": content}]
    messages = [each for each in content if isinstance(each, dict)]
    template = _template(tokenizer, prompt)
    if template and day is not None:
        template = _of_day(template, day)
    as_parts = goes_through_parts(template)
    messages = [_with_content(each, as_parts=as_parts) for each in messages]
    arguments = {**prompt.arguments, "chat_template": template or None}
    return encode_chat(tokenizer, messages, arguments, has_special=prompt.has_special)


def prints_date(tokenizer: Any, prompt: Prompt) -> bool:  # noqa: ANN401 - a host's
    """Whether the chat template asks for the time, so that another day has other tokens."""
    return prompt.is_rendered and _CLOCK.search(_template(tokenizer, prompt)) is not None


# -- parts of a body ------------------------------------------------------------------------------


def _refuse_unknown(
    what: str, value: Mapping[str, Any], known: Iterable[str], harmless: Iterable[str] = ()
) -> None:
    for name in value:
        if name not in known and name not in harmless:
            # All harmless names would hide the few that decide.
            near = difflib.get_close_matches(str(name).lower(), harmless, n=1)
            raise ConfigError(unknown(what, name, [*known, *near]))


def _text_or_ids(value: object) -> str | list[int]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        ids = [each for each in value if type(each) is int]
        if len(ids) == len(value):
            return ids
    raise ConfigError(
        'no prompt; write a text, a list of token ids, or {"prompt": ...} or {"messages": [...]}'
    )


def _typed(value: Mapping[str, Any], name: str, kind: type, what: str) -> Any:  # noqa: ANN401 - of `kind`
    """Return what a body has under a name, which must be of a type; None if it is absent or null.
    Raises ConfigError."""
    found = value.get(name)
    if found is not None and not isinstance(found, kind):
        raise ConfigError(f"{name!r} must be {what}")
    return found


def _text_at(value: Mapping[str, Any], name: str) -> str | None:
    found: str | None = _typed(value, name, str, "a text")
    return found


def _flag(value: Mapping[str, Any], name: str, *, default: bool) -> bool:
    found = _typed(value, name, bool, "true or false")
    return default if found is None else found is True


def _object(what: str, value: object) -> Message:
    if not isinstance(value, dict):
        raise ConfigError(f"{what} must be an object")
    return value


def _arguments(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the template gets besides messages, as vLLM's server gives it. Raises
    ConfigError."""
    given: dict[str, Any] = _typed(value, "chat_template_kwargs", dict, "an object") or {}
    if taken := sorted(_OF_TEMPLATE_CALL.intersection(given)):
        raise ConfigError(f"chat_template_kwargs cannot set {taken[0]!r}")
    arguments = dict(given)
    effort = _text_at(value, "reasoning_effort")
    if effort is not None:
        arguments = {"enable_thinking": effort != "none", **arguments, "reasoning_effort": effort}
    goes_on = _flag(value, "continue_final_message", default=False)
    begins = _flag(value, "add_generation_prompt", default=not goes_on)
    if goes_on and begins:
        raise ConfigError("continue_final_message needs add_generation_prompt to be false")
    arguments |= {"add_generation_prompt": begins, "continue_final_message": goes_on}
    template = _text_at(value, "chat_template")
    if template is not None:
        arguments["chat_template"] = template
    tools = _typed(value, "tools", list, "a list of objects")
    if tools:
        arguments["tools"] = [_tool(each) for each in tools]
    documents = _typed(value, "documents", list, "a list of objects")
    if documents:
        arguments["documents"] = [_object("a document", each) for each in documents]
    return arguments


def _tool(value: object) -> Message:
    tool = _object("a tool", value)
    _refuse_unknown("key of a tool", tool, ("type", "function"))
    function = _object("the function of a tool", tool.get("function"))
    known = ("name", "description", "parameters", "strict")
    _refuse_unknown("key of a function", function, known)
    # The server writes the keys in this order, and strict only if it was given.
    names = known if function.get("strict") is not None else known[:3]
    return {"type": tool.get("type", "function"), "function": {n: function.get(n) for n in names}}


def _message(message: Message) -> Message:
    empty = [name for name in _EMPTY_OF_MESSAGE if message.get(name) is None]
    _refuse_unknown("key of a message", message, _OF_MESSAGE, empty)
    if not isinstance(message.get("role"), str):
        raise ConfigError("a message must have a role, which is a text")
    found: Message = {"role": message["role"], "content": _parts(message.get("content"))}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        text = _text_at(message, name)
        if text is not None:
            found[name] = text
    if "reasoning" in found:  # as the server has it, for templates of either name
        found["reasoning_content"] = found["reasoning"]
    calls = _typed(message, "tool_calls", list, "a list of objects")
    if calls:
        found["tool_calls"] = [_call(each) for each in calls]
    return found


def _parts(content: object) -> list[str]:
    """Return the texts of a content. Raises ConfigError for anything but text."""
    if content is None or isinstance(content, str):
        return [] if content is None else [content]
    if not isinstance(content, list):
        raise ConfigError("the content of a message must be a text, or a list of parts")
    texts = []
    for each in content:
        if isinstance(each, str):
            texts.append(each)
            continue
        part = _object("a part of a content", each)
        kind = part.get("type")
        if kind not in ("text", "input_text", "output_text") or not isinstance(
            part.get("text"), str
        ):
            raise ConfigError(f"a part of the type {kind!r} has keys of its own; only text is read")
        _refuse_unknown("key of a part", part, ("type", "text"))
        texts.append(part["text"])
    return texts


def _call(value: object) -> Message:
    call = _object("a tool call", value)
    function = _object("the function of a tool call", call.get("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json_module.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    parsed = arguments if isinstance(arguments, dict) else {}
    return {**call, "function": {**function, "arguments": parsed}}


# -- templates ------------------------------------------------------------------------------------


def _with_content(message: Message, *, as_parts: bool) -> Message:
    content = message["content"]
    texts = [content] if isinstance(content, str) else content
    if as_parts and message["role"] != "tool":
        return {**message, "content": [{"type": "text", "text": each} for each in texts]}
    return {**message, "content": "\n".join(texts)}


_CLOCK = re.compile(r"""strftime_now\(\s*(?:(['"])(?P<form>.*?)\1\s*\))?""")


def _template(tokenizer: Any, prompt: Prompt) -> str:  # noqa: ANN401 - a host's
    """Return the text of the chat template that a prompt gets; empty if there is none."""
    given = prompt.arguments.get("chat_template")
    if not (tokenizer.chat_template or given):
        return ""
    return str(tokenizer.get_chat_template(given, prompt.arguments.get("tools")))


def _of_day(template: str, day: datetime) -> str:
    """Write the date into a template in place of its questions for the time. (Transformers gives a
    template no function but its own.) Raises ConfigError where the form of the date is no text."""

    def dated(found: re.Match[str]) -> str:
        if found["form"] is None:
            raise ConfigError("the chat template computes the form of its date: give --tokens FILE")
        return repr(day.strftime(found["form"]))

    return _CLOCK.sub(dated, template)
