"""Renders the page of `kvferry report`: one file that loads nothing and contains Plotly's script.

All text from a store or a journal is cut, made printable and escaped (`safe`). That is not the only
protection: the page's content security policy runs only the two scripts whose digests it names.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

from kvferry.config import format_size, printable
from kvferry.report.gather import (
    AGE_UNKNOWN,
    AGES,
    COMPUTED,
    MAX_RUNS,
    Chunk,
    RecordedRequests,
    SpaceSums,
    TimeSteps,
    age,
    causes,
)
from kvferry.store.catalogue import Removal
from kvferry.survey import Holding

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MAX_TEXT = 80
MAX_ROWS = 50
_DIGITS = 16
_LEVELS = 6
"""Levels of the tree that are shown at once; a click shows further ones."""

_COLOURS = ("#2a7f62", "#4c78a8", "#c8553d", "#6a4c93", "#e0a458", "#8d99ae", "#577590", "#b56576")

_AGE_COLOURS = dict(
    zip((*AGES, AGE_UNKNOWN), ("#5fb58b", "#a9d18e", "#e8cf8a", "#c9b6a4", "#c4c9d0"), strict=True)
)

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
h1 { overflow-wrap: anywhere; } table { border-collapse: collapse; } .wide { overflow-x: auto; }
th, td { text-align: left; padding: .15rem 1.2rem .15rem 0; vertical-align: top; }
th { border-bottom: 1px solid #999; } td.number, th.number { text-align: right; }
dl { display: flex; flex-wrap: wrap; gap: .5rem 2.5rem; } dd { margin: 0; font-size: 1.3rem; }
dt, p.note { color: #666; } td { max-width: 24rem; overflow-wrap: break-word; }
@media (max-width: 40rem) {  /* a row becomes a card, a cell a line with its heading */
  table, tbody, tr { display: block; } th { display: none; }
  tr { padding: .4rem 0; border-bottom: 1px solid #ccc; }
  td, td.number { display: flex; justify-content: space-between; gap: 1rem; padding: 0;
    max-width: none; overflow-wrap: anywhere; text-align: right; }
  td::before { content: attr(data-head); color: #666; overflow-wrap: normal; }
}
"""

_DRAW = """
for (const [id, figure] of Object.entries(JSON.parse(document.getElementById("figures").text)))
  Plotly.newPlot(id, figure.data, figure.layout, {responsive: true, displaylogo: false});
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All that the page shows.

    Attributes:
        url: URL of the store, without a password.
        at: when the store was read, seconds since the epoch.
        facts: what the store says of itself, such as its quota.
        spaces: sums of each namespace, by digest, the largest first.
        holdings: the namespaces that are shown, by digest.
        runs: the prefix tree of recorded requests: the first chunk of each run.
        removals: removals, newest first; None if the store does not remember them.
        requests: requests of a journal; None without a journal.
    """

    url: str
    at: float
    facts: Mapping[str, int | bool | None]
    spaces: Mapping[bytes, SpaceSums]
    holdings: Mapping[bytes, Holding]
    runs: Sequence[Chunk]
    removals: Sequence[Removal] | None
    requests: RecordedRequests | None

    @property
    def num_records(self) -> int:
        return sum(space.num_records for space in self.spaces.values())

    @property
    def num_bytes(self) -> int:
        return sum(space.num_bytes for space in self.spaces.values())

    def shown_spaces(self) -> list[tuple[bytes, SpaceSums]]:
        return list(self.spaces.items())[:MAX_ROWS]


def safe(text: str) -> str:
    """Cut and escape `text` for elements of the page (not for attributes), and for Plotly, which
    also reads markup."""
    cut = text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"
    return html.escape(printable(cut), quote=False)  # Plotly shows `&quot;` as it is


def render(report: Report) -> str:
    """Return the HTML of the page."""
    # Not at the top, because Plotly is an optional dependency.
    from plotly.offline import get_plotlyjs

    figures: dict[str, Figure] = {}
    body = [
        *_head(report), *_spaces(report), *_tree(report, figures), *_shares(report, figures),
        *_removed(report, figures),
    ]  # fmt: skip
    texts = (f'"{name}":{figure.to_json()}' for name, figure in figures.items())
    # Plotly writes `<` and `/` as escapes, so that no text ends the element that holds it.
    drawn = "{" + ",".join(texts) + "}"
    scripts = get_plotlyjs(), _DRAW
    digests = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    policy = (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:"
    )
    return "\n".join(
        [
            '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>kvferry: {safe(report.url)}</title><style>{_STYLE}</style></head><body>",
            *body,
            f'<script type="application/json" id="figures">{drawn}</script>',
            *(f"<script>{script}</script>" for script in scripts),
            "</body></html>\n",
        ]
    )


