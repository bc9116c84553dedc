"""The page about the engine: its table of options is what the engine takes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from kvferry.engine.config import EngineConfig

PAGE = (Path(__file__).parents[2] / "docs" / "engine.md").read_text(encoding="utf-8")


def test_the_table_of_options_names_every_option_and_its_default():
    rows = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", PAGE, re.MULTILINE))
    defaults = {option.name: option.default for option in fields(EngineConfig)}
    assert rows.keys() == defaults.keys()
    for name, default in defaults.items():
        told = rows[name].strip("`")
        if default is None:
            assert told == "\u2013"
        elif isinstance(default, float):
            assert float(told) == default
        else:
            assert told == str(default)
