"""Checks one store: whether it answers, how fast, what fits, what it holds and for whom.

`run` is the entry. A store may hang at any call, so a thread of its own runs `check` and fills a
report; `run` reads the report when it has waited long enough.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from kvferry.config import format_size
from kvferry.contract.messages import LookupMiss
from kvferry.doctor.findings import Finding, Problem, checked
from kvferry.errors import ConfigError, Fault, FaultKind, StoreError
from kvferry.filesystem import file_system, is_of_one_machine, why_untrusted
from kvferry.keys import JsonValue, ModelIdentity, Namespace
from kvferry.record.check import ReadFault, RecordInfo
from kvferry.record.schema import RecordSchema, leaf_digests
from kvferry.store.base import Store, Where
from kvferry.store.catalogue import Entry, Indexed, StoredBytes
from kvferry.store.faults import Calls, fault_kind
from kvferry.store.file.directory import record_path
from kvferry.store.kind import Opening, StoreUrl, shown_url
from kvferry.store.kinds import kind_of
from kvferry.store.maintenance import delete_or_fail, inspect
from kvferry.store.recordio import put_record
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.url import open_one, parse_store_url, read_options
from kvferry.survey import (
    are_of_blocks,
    differences,
    differences_of_model,
    of_hosts,
    survey,
    unread,
)
from kvferry.types import ChunkKey, KVGroup

ANSWER_SECONDS = 5.0
"""Time limit of each call that has a deadline."""

CLEAN_SECONDS = 5.0
SKEW_SECONDS = 60.0
MIN_FREE_FILES = 10_000
NUM_INSPECTED = 4
"""How many records are looked at."""

LATELY_SECONDS = 86400.0
"""How far back removals are looked at."""

_GROUP = KVGroup(num_layers=16, num_kv_heads=4, content_size=128, dtype="bfloat16", block_size=16)
"""A KV group whose records have 2 MiB."""

_DELIBERATE = frozenset({"tenant", "weights_version"})
"""Fields with which operators separate namespaces of one model on purpose."""

_UNKNOWN = "not known"

_PREFIX = "kvferry-doctor-"
"""Start of the names of this check's records on a server."""

Opener = Callable[[StoreUrl, Calls], Store]
"""Opens a store, and notes the calls of its client there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Facts about a model, from its directory.

    Attributes:
        options: fields of a namespace that an engine's configuration decides; empty without one.
        knows_kernels: whether `identity` has what the kernels of the engine's host decide. If not,
            an engine reads a namespace that differs in that alone, on such a host.
        chunk_tokens, record_bytes: tokens of a chunk, and the size of its record.
        token_bytes: size of the KV of one token.
        context_tokens: longest prompt; None if the config does not say.
    """

    identity: ModelIdentity
    options: Mapping[str, JsonValue]
    chunk_tokens: int
    record_bytes: int
    token_bytes: int
    context_tokens: int | None
    knows_kernels: bool = False


@dataclass(slots=True)
class StoreReport:
    """What `check` has found out about a store so far.

    Attributes:
        namespaces: a table row for each namespace that has records.
        is_over: set when `run` wants no more results; the check then removes its records.
        calls: what clients of the check do now.
    """

    url: str
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, JsonValue] = field(default_factory=dict)
    namespaces: list[dict[str, JsonValue]] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)
    step: str = "opening it"
    calls: Calls = field(default_factory=Calls)

    def add(self, problem: Problem, **values: object) -> None:
        self.findings.append(problem.at(self.url, **values))

    def add_late(self, said: str) -> None:
        """Add what has not ended in time, with the calls that it is in."""
        calls = "".join(f", in {call}" for call in dict.fromkeys(self.calls.names()))
        self.add_fault(Fault(FaultKind.LATE, f"{said}{calls}"))

    def add_fault(self, fault: Fault, step: str = "") -> None:
        """Add what a store said, and in which step it did."""
        said = f"{step} failed: {fault}" if step else fault
        self.add(Problem.of(fault.kind), said=said)


def check(url: str, opened: Opener, model: Model | None, report: StoreReport) -> None:
    """Check one store and measure it. A fault of the store, or of a check, becomes a finding.

    Args:
        opened: opens an existing store, writable unless its URL says otherwise.
        model: the model whose KV is to be stored; None: leave out the checks that need one.
    """
    report.findings += checked(
        report.url, partial(_look, url, opened, model, report), lambda: report.step
    )


