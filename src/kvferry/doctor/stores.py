"""Checks one store: whether it answers, how fast, what fits, and which namespaces are shared.

`run` is the entry. A store may hang at any call, so a thread of its own runs `check` and fills a
report; `run` reads the report when it has waited long enough.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvferry.config import format_size
from kvferry.doctor.machine import Finding
from kvferry.errors import ConfigError, StoreError
from kvferry.filesystem import file_system, is_of_one_machine, why_untrusted
from kvferry.keys import JsonValue, ModelIdentity, Namespace
from kvferry.record.schema import RecordSchema, leaf_digests
from kvferry.store.base import PutResult, Store
from kvferry.store.file.directory import record_path
from kvferry.store.kind import Opening, StoreUrl, shown_url
from kvferry.store.recordio import put_record
from kvferry.store.url import kind_of, open_one, parse_store_url, read_options
from kvferry.survey import differences, differences_of_model, survey
from kvferry.types import ChunkKey, KVGroup

ANSWER_SECONDS = 5.0
"""Time limit of each call that has a deadline."""

CLEAN_SECONDS = 5.0
SKEW_SECONDS = 60.0
MIN_FREE_FILES = 10_000
CHUNK_TOKENS = 128

_GROUP = KVGroup(num_layers=16, num_kv_heads=4, content_size=128, dtype="bfloat16", block_size=16)
"""A KV group whose records have 2 MiB."""

_DELIBERATE = frozenset({"tenant", "weights_version"})
"""Fields with which operators separate namespaces of one model on purpose."""

_PREFIX = "kvferry-doctor-"
"""Start of the names of this check's records on a server."""