def _head(report: Report) -> list[str]:
    quota, kept = report.facts.get("max_bytes"), report.facts.get("quarantined")
    facts = {
        "records": f"{report.num_records:,}",
        "size": format_size(report.num_bytes),
        "quota": "none known" if quota is None else format_size(int(quota)),
        "namespaces": f"{len(report.spaces):,}",
        "in quarantine": "none kept" if kept is None else f"{int(kept):,}",
        "removed, as remembered": (
            "not remembered" if report.removals is None else f"{len(report.removals):,}"
        ),
    }
    if report.requests is not None:
        hit, total = report.requests.hit_tokens, report.requests.num_tokens
        facts["requests in the journal"] = f"{report.requests.count:,}"
        facts["of their tokens hit"] = f"{hit / total:.0%} of {total:,}" if total else "none known"
    cells = (f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts.items())
    return [
        f"<h1>{safe(report.url)}</h1>",
        f'<p class="note">As of {_time(report.at)}. All times are UTC.</p>',
        f"<dl>{''.join(cells)}</dl>",
    ]


# -- tables ---------------------------------------------------------------------------------------


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | int | None]]) -> str:
    """Write a table. Escapes texts, and aligns numbers to the right."""
    body = []
    for row in rows:
        cells = (
            f'<td class="number" data-head="{head}">{value:,}</td>'
            if isinstance(value, int)
            else f'<td data-head="{head}">{safe(value or "")}</td>'
            for head, value in zip(columns, row, strict=True)
        )
        body.append(f"<tr>{''.join(cells)}</tr>")
    heads = (
        f'<th class="number">{name}</th>' if name == "records" else f"<th>{name}</th>"
        for name in columns
    )
    return f'<div class="wide"><table><tr>{"".join(heads)}</tr>{"".join(body)}</table></div>'


def _time(at: float) -> str:
    """Write a time in UTC; empty if it is unknown or impossible."""
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S") if at > 0 else ""
    except (ValueError, OverflowError, OSError):
        return ""


def _spaces(report: Report) -> list[str]:
    rows = [
        (_space_name(digest), report.holdings[digest].title, report.holdings[digest].tenant,
         space.num_records, format_size(space.num_bytes), _time(space.last_used))
        for digest, space in report.shown_spaces()
    ]  # fmt: skip
    if not rows:
        return ["<h2>Namespaces</h2>", "<p>Nothing is stored.</p>"]
    left = len(report.spaces) - len(rows)
    heads = ("namespace", "model", "tenant", "records", "size", "last use")
    note = [f'<p class="note">{left} smaller ones are not shown.</p>'] if left else []
    return ["<h2>Namespaces</h2>", _table(heads, rows), *note]


def _space_name(digest: bytes) -> str:
    return digest.hex()[:_DIGITS] or "not known yet"


# -- pictures -------------------------------------------------------------------------------------


def _tree(report: Report, figures: dict[str, Figure]) -> list[str]:
    shown = ["<h2>What is stored, by prefix</h2>"]
    if not report.num_bytes:
        return [*shown, "<p>Nothing is stored.</p>"]
    note = "Width is size. A click shows a part alone."
    if report.requests is None:
        note += " Give a journal (--journal) to see prefixes: records alone do not tell them."
    elif report.runs:
        note += " Prefixes are those of the last requests of the journal."
        if len(report.runs) == MAX_RUNS:
            note += f" Only the {MAX_RUNS} largest parts are shown; others leave gaps."
    else:
        note += " No prompt of the journal's last requests is in this store."
    figures["tree"] = _draw_tree(report)
    legend = " ".join(
        f'<span style="border-left: 1em solid {colour}">&nbsp;{name}&nbsp;</span>'
        for name, colour in _AGE_COLOURS.items()
    )
    return [*shown, f'<p class="note">{note}</p><p>{legend}</p>', '<div id="tree"></div>']


class _Box(NamedTuple):
    parent: str
    label: str
    num_bytes: int
    age: str
    note: str = ""


