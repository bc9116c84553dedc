"""The page of `kvferry report` in a browser: what it shows, what a click does, and that text out of
a store or a journal has no effect in it."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from playwright.sync_api import expect

from kvferry.cli.main import main
from kvferry.journal import KEY_BYTES
from kvferry.keys import ChunkKeys, ModelIdentity, Namespace
from kvferry.report.gather import MAX_RUNS, Chunk, RecordedRequests, SpaceSums
from kvferry.report.page import MAX_ROWS, Report, render
from kvferry.store.url import open_store
from kvferry.survey import Holding
from kvferry.types import KVGroup
from tests.browser import browser
from tests.cli.conftest import CHUNK_TOKENS, put_records

__all__ = ["browser"]

GROUP = KVGroup(num_layers=1, num_kv_heads=1, content_size=8, dtype="float32", block_size=16)
HOSTILE = [
    "<script>window.planted = 1</script>",
    "<img src=x onerror='window.planted = 1'>",
    "</td></table></script><svg onload=window.planted=1>",
    "\x1b[31m\u202e&lt;b onclick='window.planted=1'>",
    '<a href="javascript:window.planted=1">x</a>',
    "%{y}<br>" + "x" * (1 << 20),
]


def keys_of(space: Namespace, token_ids: list[int]):
    keys = ChunkKeys(space.digest, CHUNK_TOKENS)
    keys.extend(token_ids)
    return list(keys.keys)


def line(at: float, keys, **answer: object) -> str:
    value = {"time": at, "chunk_tokens": CHUNK_TOKENS, "num_tokens": 100}
    value["keys"] = [key[:KEY_BYTES].hex() for key in keys]
    return json.dumps({**value, **answer}) + "\n"


def make_space(name: str, tenant: str = "") -> Namespace:
    identity = ModelIdentity(weights=b"w" * 32, config={}, name=name)
    return Namespace.of(identity, (GROUP,), CHUNK_TOKENS, tenant)


def make_report(folder: Path, texts: list[str]) -> Path:
    """For each text a model and tenant of this name with two prompts that have a common start; the
    text is also the reason of a record in quarantine, a tier and a reason of misses."""
    folder.mkdir(exist_ok=True)
    url, journal, page = (folder / "store").as_uri(), folder / "journal", folder / "report.html"
    now = time.time()
    lines = []
    for text in texts:
        space = make_space(text, tenant=text)
        system = list(range(4 * CHUNK_TOKENS))
        first = keys_of(space, [*system, *range(500, 500 + 3 * CHUNK_TOKENS)])
        second = keys_of(space, [*system, *range(900, 900 + 2 * CHUNK_TOKENS)])
        put_records(url, namespace=space.digest, keys=[*first, *second[4:]])
        with open_store(url) as store:
            store.describe(space.digest, space.as_text())
            store.discard(first[-1], text)
            store.delete(second[-1])
        lines.append(line(now - 600, first, local=10, misses={"absent": 90}))
        lines.append(line(now - 60, second, hits={text: 75}, misses={text: 25}))
    journal.write_text("".join(lines))
    assert main(["report", url, "--html", str(page), "--journal", str(journal)]) == 0
    return page


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a report; fails the test if the page asks for anything, or a script of it fails."""
    faults: list[str] = []
    expect.set_options(timeout=120_000)  # on a machine that stalls
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.on(
        "request", lambda asked: faults.append(asked.url) if "report.html" not in asked.url else 0
    )
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text))

    def open_report(*texts: str, size: tuple[int, int] = (1100, 800)):
        page.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
        page.goto(make_report(tmp_path, list(texts)).as_uri())
        return page

    yield open_report
    page.close()
    assert faults == []


def test_a_page_shows_prefixes_shares_and_removals_and_zooms_by_a_click(opened, tmp_path):
    page = opened("org/model-7b")
    page.screenshot(path=tmp_path / "whole.png", full_page=True)
    shown = page.inner_text("body")
    for text in ("org/model-7b", "damaged", "deleted", "in quarantine"):
        assert text in shown
    labels = page.locator("#tree .slicetext")
    assert {"tokens 0 to 28", "tokens 28 to 42"} <= set(labels.all_text_contents())
    labels.filter(has_text="tokens 28 to 42").first.click(force=True)  # its box is before it
    expect(labels.filter(has_text="28 to 35")).to_have_count(0)
    names = page.locator("#shares .legendtext")
    computed = ["computed: absent", "computed: org/model-7b"]
    shown = names.all_text_contents()[::-1]  # from below, as the bars lie
    assert sorted(shown[:2]) == ["engine", "org/model-7b"]
    assert sorted(shown[2:]) == computed
    bars = "#shares .trace.bars"
    assert page.locator(bars).count() == 4
    page.locator("#shares .legendtoggle").first.click()
    expect(page.locator(bars)).to_have_count(3)