def _look(
    url: str, opened: Opener, model: Model | None, report: StoreReport
) -> tuple[Finding, ...]:
    try:
        parsed = parse_store_url(url)
        read_options(parsed)
        with opened(parsed, report.calls) as store:
            _check_open(store, parsed, model, report)
        if report.calls.names():
            report.add_late("closing it takes long")
    except ConfigError as error:
        report.add_fault(error.fault)
    except StoreError as error:
        report.add_fault(error.fault, report.step)
    except OSError as error:  # of the directory, for example after its mount was lost
        report.add_fault(Fault(fault_kind(error), str(error.strerror)), report.step)
    return ()


def _check_open(store: Store, parsed: StoreUrl, model: Model | None, report: StoreReport) -> None:
    report.step = "the first answer"
    started = time.perf_counter()
    try:
        store.read(ChunkKey(os.urandom(32)), (), time.monotonic() + ANSWER_SECONDS)
    except StoreError as error:
        # A peer says so to a reader that names no namespace: it answers, and the key is right.
        if not kind_of(parsed.scheme).is_peer or error.fault.kind is not FaultKind.UNUSABLE:
            raise
    report.facts["answer_ms"] = round(1e3 * (time.perf_counter() - started), 3)
    if kind_of(parsed.scheme).is_peer:
        return  # it lists nothing, and takes no records
    room = math.inf
    if kind_of(parsed.scheme).is_directory:
        room = _check_directory(store, parsed, report)
    report.step = "writing a record"
    _try_record(store, parsed, report, room)
    if "put_gb_per_second" in report.facts:
        report.step = "asking for its limits"
        _check_eviction(store.catalogue().facts(), report)
    report.step = "listing its records"
    _check_records(store, report)
    _check_namespaces(store, model, report)
    quota = report.facts.get("max_bytes")
    if model is not None and isinstance(quota, int):
        _check_quota(quota, model, report)


def _check_eviction(facts: Mapping[str, int | bool | None], report: StoreReport) -> None:
    """Check that a server that says how it evicts goes on storing when it is full."""
    if "maxmemory" not in facts:
        return
    report.facts |= facts
    if not facts["maxmemory"]:
        report.add(Problem.NO_MAXMEMORY)
    elif not facts["evicts_all_keys"]:
        report.add(Problem.EVICTS_NOTHING)


def _check_records(store: Store, report: StoreReport) -> None:
    """Look at the heads of a few records, and for files that something else removed."""
    found = {
        entry.key: inspect(store, entry)
        for entry in islice(store.catalogue().scan(), NUM_INSPECTED)
    }
    absent = {key for key, fault in found.items() if fault is ReadFault.ABSENT}
    wrong = [fault for fault in found.values() if isinstance(fault, ReadFault)]
    if wrong := [fault for fault in wrong if fault is not ReadFault.ABSENT]:
        report.add(Problem.DAMAGED, num=len(wrong), of=len(found), why=wrong[0])
    shards = [info for info in found.values() if isinstance(info, RecordInfo) and info.is_shard]
    if shards:
        report.add(Problem.SHARDS, num=len(shards), of=len(found))
    index = Indexed.find(store)
    # Another machine has an index of its own, so what it evicts is gone without a reason here.
    if index is None or report.facts["shared_by_machines"]:
        return
    removals = index.removals(sys.maxsize)
    since = time.time() - LATELY_SECONDS
    gone = absent | {each.key for each in removals if each.at > since}
    # One that kvferry removes may look as if it had vanished, too, to a process that compares then.
    if gone - {each.key for each in removals if each.reason != LookupMiss.VANISHED}:
        report.add(Problem.VANISHED)


def _check_directory(store: Store, parsed: StoreUrl, report: StoreReport) -> int:
    """Check a directory; return how many bytes can be stored without evicting records."""
    root, options = parsed.path, read_options(parsed)
    shares_group = getattr(options, "mode", "") == "0770"
    if untrusted := why_untrusted(root, shares_group=shares_group):
        report.add(Problem.UNTRUSTED, why=untrusted)
    report.facts["file_system"] = file_system(root)
    report.facts["shared_by_machines"] = not is_of_one_machine(root)
    found, facts = os.statvfs(root), store.catalogue().facts()
    report.facts |= {name: facts[name] for name in ("used_bytes", "quarantined") if name in facts}
    # A store of an earlier version does not know the quota of its engines.
    quota = getattr(options, "max_bytes", None) or facts.get("max_bytes", _UNKNOWN)
    report.facts["max_bytes" if quota != _UNKNOWN else "quota"] = quota
    used, free = int(facts.get("used_bytes") or 0), found.f_bavail * found.f_frsize
    check_room(report, quota, used, free, found.f_favail if found.f_files else None)
    if facts.get("quarantined"):
        report.add(Problem.QUARANTINE, num=facts["quarantined"])
    if getattr(options, "read_only", False):
        return 0
    return min(free, quota - used) if isinstance(quota, int) else free


