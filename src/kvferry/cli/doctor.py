"""`kvferry doctor`: what is wrong with a set-up, and what to do about it."""

from __future__ import annotations

import dataclasses
import json as json_module
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import RenderableType

from kvferry.cli import stores
from kvferry.cli.output import (
    Exit,
    JsonOption,
    JsonRow,
    emit,
    make_fact_table,
    make_namespace_table,
    progress,
    read_text,
    require_extra,
)
from kvferry.cli.prompts import about_weights, model_identity
from kvferry.doctor.findings import Finding, checked
from kvferry.errors import ConfigError
from kvferry.keys import JsonValue, ModelIdentity
from kvferry.record.schema import RecordSchema, default_chunk_tokens
from kvferry.store.base import Store
from kvferry.store.faults import Calls
from kvferry.store.kind import StoreUrl
from kvferry.store.kinds import is_private
from kvferry.store.url import read_options
from kvferry.types import KVGroup

if TYPE_CHECKING:
    from kvferry.adapters.vllm.spec import HostedModel
    from kvferry.doctor.stores import Model, StoreReport
    from kvferry.doctor.vllm import VllmConfig

_MAX_TEXT = 400


def doctor(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="URL", help="Stores to look at.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model whose KV is stored.")
    ] = None,
    vllm: Annotated[bool, typer.Option("--vllm", help="Look at the installed vLLM.")] = False,
    vllm_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON|FILE",
            help="The value of --kv-transfer-config; its stores are checked, too.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, max=3600.0, metavar="SECONDS", help="Limit for each store.")
    ] = 30.0,
    json: JsonOption = None,
) -> None:
    """Find what is wrong with a set-up: machine, stores, vLLM and its configuration.

    Writes a record of 2 MiB to each store and removes it again. Evicts nothing. Exit code 1 if
    something is wrong.

    Example: kvferry doctor file:///var/cache/kvferry --model path/to/model
    """
    from kvferry.cache.memory import machine_bytes
    from kvferry.doctor import machine
    from kvferry.record.leaves import native_leaves

    findings = machine.check_checksums(native_leaves() is not None)
    wanted, config = list(urls or []), None
    options: Mapping[str, JsonValue] = {}
    if vllm_config is not None:
        config = _read_config(vllm_config)
        findings += config.findings
        options = config.fields
        # A store in memory is right for an engine of one process, and there is nothing to look at.
        wanted += [url for url in config.stores if not is_private(url)]
    facts = None if model is None else _model_or_none(model, options)
    shares: JsonRow = {}
    if vllm:
        missing, facts, shares = _look_at_vllm(model, facts, config, options)
        findings += missing
    memory = machine_bytes()
    if config is not None:
        pool = memory, config.memory_bytes, facts, config.step_tokens
        findings += checked("machine", partial(machine.check_pool, *pool))
    reports = _look_at_stores(wanted, facts, timeout)
    findings += [each for report in reports for each in report.findings]
    about: JsonRow = {**machine.software(), "memory_bytes": memory, **shares}
    about |= _right(findings, vllm=vllm, has_config=config is not None)
    if model is not None:
        about |= {**about_weights(model), "stored_kv": _stored_kv(model), **_sizes(facts)}
    _show(about, reports, sorted(findings, key=lambda each: each.problem.severity), json)
    if findings:
        raise typer.Exit(Exit.NO)


def _sizes(facts: Model | None) -> JsonRow:
    if facts is None:  # as with recurrent states, which hosts keep in forms of their own
        return {"sizes": "not known from its config alone: an engine's first lines say them"}
    return {
        name: getattr(facts, name) for name in ("token_bytes", "record_bytes", "context_tokens")
    }


def _right(findings: list[Finding], *, vllm: bool, has_config: bool) -> JsonRow:
    """Say what was looked at, and found right."""
    wrong = {each.where for each in findings}
    right: JsonRow = {}
    if vllm and "vllm" not in wrong:
        right["plug_in"] = "found, and this vLLM is served"
    if has_config and "config" not in wrong:
        right["configuration"] = "accepted"
    return right


def _look_at_stores(urls: list[str], model: Model | None, timeout: float) -> list[StoreReport]:
    from kvferry.doctor.stores import run

    with progress() as bar:
        each = bar.track(list(dict.fromkeys(urls)), description="looking at stores")
        return [run(url, _opened, model, timeout) for url in each]


def _look_at_vllm(
    model: Path | None,
    facts: Model | None,
    config: VllmConfig | None,
    options: Mapping[str, JsonValue],
) -> tuple[list[Finding], Model | None, JsonRow]:
    """Return what is wrong with the installed vLLM, the model as it runs it, and what to say of
    engines that are to share it."""
    from kvferry.doctor.vllm import VllmConfig, check_installed, run_here

    # It logs to stdout from its import on.
    with redirect_stdout(sys.stderr), _quiet_vllm(), progress() as bar:
        bar.add_task("importing vLLM", total=None)
        findings = checked("vllm", check_installed)
        if findings or model is None:
            return findings, facts, {}
        version = options.get("weights_version")
        identity = model_identity(model, version) if facts is None else facts.identity
        given = config or VllmConfig()
        runs: list[HostedModel] = []

        def run() -> Iterator[Finding]:
            found = run_here(model, identity, given)
            if isinstance(found, Finding):
                yield found
            else:
                # Of the same directory.
                ours = dataclasses.replace(found.identity, other_weights=identity.other_weights)
                runs.append(found._replace(identity=ours))

        findings = checked("vllm", run)
    if facts is not None and runs:
        facts = _model(model, options, *runs)
    if not runs or runs[0].block_size is None:
        return findings, facts, {}
    said = f"{runs[0].block_size}, for engines of 1 to 8 ranks that are to share"
    size = runs[0].layer_state_bytes
    return findings, facts, {"block_size": said, "layer_state_bytes": size}


