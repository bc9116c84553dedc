"""A directory of another format version is refused and left as it is."""

from __future__ import annotations

import json

import pytest

from kvferry.errors import ConfigError


@pytest.mark.parametrize("version", [1, 3])
def test_a_store_of_another_version_is_refused_in_one_line_and_left_untouched(bench, version):
    bench.open().close()
    marker = bench.root / "kvferry.json"
    assert json.loads(marker.read_text())["version"] == 2
    marker.write_text(json.dumps({"format": "kvferry-store", "version": version}))
    before = {path: path.lstat().st_mtime_ns for path in bench.root.rglob("*")}
    message = f"has format version {version}, this kvferry knows 2"
    with pytest.raises(ConfigError, match=message) as refused:
        bench.open()
    assert "\n" not in str(refused.value)
    assert {path: path.lstat().st_mtime_ns for path in bench.root.rglob("*")} == before
