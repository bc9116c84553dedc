"""`kvferry bench away`: that its stores are away, each in its way."""

from __future__ import annotations

from kvferry.bench import BenchOptions, away


def test_the_stores_are_away(tmp_path, caplog):
    plain, *others = away.run(BenchOptions(directory=tmp_path, quick=True))
    assert plain["store"] == "no connector"
    assert plain["ratio"] == 1
    assert [row["store"] for row in others] == ["refuses", "never answers"]
    assert all(row["tokens_per_s"] > 0 for row in others)
    said = [line for line in caplog.messages if "left alone" in line]
    assert len(said) == len(others)
    assert sum("refused" in line for line in said) == 1
    assert sum("no answer in time" in line for line in said) == 1