@pytest.mark.parametrize("name", ["org/model-7b", "a-" * 300], ids=["plain", "long"])
def test_a_phone_shows_the_numbers_first_and_nothing_beside_its_screen(opened, tmp_path, name):
    page = opened(name, size=(390, 844))
    drawn = "[...document.querySelectorAll('#tree, #shares, #removals')]"
    page.wait_for_function(f"{drawn}.every(each => each.querySelector('.main-svg'))")
    page.wait_for_function("document.documentElement.scrollWidth <= 390")
    page.screenshot(path=tmp_path / "phone.png", full_page=True)
    boxes = [each.bounding_box() for each in page.locator("h1, dd, td, h2, .main-svg").all()]
    assert len(boxes) > 30
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= 390 for box in boxes)
    numbers = {
        each.locator("dt").inner_text(): each.locator("dd") for each in page.locator("dl div").all()
    }
    assert numbers["records"].inner_text() == "7"
    assert numbers["of their tokens hit"].inner_text() == "42% of 200"
    bottoms = [sum(dd.bounding_box()[side] for side in ("y", "height")) for dd in numbers.values()]
    assert max(bottoms) <= 844
    # A row is a card, and each of its cells a line that says what it is.
    cell = page.locator("td[data-head=records]").first
    assert cell.evaluate("each => getComputedStyle(each, '::before').content") == '"records"'
    assert cell.bounding_box()["height"] < 30
    assert cell.bounding_box()["width"] > 300


def test_text_of_a_store_has_no_effect(opened):
    page = opened(*HOSTILE)
    assert page.evaluate("window.planted") is None
    assert page.locator("body img, body svg[onload], body b, body td a, svg a").count() == 0
    legend = page.locator("#shares .legendtext").all_text_contents()
    for text in HOSTILE:
        visible = text[:20].encode("unicode_escape").decode()
        shown = page.locator("td", has_text=visible).count()
        # Model, tenant and detail; no store keeps the description of the longest.
        assert shown == (3 if len(text) < 100 else 1), text
        assert any(name.startswith(visible) for name in legend), legend
    assert max(map(len, legend)) < 200


class Tags(HTMLParser):
    """What an HTML parser finds in a page that nobody runs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.sources += [name for name, _ in attrs if name in ("src", "href")]


def test_hostile_text_makes_no_element_even_where_no_policy_is_kept(tmp_path):
    plain = make_report(tmp_path / "plain", ["text" * n for n in range(1, 1 + len(HOSTILE))])
    page = make_report(tmp_path / "hostile", HOSTILE).read_text()
    found = Tags(page)
    assert (found.handlers, found.sources) == ([], [])
    assert found.tags == Tags(plain.read_text()).tags
    assert "\x1b" not in page
    assert "\u202e" not in page
    assert "x" * 200 not in page


def test_what_has_no_box_in_the_tree_still_counts_and_the_page_says_so():
    runs = [
        Chunk(None, 7, uses=1, all_bytes=10, last_used=1e9, namespace=b"n" * 32)
        for _ in range(MAX_RUNS)
    ]
    spaces = {bytes([number]) * 32: SpaceSums(1, 10) for number in range(MAX_ROWS)}
    spaces = {b"n" * 32: SpaceSums(MAX_RUNS + 9, 10 * MAX_RUNS + 90), **spaces}
    report = Report(
        url="memory:", at=1e9, facts={}, runs=runs, removals=None, spaces=spaces,
        holdings={digest: Holding(digest, 0, 0, is_described=False) for digest in spaces},
        requests=RecordedRequests(),
    )  # fmt: skip
    page = render(report)
    assert f"Only the {MAX_RUNS} largest parts are shown" in page
    (figures,) = re.findall(r'id="figures">(.*?)</script>', page)
    (tree,) = json.loads(figures)["tree"]["data"]
    sizes = dict(zip(tree["ids"], tree["values"], strict=True))
    assert sizes["n0"] == 10 * MAX_RUNS + 90
    assert sizes["all"] == sizes["n0"] + 10 * MAX_ROWS  # one namespace is not shown