def check_room(
    report: StoreReport, quota: int | str | None, used: int, free: int, free_files: int | None
) -> None:
    """Check that a directory has room to grow. `quota` is a text if it is not known, and
    `free_files` is None if there is no limit."""
    report.facts |= {"free_bytes": free, "free_files": free_files}
    sizes = {"used": used, "free": free, "most": used + free}
    texts = {name: format_size(size) for name, size in sizes.items()}
    if quota is None:
        report.add(Problem.NO_QUOTA, **texts)
    elif isinstance(quota, int) and quota - used > free:
        report.add(Problem.QUOTA_ABOVE_DISK, **texts, quota=format_size(quota))
    if free_files is not None and free_files < MIN_FREE_FILES:
        report.add(Problem.FEW_FILES, free=free_files)


# -- rates ----------------------------------------------------------------------------------------


def _own_place(parsed: StoreUrl) -> StoreUrl:
    """Return where this check's records belong: on a server, below a prefix of their own."""
    if not kind_of(parsed.scheme).hosts:
        return parsed
    name = f"{_PREFIX}{os.urandom(8).hex()}"
    return replace(parsed, path=f"{parsed.path}/{name}" if parsed.path else name)


def _try_record(store: Store, parsed: StoreUrl, report: StoreReport, room: float) -> None:
    """Write a record, read it and remove it, unless it would evict others."""
    schema = RecordSchema.for_groups(namespace=os.urandom(32), chunk_tokens=128, groups=(_GROUP,))
    if room < 2 * schema.record_bytes or report.is_over.is_set():
        return
    key = ChunkKey(os.urandom(32))
    place = _own_place(parsed)
    opening = Opening(namespace=schema.namespace, calls=report.calls)
    with nullcontext(store) if place is parsed else open_one(place, opening) as own:
        try:
            values = own.in_namespace(schema.namespace)
            has_client = isinstance(own, RemoteStore)
            if _time(values, schema, key, report) and has_client:
                with open_one(place, opening) as other:  # which has not seen it stored
                    _look_up(other, key, report)
            _check_clock(own, parsed, key, report)
        finally:
            try:
                delete_or_fail(own, Entry(key, StoredBytes(0), 0.0, schema.namespace), 0)
            except StoreError:
                report.add(Problem.NOT_DELETED)


def _look_up(other: Store, key: ChunkKey, report: StoreReport) -> None:
    """Ask for a stored record as look-ups of an engine do."""
    faults: list[StoreError] = []
    other.on_result(lambda fault: faults.append(fault) if fault is not None else None)
    other.probe([key])
    until = time.monotonic() + ANSWER_SECONDS
    while (found := other.where(key)) is Where.ASKED and time.monotonic() < until:
        time.sleep(0.01)
    if faults:
        report.add_fault(faults[0].fault, "looking it up")
    elif found is Where.ASKED:
        report.add_late(f"looking it up took more than {ANSWER_SECONDS:g} s")
    elif found is not Where.HERE:
        report.add(Problem.NOT_FOUND)


def _time(values: Store, schema: RecordSchema, key: ChunkKey, report: StoreReport) -> bool:
    """Write the record and read it. Whether it is there."""
    image = memoryview(bytearray(schema.record_bytes))
    payload = image[schema.head_bytes :]
    payload[:] = os.urandom(len(payload))  # which no server compresses
    table = leaf_digests(schema.components[0], payload)
    started = time.perf_counter()
    answer = put_record(values, schema, key, 0, table, image, time.monotonic() + ANSWER_SECONDS)
    written = time.perf_counter()
    if answer.fault is not None:
        report.add_fault(answer.fault, "storing it")
        return False
    size = values.read(key, [(0, image)], time.monotonic() + ANSWER_SECONDS)
    read = time.perf_counter()
    if size != len(image):
        report.add(Problem.EVICTS_AT_ONCE)
    for name, seconds in (("put", written - started), ("get", read - written)):
        report.facts[f"{name}_gb_per_second"] = float(f"{len(image) / seconds / 1e9:.3g}")
    return size == len(image)


