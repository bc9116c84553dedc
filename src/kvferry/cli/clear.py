"""`kvferry clear` and `kvferry pin`: delete chosen records, or keep them from eviction."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Annotated

import typer

from kvferry.cli.choice import (
    Choice,
    DryRunOption,
    LoraOption,
    ModelOption,
    NamespaceOption,
    PromptOption,
    RawOption,
    SaltOption,
    TenantOption,
    TokensOption,
    chosen,
    read_choice,
)
from kvferry.cli.output import JsonOption, YesOption, confirm, emit, parse_duration, progress
from kvferry.cli.stores import UrlArgument, open_existing, query_store
from kvferry.config import format_size
from kvferry.errors import ConfigError
from kvferry.store import maintenance
from kvferry.store.base import Store
from kvferry.store.kind import shown_url


def clear(
    url: UrlArgument,
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tenant: TenantOption = None,
    prompt_file: PromptOption = None,
    tokens: TokensOption = None,
    raw: RawOption = False,
    salt: SaltOption = None,
    lora: LoraOption = None,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Only records not used for this long, e.g. 36h."),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--everything", help="All records of the store.")
    ] = False,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    json: JsonOption = None,
) -> None:
    """Delete the records that match all given options; asks first.

    Pinned records are deleted, too. For a prompt, its own chunks are deleted: longer prompts that
    begin with it miss from then on, and their other chunks are evicted in time. Engines compute
    again what they no longer find.

    Example: kvferry clear file:///var/cache/kvferry --tenant team-a --dry-run
    """
    choice = read_choice(
        namespace=namespace, model=model, tenant=tenant, prompt_file=prompt_file, tokens=tokens,
        raw=raw, salt=salt, lora=lora, older_than=older_than,
    )  # fmt: skip
    if choice.is_everything != everything:
        raise ConfigError(
            "choose the records: --namespace, --model, --tenant, --older-than, a prompt, or "
            "--everything alone"
        )
    count, num_bytes = query_store(url, lambda store: _count(store, choice))
    verb = "would be deleted"
    if not dry_run:
        confirm(f"delete {count} records, {format_size(num_bytes)}, of {shown_url(url)}?", yes=yes)
        with open_existing(url, writable=True) as store, progress() as bar:
            task = bar.add_task("deleting", total=count)
            report = maintenance.clear(
                store, chosen(store, choice), lambda done: bar.update(task, completed=done)
            )
        count, num_bytes, verb = report.removed_records, report.removed_bytes, "deleted"
    value = {"dry_run": dry_run, "records": count, "num_bytes": num_bytes}
    emit(dict(value), json, f"{count} records, {format_size(num_bytes)} {verb}")


def pin(
    url: UrlArgument,
    until: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="For so long, e.g. 36h; a local time such as 2027-01-31T08:00; or 'now' to unpin.",
        ),
    ],
    namespace: NamespaceOption = None,
    model: ModelOption = None,
    tenant: TenantOption = None,
    prompt_file: PromptOption = None,
    tokens: TokensOption = None,
    raw: RawOption = False,
    salt: SaltOption = None,
    lora: LoraOption = None,
    dry_run: DryRunOption = False,
    json: JsonOption = None,
) -> None:
    """Protect records from eviction and `gc` until a given time; 'now' unpins them.

    Only a directory can pin, up to half of its quota: give the same max_bytes in the URL as the
    engines do. Servers evict by their own rules and cannot. Exit code 1 if none of the chosen
    records is there.

    Example: kvferry pin "file:///var/cache/kvferry?max_bytes=200GiB" --until 36h --model M
    """
    ends = _time(until)
    choice = read_choice(
        namespace=namespace, model=model, tenant=tenant, prompt_file=prompt_file, tokens=tokens,
        raw=raw, salt=salt, lora=lora,
    )  # fmt: skip
    if choice.is_everything:
        raise ConfigError("choose the records: --namespace, --model, --tenant, or a prompt")
    with open_existing(url, writable=not dry_run) as store:
        if dry_run:
            count, verb = _count(store, choice)[0], "would be "
        else:
            count = store.pin((entry.key for entry in chosen(store, choice)), ends)
            verb = ""
    is_over = ends <= time.time()
    left = "unpinned" if is_over else f"pinned for {(ends - time.time()) / 3600:.1f} h"
    value = {"dry_run": dry_run, "records": count, "until": None if is_over else ends}
    emit(dict(value), json, f"{count} records {verb}{left}")
    if not count:
        raise typer.Exit(1)


def _count(store: Store, choice: Choice) -> tuple[int, int]:
    count = num_bytes = 0
    for entry in chosen(store, choice):
        count += 1
        num_bytes += entry.num_bytes
    return count, num_bytes


def _time(text: str) -> float:
    """Parse a time into seconds since the epoch; 'now' is 0. A time without an offset is local.
    Raises ConfigError if it is no time, or is past."""
    if text == "now":
        return 0.0
    try:
        return time.time() + parse_duration(text)
    except ConfigError:
        pass
    try:
        ends = datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(f"--until {text!r}: write 36h, 2027-01-31T08:00 or now") from None
    if ends <= time.time():
        raise ConfigError(f"--until {text} is in the past; write 'now' to unpin")
    return ends
