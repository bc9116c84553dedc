from __future__ import annotations

import contextlib
import doctest
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvferry.config
from kvferry.cache.config import CacheConfig
from kvferry.config import build_config, format_size, parse_size, unknown
from kvferry.errors import ConfigError
from kvferry.store.kind import StoreUrl, shown_url
from kvferry.store.url import open_store, parse_store_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    threads: int
    ratio: float = 0.5
    create: bool = True
    title: str = ""
    mode: Literal["auto", "on", "off"] = "auto"
    level: Literal[1, 2] = 1
    max_bytes: int | None = field(default=None, metadata={"unit": "bytes"})
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"threads is {self.threads}; at least 1 is needed")


def build(**options):
    return build_config(Options, {"threads": "2"} | options, where="store X")


def refusal(call, *args, **kwargs):
    """The message of the ConfigError that `call` raises; always one line."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_examples_in_docstrings_are_true():
    result = doctest.testmod(kvferry.config)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1", 1),
        (37, 37),
        ("4096B", 4096),
        ("500MB", 500_000_000),
        ("10GiB", 10 * 2**30),
        ("10gib", 10 * 2**30),
        (" 3 KiB ", 3072),
        ("1.5 TiB", 3 * 2**39),
        ("1e9", 10**9),
        ("0.3B", 0),
        ("9223372036854775807", 2**63 - 1),
    ],
)
def test_sizes_are_read(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("-1", "negative"),
        (-4096, "negative"),
        ("", "10GiB"),
        ("GiB", "not a size"),
        ("ten", "not a size"),
        ("1,5GiB", "not a size"),
        ("0x10", "not a size"),
        ("1e999999999", "not a size"),
        ("1e60", "largest"),
        ("nan", "not a size"),
        ("inf", "not a size"),
        ("10G", "write gib (1024) or gb (1000)"),
        ("10 parsecs", "unknown unit 'parsecs'"),
        ("9223372036854775808", "largest"),
        ("٣", "not a size"),
        (True, "not a size"),
    ],
)
def test_what_is_no_size_is_refused_with_the_reason(text, part):
    message = refusal(parse_size, text)
    assert repr(text) in message
    assert part in message


@given(st.integers(0, 2**62))
def test_a_formatted_size_reads_back_to_one_part_in_ten(num_bytes):
    read = parse_size(format_size(num_bytes))
    assert abs(read - num_bytes) <= max(num_bytes * 0.06, 0)


@given(st.integers(1, 1023), st.sampled_from([2**0, 2**10, 2**20, 2**30, 2**40]))
def test_round_sizes_are_formatted_exactly(number, unit):
    assert parse_size(format_size(number * unit)) == number * unit


@given(st.text(max_size=20))
def test_any_text_is_a_size_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert parse_size(text) >= 0


def test_a_slip_is_met_with_the_nearest_name_and_others_with_all_names():
    known = ["max_bytes", "direct_io", "read_only"]
    for slip in ("max_byte", "MAX-BYTES"):
        assert unknown("option", slip, known) == (
            f"unknown option {slip!r}; did you mean 'max_bytes'?"
        )
    assert unknown("option", "zebra", known).endswith("known: direct_io, max_bytes, read_only")
    assert unknown("option", "x", []) == "unknown option 'x'; there are none"


def test_options_from_text_get_the_types_of_their_fields():
    options = build(
        ratio="0.25",
        create="no",
        title=" t ",
        mode="OFF",
        level="2",
        max_bytes="10GiB",
        deadline="1e-3",
    )
    assert options == Options(
        threads=2,
        ratio=0.25,
        create=False,
        title=" t ",
        mode="off",
        level=2,
        max_bytes=10 * 2**30,
        deadline=0.001,
    )
    assert type(options.level) is int


def test_options_that_have_their_type_pass():
    options = build(threads=3, max_bytes=None, create=True, ratio=1)
    assert (options.threads, options.max_bytes, options.create) == (3, None, True)
    assert type(options.ratio) is float
    assert build(max_bytes=1e9).max_bytes == 10**9
    assert build(max_bytes="none", deadline="None") == build()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"max_byte": "1"}, ["unknown option 'max_byte'", "'max_bytes'"]),
        ({"zebra": "1"}, ["known: create, deadline, level, max_bytes"]),
        ({3: "1"}, ["unknown option 3"]),
        ({"threads": "two"}, ["'threads'", "'two'", "whole number"]),
        ({"threads": 2.5}, ["'threads'", "2.5", "whole number"]),
        ({"threads": True}, ["'threads'", "True", "whole number"]),
        ({"threads": "0"}, ["threads is 0", "at least 1"]),
        ({"ratio": "nan"}, ["'ratio'", "finite"]),
        ({"ratio": "1e999"}, ["'ratio'", "finite"]),
        ({"ratio": 10**400}, ["'ratio'", "finite"]),
        ({"create": "maybe"}, ["'create'", "'maybe'", "true nor false"]),
        ({"create": 1}, ["'create'", "true nor false"]),
        ({"title": 5}, ["'title'", "not text"]),
        ({"mode": "of"}, ["'mode'", "'of'", "auto, on, off"]),
        ({"level": True}, ["'level'", "1, 2"]),
        ({"max_bytes": "lots"}, ["'max_bytes'", "'lots'", "10GiB"]),
        ({"max_bytes": -1}, ["'max_bytes'", "negative"]),
        ({"max_bytes": 0.5}, ["'max_bytes'", "whole number"]),
    ],
)
def test_unusable_options_name_place_option_value_and_what_is_allowed(options, parts):
    message = refusal(build_config, Options, {"threads": "2"} | options, where="store X")
    assert message.startswith("store X: ")
    for part in parts:
        assert part in message


def test_a_missing_option_is_named():
    assert refusal(build_config, Options, {}, where="here") == "here: option 'threads' is missing"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file:///var/cache/kv", StoreUrl(scheme="file", path="/var/cache/kv")),
        ("FILE:///a", StoreUrl(scheme="file", path="/a")),
        (
            "file:///a%3Fb/c%20d+e/?max_bytes=10GiB&direct_io=off",
            StoreUrl(
                scheme="file",
                path="/a?b/c d+e/",
                options={"max_bytes": "10GiB", "direct_io": "off"},
            ),
        ),
        ("memory://", StoreUrl(scheme="memory", path="")),
        (
            "memory://name?max_bytes=1MB",
            StoreUrl(scheme="memory", path="name", options={"max_bytes": "1MB"}),
        ),
    ],
)
def test_store_urls_are_taken_apart(url, expected):
    assert parse_store_url(url) == expected


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("/var/cache/kv", ["no scheme", "did you mean 'file:///var/cache/kv'?"]),
        ("cache/kv", ["no scheme", "file:///absolute/directory"]),
        ("", ["no scheme"]),
        ("file:/var/kv", ["did you mean 'file:///var/kv'?"]),
        ("file:kv", ["did you mean 'file:///kv'?"]),
        ("memory:name", ["did you mean 'memory://name'?"]),
        ("file://kv/x", ["'kv' stands where a host would", "'file:///kv/x'"]),
        ("file://localhost/x", ["'localhost'", "'file:///x'"]),
        ("file://~/kv", ["~ is not expanded"]),
        ("file://", ["names no directory"]),
        ("file:///", ["names no directory"]),
        ("file:///a%00b", ["zero byte"]),
        ("file:///a\nb", ["cannot be printed"]),
        ("file:///a#b", ["%23"]),
        ("fiel:///a", ["unknown scheme 'fiel'", "did you mean 'file'?"]),
        ("http://bucket", ["unknown scheme 'http'", "known: az, file, gs, memory"]),
        ("memory://a/b", ["holds no /"]),
        ("file:///a?max_bytes=1&max_bytes=2", ["'max_bytes' is given twice"]),
        ("file:///a?max_bytes", ["option 1 is not of the form name=value"]),
        ("file:///a?=1", ["name=value"]),
        ("file:///a?x=", ["name=value"]),
        ("file:///a?x=1&", ["name=value"]),
    ],
)
def test_unusable_urls_say_what_is_wrong_and_what_to_write(url, parts):
    message = refusal(parse_store_url, url)
    assert repr(shown_url(url)) in message
    for part in parts:
        assert part in message


def test_a_path_object_is_not_a_url():
    assert "text such as file:///" in refusal(parse_store_url, Path("/x"))


names = st.text(st.characters(exclude_categories=["C"], exclude_characters="/\0"), min_size=1)


@given(path=st.lists(names, min_size=1, max_size=4))
def test_a_url_put_together_reads_back(path):
    url = StoreUrl(scheme="file", path="/" + "/".join(path))
    assert parse_store_url(str(url)) == url


@given(st.text(max_size=40))
def test_any_text_is_a_url_or_a_config_error(text):
    with contextlib.suppress(ConfigError):
        assert parse_store_url(text).scheme in ("file", "memory")


def test_a_path_that_is_not_utf8_has_a_url_and_cannot_be_asked_for_by_it():
    url = str(StoreUrl(scheme="file", path="/caf\udce9"))
    assert url == "file:///caf%E9"
    with pytest.raises(ConfigError, match="not UTF-8"):
        parse_store_url(url)


@pytest.mark.parametrize(
    ("url", "expected", "shown"),
    [
        (
            "valkey://host",
            StoreUrl(scheme="valkey", path="", hosts=(("host", None),)),
            "valkey://host",
        ),
        (
            "REDISS://me:pa%3Fss%2Fw%40%25@Host-1.example:7000/a/kv%20/?cluster=true",
            StoreUrl(
                scheme="rediss",
                path="a/kv ",
                options={"cluster": "true"},
                hosts=(("Host-1.example", 7000),),
                username="me",
                password="pa?ss/w@%",
            ),
            "rediss://Host-1.example:7000/a/kv%20",
        ),
        (
            "redis://:secret@[::1]:1,10.0.0.1,b:2/kv",
            StoreUrl(
                scheme="redis",
                path="kv",
                hosts=(("::1", 1), ("10.0.0.1", None), ("b", 2)),
                password="secret",
            ),
            "redis://[::1]:1,10.0.0.1,b:2/kv",
        ),
    ],
)
def test_urls_of_servers_are_taken_apart_and_shown_without_credentials(url, expected, shown):
    parsed = parse_store_url(url)
    assert parsed == expected
    assert str(parsed) == shown
    assert "secret" not in repr(parsed)
    assert "pa?ss" not in repr(parsed)


@pytest.mark.parametrize(
    "store",
    [
        {"url": "valkey://:secret@h/kv"},
        [["valkey://:secret@h/kv"]],
        ["valkey://:secret@h/kv", None],
    ],
)
def test_a_store_of_a_wrong_type_is_not_shown(store):
    for use in (
        open_store,
        lambda value: build_config(CacheConfig, {"store": value}, where="options"),
    ):
        with pytest.raises(ConfigError) as caught:
            use(store)
        assert "secret" not in str(caught.value)


def test_the_options_of_a_connector_do_not_show_the_store():
    assert "secret" not in repr(CacheConfig(store="valkey://:secret@h/kv"))