Opener = Callable[[StoreUrl], Store]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Facts about a model, from its directory.

    Attributes:
        options: fields of a namespace that an engine's configuration decides; empty without one.
        record_bytes: size of the record of a chunk of `CHUNK_TOKENS`.
        token_bytes: size of the KV of one token.
        context_tokens: longest prompt; None if the config does not say.
    """

    identity: ModelIdentity
    options: Mapping[str, JsonValue]
    record_bytes: int
    token_bytes: int
    context_tokens: int | None


@dataclass(slots=True)
class StoreReport:
    """What `check` has found out about a store so far.

    Attributes:
        namespaces: a table row for each namespace that has records.
        is_over: set when `run` wants no more results; the check then removes its records.
    """

    url: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, JsonValue] = field(default_factory=dict)
    namespaces: list[dict[str, JsonValue]] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    step: str = "opening it"

    def add(self, what: str, todo: str) -> None:
        self.findings.append(Finding(self.url, what, todo))


def check(
    url: str,
    opened: Opener,
    model: Model | None,
    report: StoreReport,
    *,
    wall: Callable[[], float] = time.time,
) -> None:
    """Check one store and measure it. A fault of the store becomes a finding, not an error.

    Args:
        opened: opens an existing store, writable unless its URL says otherwise.
        model: the model whose KV is to be stored; None: leave out the checks that need one.
        wall: seconds since the epoch, to compare the store's clock with.
    """
    try:
        parsed = parse_store_url(url)
        read_options(parsed)
        with opened(parsed) as store:
            _check_open(store, parsed, model, report, wall)
    except ConfigError as error:
        otherwise = "correct the URL, or let an engine make the store first"
        report.add(str(error), _arrow(str(error), url, otherwise))
    except StoreError as error:
        report.add(f"{report.step} failed: {error}", _arrow(str(error), url, _AWAY))
    except OSError as error:  # of the directory, for example after its mount was lost
        report.add(f"{report.step} failed: {error.strerror}", _AWAY)


_AWAY = "start the server or mount; check host, port, firewall; engines go on without it meanwhile"

_ARROWS = (
    (
        r"NOPERM|cannot be written",
        "allow this user to read, write and delete under the prefix",
    ),
    (
        r"WRONGPASS|NOAUTH|refused the login|password_file|the rights to list",
        "give the server's user and password or key, and check that they are not outdated",
    ),
    (
        r"READONLY|is opened read-only",
        "name the primary, not a replica; of a store opened read-only, leave read_only out",
    ),
    (
        r"cluster support disabled|CLUSTERDOWN|node of a cluster",
        "write ?cluster=true for a cluster and only for one; start all of its nodes",
    ),
    (
        r"SSL|TLS|certificate|speak the protocol|closed the connection",
        "TLS needs valkeys:// or https://, a port in clear valkey:// or http://; check ca_file",
    ),
)
"""What to do, by a pattern of what the store said."""


def _arrow(said: str, url: str, otherwise: str) -> str:
    """Return what to do about a fault of a store. A server in clear waits for more when it gets the
    first words of TLS, so a client of TLS sees no answer."""
    found = next((todo for pattern, todo in _ARROWS if re.search(pattern, said)), otherwise)
    is_tls = url.startswith(("valkeys:", "rediss:")) or "endpoint=https:" in url
    if found == _AWAY and is_tls and "refused" not in said:
        return f"{_ARROWS[-1][1]}; or {_AWAY}"
    return found


def _check_open(
    store: Store,
    parsed: StoreUrl,
    model: Model | None,
    report: StoreReport,
    wall: Callable[[], float],
) -> None:
    report.step = "the first answer"
    started = time.perf_counter()
    store.read(ChunkKey(os.urandom(32)), (), time.monotonic() + ANSWER_SECONDS)
    report.facts["answer_ms"] = round(1e3 * (time.perf_counter() - started), 3)
    room = math.inf
    if parsed.scheme == "file":
        room = _check_directory(store, parsed, report)
    report.step = "writing a record"
    _try_record(store, parsed, report, wall, room)
    if "put_gb_per_second" in report.facts:
        report.step = "asking for its limits"
        _check_eviction(store, report)
    report.step = "listing its namespaces"
    _check_namespaces(store, model, report)
    if model is not None:
        _check_model(store, parsed, model, report)


def _check_eviction(store: Store, report: StoreReport) -> None:
    """Check that a server that says how it evicts goes on storing when it is full."""
    facts = store.facts()
    if "maxmemory" not in facts:
        return
    report.facts |= facts
    todo = "set maxmemory to what the server may take, and maxmemory-policy allkeys-lru"
    if not facts["maxmemory"]:
        report.add("it has no maxmemory: it grows until its machine has no memory left", todo)
    elif not facts["evicts_all_keys"]:
        report.add(
            "its maxmemory-policy evicts no records, as none expires: once full, it refuses all",
            todo,
        )


def _check_directory(store: Store, parsed: StoreUrl, report: StoreReport) -> int:
    """Check a directory; return how many bytes can be stored without evicting records."""
    root, options = parsed.path, read_options(parsed)
    if untrusted := why_untrusted(root):
        report.add(f"the directory {untrusted}: others can change it", "chown it, and chmod 700")
    report.facts["file_system"] = file_system(root)
    report.facts["shared_by_machines"] = not is_of_one_machine(root)
    found, facts = os.statvfs(root), store.facts()
    report.facts |= {name: facts[name] for name in ("used_bytes", "quarantined") if name in facts}
    quota = getattr(options, "max_bytes", None)
    report.facts["max_bytes"] = quota
    used, free = int(facts.get("used_bytes") or 0), found.f_bavail * found.f_frsize
    check_room(report, quota, used, free, found.f_favail if found.f_files else None)
    if facts.get("quarantined"):
        report.add(
            f"{facts['quarantined']} damaged records are in quarantine",
            "check the disk; `kvferry ls --removed` says when and why",
        )
    if getattr(options, "read_only", False):
        return 0
    return free if quota is None else min(free, quota - used)


def check_room(
    report: StoreReport, quota: int | None, used: int, free: int, free_files: int | None
) -> None:
    """Check that a directory has room to grow. `free_files` is None if there is no limit."""
    report.facts |= {"free_bytes": free, "free_files": free_files}
    if quota is None:
        report.add(
            f"its URL has no quota: it grows until the disk ({format_size(free)} free) is full",
            "add ?max_bytes=200GiB or what the disk can spare",
        )
    elif quota - used > free:
        report.add(
            f"its quota ({format_size(quota)}) does not fit: {format_size(used)} are used, and "
            f"the disk has {format_size(free)} free",
            f"set max_bytes to at most {format_size(used + free)}, or make room",
        )
    if free_files is not None and free_files < MIN_FREE_FILES:
        report.add(
            f"its file system has room for {free_files} more files",
            "remove small files, or make a file system with more inodes",
        )


# -- rates ----------------------------------------------------------------------------------------


@contextmanager
def _own_place(store: Store, parsed: StoreUrl) -> Iterator[Store]:
    """Yield the store for this check's records: on a server, one with a prefix of its own."""
    if not kind_of(parsed.scheme).hosts:
        yield store
        return
    name = f"{_PREFIX}{os.urandom(8).hex()}"
    path = f"{parsed.path}/{name}" if parsed.path else name
    with open_one(replace(parsed, path=path), Opening(index=False)) as own:
        yield own


