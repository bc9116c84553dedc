"""The table of docs/operate.md is what the configs of the models in sizing.json say."""

from __future__ import annotations

import json
from pathlib import Path

from kvferry.cli.doctor import groups_of
from kvferry.record.schema import RecordSchema, default_chunk_tokens

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "operate.md"
TOKENS = 32768
RATES = {"disk, 3 GB/s": 3e9, "10 Gbit/s": 1.25e9, "100 Gbit/s": 12.5e9}


def row(name, groups):
    chunk = default_chunk_tokens(groups)
    schema = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=chunk, groups=groups)
    read_bytes = 0.0
    for group, component in zip(groups, schema.components, strict=True):
        # The token after the hit sees window - 1 tokens before it.
        unseen = 0 if group.window is None else max(0, TOKENS - (group.window - 1)) // chunk
        read_bytes += (TOKENS // chunk - unseen) * component.num_bytes / TOKENS
    cells = [
        name,
        f"{schema.payload_bytes // chunk:,}",
        f"{chunk}",
        f"{schema.record_bytes / (1 << 20):.1f}",
        f"{(1 << 30) // schema.record_bytes * chunk:,}",
        f"{read_bytes:,.0f}",
        *(f"{rate / read_bytes:,.0f}" for rate in RATES.values()),
    ]
    return f"| {' | '.join(cells)} |"


def test_the_table_is_what_the_configs_say(tmp_path):
    rows = []
    for name, config in json.loads((HERE / "sizing.json").read_text(encoding="utf-8")).items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        rows.append(row(name, groups_of(tmp_path)))
    said = PAGE.read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(said) if line.startswith("| model")) + 2
    found = said[start : said.index("", start)]
    assert len(rows) == 10
    assert found == rows, "write this:\n" + "\n".join(rows)


def test_the_estimates_of_the_readme_are_those_of_the_table():
    readme = (PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    for name in ("Llama-3.1-8B", "Llama-3.3-70B"):
        [line] = [line for line in page.splitlines() if line.startswith(f"| {name} |")]
        token_bytes, *_, break_even, _, _ = (
            cell.strip() for cell in line.strip("| ").split("|")[1:]
        )
        assert f" {int(token_bytes.replace(',', '')) >> 10} KiB" in readme
        assert f" {break_even} " in readme
