"""docs/vllm_versions.md says of each release what the contract tests say."""

import re
from pathlib import Path

from tests.adapters.vllm.released import Release, number, versions
from tests.adapters.vllm.test_host_versions import SERVED
from tests.adapters.vllm.versioned_kv import shapes_of

ROOT = Path(__file__).parents[2]
ROWS = {
    cells[0]: cells
    for line in (ROOT / "docs" / "vllm_versions.md").read_text().splitlines()
    if re.match(r"\| \d", line)
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
}


def test_every_snapshot_has_its_row():
    assert list(ROWS) == versions()


def test_the_rows_say_what_the_snapshots_say():
    layouts = ""
    for version, (_, served, _, tells, tensors) in ROWS.items():
        release = Release(version)
        assert served == ("yes" if version in SERVED else "no")
        if version not in SERVED:
            continue
        by_messages = release.has("build_connector_worker_meta")
        assert tells == ("by messages" if by_messages else "on counters"), version
        layouts = tensors if "[" in tensors else layouts
        named = set(re.findall(r"\[([2BNHDC,]+)\]", layouts))
        assert named == {",".join(axes) for axes in shapes_of(release).values()}, version


def test_idle_engines_are_heard_of_since_the_release_that_the_page_names():
    since = min((v for v in versions() if Release(v).has("has_pending_push_work")), key=number)
    assert since == "0.24.0"
