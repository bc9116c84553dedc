"""The table of docs/sizing.md is what `kvferry size` says of the models in sizing.json."""

from __future__ import annotations

import json
from pathlib import Path

from kvferry.cli.main import main

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "sizing.md"
TOKENS = 32768
RATES = {"disk, 3 GB/s": 3e9, "10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}


def row(name, sizes):
    read_bytes = sizes["read_for_a_hit_bytes"] / TOKENS
    cells = [
        name,
        f"{sizes['token_bytes']:,}",
        f"{sizes['record_bytes'] / (1 << 20):.1f}",
        f"{sizes['tokens_per_gib']:,}",
        f"{read_bytes:,.0f}",
        *(f"{rate / read_bytes:,.0f}" for rate in RATES.values()),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_table_is_what_the_command_says(tmp_path, capsys):
    rows = []
    for name, config in json.loads((HERE / "sizing.json").read_text(encoding="utf-8")).items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert main(["size", str(tmp_path), "--tokens", str(TOKENS), "--json", "-"]) == 0
        rows.append(row(name, json.loads(capsys.readouterr().out)))
    said = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(said) if line.startswith("| model")) + 2
    found = said[start : said.index("", start)]
    assert len(rows) == 20
    assert found == rows, "write this:\n" + "\n".join(rows)