def _try_record(
    store: Store, parsed: StoreUrl, report: StoreReport, wall: Callable[[], float], room: float
) -> None:
    """Write a record, read it and remove it, unless it would evict others."""
    schema = RecordSchema.for_groups(
        namespace=os.urandom(32), chunk_tokens=CHUNK_TOKENS, groups=(_GROUP,)
    )
    if room < 2 * schema.record_bytes or report.is_over.is_set():
        return
    key = ChunkKey(os.urandom(32))
    with _own_place(store, parsed) as own:
        values = own.of(schema.namespace)
        try:
            _time(values, schema, key, report)
            _check_clock(own, parsed, key, report, wall)
        finally:
            is_gone = _removed(values, key)
    if not is_gone:
        report.add(
            "a record of this check could not be deleted",
            "check the right to delete: damaged records could not be taken out either",
        )


def _time(values: Store, schema: RecordSchema, key: ChunkKey, report: StoreReport) -> None:
    image = memoryview(bytearray(schema.record_bytes))
    payload = image[schema.head_bytes :]
    payload[:] = (os.urandom(1 << 16) * (len(payload) // (1 << 16) + 1))[: len(payload)]
    table = leaf_digests(schema.components[0], payload)
    started = time.perf_counter()
    result = put_record(values, schema, key, 0, table, image, time.monotonic() + ANSWER_SECONDS)
    written = time.perf_counter()
    if result is not PutResult.STORED:
        _add_refusal(values, result, report)
        return
    size = values.read(key, [(0, image)], time.monotonic() + ANSWER_SECONDS)
    read = time.perf_counter()
    if size != len(image):
        what = "a record that was just stored is gone: the server evicts at once"
        report.add(what, "give it more memory, or its own server")
    for name, seconds in (("put", written - started), ("get", read - written)):
        report.facts[f"{name}_gb_per_second"] = float(f"{len(image) / seconds / 1e9:.3g}")


def _add_refusal(values: Store, result: PutResult, report: StoreReport) -> None:
    if result is PutResult.NO_SPACE:
        report.add(
            "it is full and evicts nothing, so nothing more is stored",
            "raise its limit, or have it evict (Valkey: maxmemory-policy allkeys-lru)",
        )
    else:
        why = f": {values.refusal}" if values.refusal else ""
        otherwise = "check the right to write, and the disk or server"
        report.add(f"it does not store{why}", _arrow(why, report.url, otherwise))


def _removed(values: Store, key: ChunkKey) -> bool:
    """Delete a record of this check; return whether it is gone."""
    if values.delete(key):
        return True
    try:
        return values.read(key, (), time.monotonic() + ANSWER_SECONDS) is None
    except StoreError:
        return False


def _check_clock(
    own: Store, parsed: StoreUrl, key: ChunkKey, report: StoreReport, wall: Callable[[], float]
) -> None:
    """Compare clocks, if the store says when a record was written."""
    if parsed.scheme == "file":
        if not report.facts.get("shared_by_machines"):
            return
        try:
            written = os.stat(record_path(parsed.path, key)).st_mtime
        except OSError:
            return
    else:
        written = next((each.last_used for each in own.scan() if each.key == key), 0.0)
    if not written:
        return
    skew = written - wall()
    report.facts["clock_skew_seconds"] = round(skew, 1)
    if abs(skew) > SKEW_SECONDS:
        report.add(
            f"its clock differs from that of this machine by {abs(skew):.0f} s, so ages are wrong",
            "synchronise both (chrony, systemd-timesyncd)",
        )


# -- namespaces -----------------------------------------------------------------------------------


def _check_namespaces(store: Store, model: Model | None, report: StoreReport) -> None:
    counts = {digest: found for digest, found in store.namespaces().items() if digest and found[0]}
    found = []
    for holding in survey(store, counts, counts):
        space, row = holding.namespace, holding.row()
        if space is not None and not space.is_opaque:
            found.append(space)
        if holding.is_described and space is None:
            report.add(
                f"the description of namespace {holding.digest.hex()[:16]} is damaged, or of "
                "another",
                "start an engine of this model, which writes it again",
            )
        if model is not None and space is not None:
            differs = list(differences_of_model(space, model.identity))
            there = {name: space.description.get(name) for name in model.options}
            differs += differences(there, model.options)
            row["read_by_model"] = not differs
            row["differs"] = differs[:8]
        report.namespaces.append(row)
    _check_sharing(found, report)
    if model is not None and report.namespaces:
        _check_ours(report)


def _check_sharing(spaces: list[Namespace], report: StoreReport) -> None:
    """Report namespaces of the same weights, unless a field in `_DELIBERATE` differs."""
    first: dict[str, Namespace] = {}
    for space in spaces:
        weights = str(space.description.get("weights"))
        other = first.setdefault(weights, space)
        if other is space:
            continue
        differs = differences(other.description, space.description)
        if differs.keys() & _DELIBERATE:
            continue
        fields = ", ".join(
            f"{name[:60]} ({str(there)[:40]}, {str(here)[:40]})"
            for name, (there, here) in list(differs.items())[:4]
        )
        report.add(
            f"namespaces {other.digest.hex()[:16]} and {space.digest.hex()[:16]} are of one model "
            f"and do not share: {fields}",
            "use the same options in both; delete old records by `kvferry rm URL --namespace`",
        )


def _check_ours(report: StoreReport) -> None:
    rows = [row for row in report.namespaces if "read_by_model" in row]
    if rows and not any(row["read_by_model"] for row in rows):
        nearest = min(rows, key=lambda row: len(str(row["differs"])))
        fields = nearest["differs"]
        names = ", ".join(str(each)[:60] for each in fields) if isinstance(fields, list) else ""
        report.add(
            f"nothing in it is of this model and configuration; the nearest namespace differs in "
            f"{names}",
            "check --model and the options, or the store of the engines that run it",
        )


# -- the model ------------------------------------------------------------------------------------


def _check_model(store: Store, parsed: StoreUrl, model: Model, report: StoreReport) -> None:
    quota = getattr(read_options(parsed), "max_bytes", None)
    if quota is not None:
        fits = quota // model.record_bytes * CHUNK_TOKENS
        report.facts["tokens_that_fit"] = fits
        longest = max(model.context_tokens or 0, CHUNK_TOKENS)
        if fits < longest:
            needed = -(-longest // CHUNK_TOKENS) * model.record_bytes
            report.add(
                f"its quota holds {fits:,} tokens of this model, less than one prompt of "
                f"{longest:,}",
                f"raise max_bytes to at least {format_size(needed)}",
            )


def run(url: str, opened: Opener, model: Model | None, seconds: float) -> StoreReport:
    """Run `check` for `seconds` at most, in a thread that may hang. Then, or after an interrupt,
    wait `CLEAN_SECONDS` at most for the check to remove its records."""
    report = StoreReport(shown_url(url))
    thread = threading.Thread(
        target=check, args=(url, opened, model, report), name="kvferry-doctor", daemon=True
    )
    thread.start()
    late = None
    try:
        thread.join(seconds)
        if thread.is_alive():  # a copy, because the thread may still write to its report
            late = replace(report, findings=list(report.findings), facts=dict(report.facts))
            late.add(f"{late.step} took more than {seconds:.0f} s", _arrow("", url, _AWAY))
    finally:
        report.is_over.set()
        thread.join(CLEAN_SECONDS)
    return report if late is None else late