def _check_clock(own: Store, parsed: StoreUrl, key: ChunkKey, report: StoreReport) -> None:
    """Compare clocks, if the store says when a record was written."""
    written = 0.0
    if not kind_of(parsed.scheme).is_directory:
        written = next((each.last_used for each in own.catalogue().scan() if each.key == key), 0.0)
    elif report.facts.get("shared_by_machines"):
        with suppress(OSError):  # it was removed meanwhile
            written = os.stat(record_path(parsed.path, key)).st_mtime
    if not written:
        return
    skew = written - time.time()
    report.facts["clock_skew_seconds"] = round(skew, 1)
    if abs(skew) > SKEW_SECONDS:
        report.add(Problem.CLOCK, skew=round(abs(skew)))


# -- namespaces -----------------------------------------------------------------------------------


def _check_namespaces(store: Store, model: Model | None, report: StoreReport) -> None:
    counts = {
        digest: found
        for digest, found in store.catalogue().namespaces().items()
        if digest and found[0]
    }
    found = []
    holdings = survey(store, counts, counts)
    if (why := unread(holdings)) is not None and why.kind is not FaultKind.LATE:
        report.add_fault(why)
    for holding in holdings:
        space, row = holding.namespace, holding.row()
        if space is not None and not space.is_opaque:
            found.append(space)
        if holding.is_described and space is None:
            report.add(Problem.DESCRIPTION, namespace=holding.digest.hex()[:16])
        if model is not None and space is not None:
            differs = list(differences_of_model(space, model.identity))
            there = {name: space.description.get(name) for name in model.options}
            differs += differences(there, model.options)
            ignored = [] if model.knows_kernels else of_hosts(differs)
            row["read_by_model"] = not {*differs} - {*ignored}
            row["differs"] = differs[:8]
        report.namespaces.append(row)
    _check_sharing(found, report)
    if model is not None and report.namespaces:
        _check_ours(report)


def _check_sharing(spaces: list[Namespace], report: StoreReport) -> None:
    """Report namespaces of the same weights, unless a field in `_DELIBERATE` differs."""
    first: dict[str, Namespace] = {}
    for space in spaces:
        other = first.setdefault(str(space.description.get("weights")), space)
        differs = differences(other.description, space.description)
        if other is space or differs.keys() & _DELIBERATE:
            continue
        options = differs.keys() - of_hosts(differs)
        fields = ", ".join(
            f"{name[:60]} ({str(there)[:40]}, {str(here)[:40]})"
            for name, (there, here) in list(differs.items())[:4]
            if name in options or not options
        )
        one, two = (each.digest.hex()[:16] for each in (other, space))
        if are_of_blocks(space, differs):
            report.add(Problem.OTHER_BLOCKS, one=one, other=two, fields=fields)
        elif options:
            report.add(Problem.NOT_SHARED, one=one, other=two, fields=fields)
        else:
            who = f"namespaces {one} and {two} of one model"
            report.add(Problem.OTHER_KERNELS, who=who, fields=fields)


def _check_ours(report: StoreReport) -> None:
    rows = [row for row in report.namespaces if "read_by_model" in row]
    if rows and not any(row["read_by_model"] for row in rows):
        differs = min((_strings(row["differs"]) for row in rows), key=lambda each: len(str(each)))
        options = [each for each in differs if each not in of_hosts(differs)]
        fields = ", ".join(each[:60] for each in options or differs)
        if options:
            report.add(Problem.OTHER_MODEL, fields=fields)
        else:
            who = "the vLLM of this environment and the nearest namespace"
            report.add(Problem.OTHER_KERNELS, who=who, fields=fields)


def _strings(names: JsonValue) -> list[str]:
    return [str(each) for each in names] if isinstance(names, list) else []


def _check_quota(quota: int, model: Model, report: StoreReport) -> None:
    """Check that a quota holds a prompt."""
    fits = quota // model.record_bytes * model.chunk_tokens
    report.facts["tokens_that_fit"] = fits
    longest = max(model.context_tokens or 0, model.chunk_tokens)
    if fits < longest:
        needed = format_size(-(-longest // model.chunk_tokens) * model.record_bytes)
        report.add(
            Problem.QUOTA_BELOW_PROMPT, fits=f"{fits:,}", longest=f"{longest:,}", needed=needed
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
            late.add_late(f"{late.step} took more than {seconds:.0f} s")
    finally:
        report.is_over.set()
        thread.join(CLEAN_SECONDS)
    return report if late is None else late
