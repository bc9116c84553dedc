"""docs/vllm.md says of options what the connector takes, and of releases what their tests say."""

import json
import re
from dataclasses import fields
from pathlib import Path

import yaml

from kvferry.cache.config import CacheConfig
from kvferry.config import build_config
from kvferry.store.url import parse_store_url
from kvferry.transfer.server import Listen
from tests.adapters.vllm.released import Release, number, versions
from tests.adapters.vllm.test_host_versions import SERVED
from tests.adapters.vllm.versioned_kv import shapes_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
ROWS = {
    version.strip(" *"): cells[1:]
    for line in PAGE.splitlines()
    if re.match(r"\| \**0\.", line)
    for cells in [[cell.strip() for cell in line.strip("|").split("|")]]
    for version in cells[0].split(",")
}


def test_the_option_table_lists_every_option_and_its_default():
    (table,) = re.findall(r"\| option \| default \|.*?\n\n", PAGE, re.DOTALL)
    told = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.MULTILINE))
    options = {each.name: each.default for each in fields(CacheConfig)}
    assert told.keys() == {*options, "handover", "client_options"}
    for name, default in options.items():
        if isinstance(default, (bool, int, float)) or default == "first":
            assert (
                told[name] == f"{default:g}" if isinstance(default, float) else str(default).lower()
            )


def test_the_pods_of_the_example_give_options_that_there_are():
    *_, pods = yaml.safe_load_all((ROOT / "examples/kubernetes/prefill.yaml").read_text())
    [container] = pods["spec"]["template"]["spec"]["containers"]
    given = json.loads(container["args"][-1].replace("$(POD)", "prefill-0"))
    assert given["kv_role"] == "kv_producer"
    config = build_config(CacheConfig, given["kv_connector_extra_config"], where="pods")
    listen = Listen.parse(config.serve)
    assert {"containerPort": listen.port} in container["ports"]
    assert parse_store_url(config.store).scheme == "file"


def test_every_snapshot_has_its_row():
    assert list(ROWS) == versions()


def test_the_rows_say_what_the_snapshots_say():
    layouts = ""
    for version, (served, tells, tensors) in ROWS.items():
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
    assert f"**Before {since.removesuffix('.0')}** an idle engine" in PAGE
