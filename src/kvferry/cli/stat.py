"""`kvferry stat`: how full a store is."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvferry.cli.output import JsonOption, emit, make_table
from kvferry.cli.stores import UrlArgument, open_existing
from kvferry.config import format_size, parse_store_url

if TYPE_CHECKING:
    from kvferry.keys import JsonValue


def stat(url: UrlArgument, json: JsonOption = None) -> None:
    """Show what a store holds, its quota, and the memory its users may take.

    `used_bytes` counts what all processes that share the store have stored or reserved. The quota
    is that of the URL given here; engines bring their own. `staging_bytes` is the bound of memory
    between store and engine, per engine, unless the option of that name says otherwise.
    """
    # Not at the top: all commands, and the help, would wait for it.
    from kvferry.connectors.registry import default_options

    with open_existing(url) as store:
        found = store.stat()
    quarantined, quarantined_bytes = _quarantine(parse_store_url(url).path)
    value: dict[str, JsonValue] = {
        "url": url,
        "num_records": found.num_records,
        "used_bytes": found.used_bytes,
        "max_bytes": found.max_bytes,
        "index_complete": found.index_complete,
        "quarantined": quarantined,
        "quarantined_bytes": quarantined_bytes,
        "staging_bytes": default_options("shared_storage")["staging_bytes"],
    }
    table = make_table(None, "what", "value")
    for name, fact in value.items():
        table.add_row(name, _readable(name, fact))
    emit(value, json, table)


def _quarantine(root: str) -> tuple[int, int]:
    """Files in quarantine and their bytes."""
    from kvferry.store.file.layout import Layout  # as above

    try:
        with os.scandir(Layout(root).quarantine) as entries:
            sizes = [entry.stat().st_size for entry in entries if entry.is_file()]
    except FileNotFoundError:  # made with the first quarantined record
        return 0, 0
    return len(sizes), sum(sizes)


def _readable(name: str, fact: JsonValue) -> str:
    if fact is None:
        return "no limit"
    if name.endswith("_bytes") and isinstance(fact, int):
        return f"{format_size(fact)} ({fact} bytes)"
    return {True: "yes", False: "no"}.get(fact, "") if isinstance(fact, bool) else str(fact)