def _boxes(report: Report) -> dict[str, _Box]:
    """Return the boxes of the tree by id. A box is at least as large as its parts together."""
    boxes: dict[str, _Box] = {}
    sizes: Counter[str] = Counter()
    tops = {digest: f"n{number}" for number, (digest, _) in enumerate(report.shown_spaces())}
    names = {chunk: f"r{number}" for number, chunk in enumerate(report.runs)}
    for chunk, name in names.items():
        if (top := tops.get(chunk.namespace)) is None:
            continue
        first, parent = 0, top
        if chunk.parent is None:
            sizes[top] += chunk.all_bytes
        else:
            first, parent = chunk.parent.end, names[chunk.parent.run]
        label = f"tokens {first:,} to {chunk.run_end:,}"
        used = age(chunk.last_used, report.at)
        boxes[name] = _Box(parent, label, chunk.all_bytes, used, f"in {chunk.uses:,} requests")
    note = "" if report.requests is None else "in no recorded prompt"
    for digest, space in report.shown_spaces():
        top = tops[digest]
        for number, (used, num_bytes) in enumerate(space.ages.items()):
            sizes[top] += num_bytes
            boxes[f"{top}a{number}"] = _Box(top, used, num_bytes, used, note)
        model = report.holdings[digest].title or "namespace"
        sizes[top] = max(sizes[top], space.num_bytes)  # runs may be left out
        used = age(space.last_used, report.at)
        boxes[top] = _Box("all", f"{model} {_space_name(digest)}", sizes[top], used)
    used = age(max(space.last_used for space in report.spaces.values()), report.at)
    boxes["all"] = _Box("", report.url, max(sum(sizes.values()), report.num_bytes), used)
    return boxes


def _draw_tree(report: Report) -> Figure:
    from plotly.graph_objects import Figure, Icicle

    boxes = _boxes(report)
    figure = Figure(
        Icicle(
            ids=list(boxes),
            parents=[box.parent for box in boxes.values()],
            labels=[safe(box.label) for box in boxes.values()],
            values=[box.num_bytes for box in boxes.values()],
            customdata=[(format_size(box.num_bytes), box.note, box.age) for box in boxes.values()],
            branchvalues="total",
            maxdepth=_LEVELS,
            leaf={"opacity": 1},
            tiling={"orientation": "v"},
            hovertemplate=(
                "%{label}<br>%{customdata[0]}<br>%{customdata[1]}<br>%{customdata[2]}"
                "<extra></extra>"
            ),
            marker={"colors": [_AGE_COLOURS[box.age] for box in boxes.values()]},
        )
    )
    return figure.update_layout(margin={"l": 0, "r": 0, "t": 0, "b": 0}, height=460)


def _shares(report: Report, figures: dict[str, Figure]) -> list[str]:
    shown = ["<h2>Tokens of prompts, by where they came from</h2>"]
    requests = report.requests
    if requests is None:
        note = "Give a journal (--journal, the option <code>record</code> of an engine) to see it."
        return [*shown, f"<p>{note}</p>"]
    if not requests.tokens.names:
        return [*shown, "<p>The journal holds no answered request.</p>"]
    figures["shares"] = _draw(requests.tokens, "percent of tokens", barnorm="percent")
    return [*shown, '<div id="shares"></div>']


def _draw(steps: TimeSteps, title: str, **layout: object) -> Figure:
    """Draw sums over time as stacked bars, by name."""
    from plotly.graph_objects import Bar, Figure

    rows = list(steps.steps())
    bars = [
        Bar(
            name=safe(name),
            x=[_time(at + 0.5 * steps.seconds) for at, _ in rows],
            y=[sums[name] for _, sums in rows],
            width=1000 * steps.seconds,
            marker_color=_COLOURS[number % len(_COLOURS)],
        )
        # Hits lie below what was computed, so their sum is seen.
        for number, name in enumerate(
            sorted(steps.names, key=lambda name: name.startswith(COMPUTED))
        )
    ]
    return Figure(bars).update_layout(
        barmode="stack",
        height=320,
        margin={"l": 60, "r": 10, "t": 10, "b": 80},
        showlegend=True,
        legend={"orientation": "h", "y": -0.25},
        plot_bgcolor="#fff",
        xaxis={"type": "date"},
        yaxis={"title": title},
        hovermode="x unified",
        **layout,
    )


def _removed(report: Report, figures: dict[str, Figure]) -> list[str]:
    shown = ["<h2>What was removed, and why</h2>"]
    if report.removals is None:
        return [*shown, "<p>This store does not remember what it removed; a directory does.</p>"]
    if not report.removals:
        return [*shown, "<p>Nothing, as far as the store remembers.</p>"]
    removed = TimeSteps()
    for each in report.removals:
        removed.add(each.at, each.reason, 1)
    figures["removals"] = _draw(removed, "records removed")
    rows = [
        (each.reason, each.detail, each.num_records, format_size(each.num_bytes),
         _time(each.last_at))
        for each in causes(report.removals)[:MAX_ROWS]
    ]  # fmt: skip
    heads = ("reason", "detail", "records", "size", "last")
    note = '<p class="note"><code>kvferry ls URL --removed</code> lists them one by one.</p>'
    return [*shown, '<div id="removals"></div>', _table(heads, rows), note]
