"""Durations, ages and JSON files."""

from __future__ import annotations

import json

import pytest

from kvferry.cli.output import format_age, parse_duration, write_json
from kvferry.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("36h", 129_600), ("1.5d", 129_600), ("2w", 1_209_600)],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "36", "h", "-1h", "1 h", "1h30m", "soon", "1H"])
def test_what_is_no_duration_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="36h"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "age"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (119, "119 s"),
        (120, "2 m"),
        (7200, "2 h"),
        (172_800, "2 d"),
        (1_814_400, "3 w"),
    ],
)
def test_ages_are_in_one_unit(seconds, age):
    assert format_age(1000.0, 1000.0 + seconds) == age


def test_a_json_file_is_replaced_whole(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, {"a": 1})
    write_json(path, [1, None, "ü"])
    assert json.loads(path.read_text()) == [1, None, "ü"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path):
    (tmp_path / "out.json").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_json(tmp_path / "out.json", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]