@contextmanager
def _quiet_vllm() -> Iterator[None]:
    """Silence vLLM's warnings: what matters of them are findings. An engine that this process or a
    child starts later logs as before."""
    name, log = "VLLM_LOGGING_LEVEL", logging.getLogger("vllm")
    given, level = os.environ.get(name), log.level
    os.environ.setdefault(name, "ERROR")  # read by vLLM's import
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
        if given is None:
            os.environ.pop(name, None)


def _read_config(given: str) -> VllmConfig:
    from kvferry.doctor.vllm import check_config

    is_json = given.lstrip().startswith("{")
    return check_config(given if is_json else read_text("--vllm-config", Path(given)))


def _opened(url: StoreUrl, calls: Calls) -> Store:
    """Open an existing store, writable unless its URL says otherwise. Its quota is left out, so the
    check evicts nothing."""
    options = {name: value for name, value in url.options.items() if name != "max_bytes"}
    is_read_only = getattr(read_options(url), "read_only", False)
    return stores.open_existing(
        dataclasses.replace(url, options=options), writable=not is_read_only, calls=calls
    )


def _stored_kv(model: Path) -> str:
    """Say what `StoredKV` would do with a model, before its weights are loaded."""
    try:
        require_extra("StoredKV", "transformers", "transformers", "torch")
    except ConfigError as error:
        return f"not known: {error}"
    from kvferry.adapters.transformers.outlook import outlook

    return str(outlook(model))


def _model_or_none(directory: Path, options: Mapping[str, JsonValue]) -> Model | None:
    """Return a model as its directory has it; None if its KV is of no form that engines share, or
    nothing here can read its config. Raises ConfigError if there is none."""
    try:
        return _model(directory, options)
    except ConfigError:
        model_identity(directory, options.get("weights_version"))  # raises if there is none
        return None  # what is served of it, and why no more, is said beside the findings


def _model(
    directory: Path, options: Mapping[str, JsonValue], runs: HostedModel | None = None
) -> Model:
    """Read what the checks need to know of a model, as its directory has it unless it `runs` in
    another way. Raises ConfigError if there is none."""
    from kvferry.doctor.stores import Model

    if runs is None:
        identity = model_identity(directory, options.get("weights_version"))
    else:
        identity = runs.identity
    groups, chunk_tokens = groups_of(directory, identity), options.get("chunk_tokens")
    if not isinstance(chunk_tokens, int):
        chunk_tokens = default_chunk_tokens(groups)
    schema = RecordSchema.for_groups(namespace=bytes(32), chunk_tokens=chunk_tokens, groups=groups)
    config = json_module.loads(read_text("config", directory / "config.json"))
    context = config.get("max_position_embeddings")
    return Model(
        identity=identity,
        knows_kernels=runs is not None and runs.knows_kernels,
        options=options,
        chunk_tokens=chunk_tokens,
        record_bytes=schema.record_bytes,
        token_bytes=schema.payload_bytes // chunk_tokens,
        context_tokens=context if type(context) is int and context > 0 else None,
    )


def groups_of(model: Path, runs: ModelIdentity | None = None) -> tuple[KVGroup, ...]:
    """The KV groups of a model, by its config alone, in the dtype in which it `runs`. Raises
    ConfigError if there is none."""
    require_extra("reading a config", "transformers", "transformers")
    from kvferry.engine.config import EngineConfig
    from kvferry.engine.connector import kv_groups
    from kvferry.engine.model_config import ModelConfig

    dtype = "auto" if runs is None else runs.config.get("dtype")
    engine = EngineConfig(dtype=dtype if dtype in ("float32", "bfloat16", "float16") else "auto")
    return kv_groups(ModelConfig(model, engine).geometry, engine.block_size)


def _show(
    about: JsonRow, reports: list[StoreReport], findings: list[Finding], json: str | None
) -> None:
    rows: list[JsonRow] = [
        {
            "code": each.problem.code,
            "severity": str(each.problem.severity),
            "where": _cut(each.where),
            "wrong": _cut(each.text),
            "todo": _cut(each.todo),
        }
        for each in findings
    ]
    summary = f"{len(rows)} things are wrong" if len(rows) > 1 else "1 thing is wrong"
    if not rows:
        summary = f"nothing is wrong (stores looked at: {len(reports)})"
    shown: list[RenderableType] = [summary]
    for row in rows:
        shown += ["", f"{row['severity']} {row['code']}, {row['where']}: {row['wrong']}",
                  f"  -> {row['todo']}"]  # fmt: skip
    shown += ["", make_fact_table(about)]
    for report in reports:
        shown += ["", f"store {report.url}"]
        if report.facts:
            shown.append(make_fact_table(report.facts))
        if report.namespaces:
            read_by = {"read by --model": "read_by_model"}
            shown.append(make_namespace_table("namespaces", report.namespaces, read_by))
    value: JsonRow = {
        "summary": summary,
        "findings": list(rows),
        "about": about,
        "stores": [
            {"url": each.url, **each.facts, "namespaces": list(each.namespaces)} for each in reports
        ],
    }
    emit(value, json, *shown)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
