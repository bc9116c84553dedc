"""`kvferry doctor`: planted misconfigurations, each found, and nothing found where all is right."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import time
from collections.abc import Callable
from importlib.metadata import EntryPoints
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvferry import doctor
from kvferry.cache.memory import machine_bytes
from kvferry.cli import output
from kvferry.doctor.findings import Problem, Severity
from kvferry.doctor.machine import check_checksums, check_pool
from kvferry.doctor.stores import Model, StoreReport, check, check_room
from kvferry.doctor.stores import run as run_check
from kvferry.doctor.vllm import check_installed
from kvferry.engine import LLM, SamplingParams
from kvferry.errors import ConfigError, Fault, FaultKind, StoreError
from kvferry.keys import HOST_FIELDS, ModelIdentity
from kvferry.record import schema
from kvferry.record.schema import RecordSchema
from kvferry.store.base import NO_DEADLINE, Put, Store
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.memory import MemoryStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.store.url import open_one
from kvferry.types import ChunkKey, GroupShard
from tests.adapters.transformers.generating import prompt, reuse
from tests.cli.test_explain import GROUP, put_prompt, put_row, space_of, with_states
from tests.cli.test_hostile_names import NAMES, is_plain
from tests.cli.test_remote_commands import guarded
from tests.servers.process import LOCALHOST, free_ports
from tests.servers.proxy import running_proxy
from tests.servers.valkey import running_valkey

__all__ = ["guarded"]

QUOTA = "?max_bytes=100MiB"

CONFIG = {
    "kv_connector": "KVFerryConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {},
}
IN_MULTI = {
    "kv_connector": "MultiConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"connectors": [CONFIG]},
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "store").mkdir(mode=0o700)
    return tmp_path / "store"


@pytest.fixture
def url(root):
    """Of a healthy store."""
    open_one(root.as_uri()).close()
    return f"{root.as_uri()}{QUOTA}"


@pytest.fixture
def found(run):
    """The findings of a run, as text: code, place and what is wrong."""

    def ask(*arguments: object) -> list[str]:
        ran = run("doctor", *arguments, "--json", "-")
        assert ran.code in (0, 1), ran.err
        value = json.loads(ran.out)
        assert ran.code == bool(value["findings"])
        severities = [each["severity"] for each in value["findings"]]
        assert severities == sorted(severities)  # errors come first
        assert set(severities) <= set(Severity)
        assert all(each["todo"] for each in value["findings"])
        return [f"{each['code']} {each['where']}: {each['wrong']}" for each in value["findings"]]

    return ask


def faults(url: str) -> list[Problem]:
    report = run_check(
        url, lambda parsed, _calls: open_one(parsed, Opening(index=False)), None, 60.0
    )
    return [each.problem for each in report.findings]


def config(**changes: object) -> str:
    return json.dumps({**CONFIG, **changes})


# -- all is right ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "valkey", "s3"])
def test_nothing_is_wrong_with_a_healthy_set_up(run, url_of, url, kind):
    place = url if kind == "file" else url_of(kind)
    plain = place.partition("?")[0] if kind == "file" else place
    put_prompt(plain)
    ran = run("doctor", place, "--vllm-config", config(), "--json", "-")
    value = json.loads(ran.out)
    assert (ran.code, value["findings"]) == (0, [])
    (store,) = value["stores"]
    assert store["put_gb_per_second"] > 0
    assert store["get_gb_per_second"] > 0
    assert [each["num_records"] for each in store["namespaces"]] == [4]
    shown = run("doctor", place)
    assert shown.code == 0
    assert shown.out.startswith("nothing is wrong (stores looked at: 1)")
    assert is_plain(shown.out)
    # Its own records are gone, and no others.
    with open_one(plain) as store:
        assert sum(each.stored_bytes > 0 for each in store.catalogue().scan()) == 4


def test_a_store_that_an_engine_filled_is_read_by_its_model(run, found, url, model_dir, tmp_path):
    plain = url.partition("?")[0]
    with LLM(model_dir, store=plain, connector_options={"chunk_tokens": 16}) as llm:
        llm.generate([range(3, 70)], SamplingParams(max_tokens=1))
        assert llm.drain(60)
    options = ["--model", model_dir]
    assert found(url, *options) == []
    value = json.loads(run("doctor", url, *options, "--json", "-").out)
    (store,) = value["stores"]
    assert [each["read_by_model"] for each in store["namespaces"]] == [True]
    assert store["tokens_that_fit"] > 1024
    assert value["about"]["token_bytes"] == 3 * 2 * 4 * 8 * 4


def test_nothing_is_wrong_with_a_store_that_transformers_filled(run, found, url, model_dir):
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert reuse(model, url.partition("?")[0], prompt(70)).num_saved == 64
    options = ["--model", model_dir]
    assert found(url, *options) == []
    (store,) = json.loads(run("doctor", url, *options, "--json", "-").out)["stores"]
    assert [each["read_by_model"] for each in store["namespaces"]] == [True]


def test_nothing_is_wrong_with_a_peer_that_has_the_same_key(model_dir, tmp_path):
    (port,) = free_ports(1)
    for name in ("ours", "other"):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_bytes(name.encode() * 32)
    peer = f"{LOCALHOST}:{port}?key_file={tmp_path}"
    with LLM(model_dir, store="memory://", connector_options={"serve": f"{peer}/ours"}):
        assert faults(f"peer://{peer}/ours") == []
        assert faults(f"peer://{peer}/other") == [Problem.LOGIN]
    assert faults(f"peer://{peer}/ours") == [Problem.AWAY]


def test_nothing_is_wrong_with_a_mooncake_that_can_be_listed(url_of):
    place = url_of("mooncake")
    put_prompt(place)
    assert faults(place) == []
    assert faults(place.partition("?")[0]) == [Problem.UNLISTED]


# -- what of a model is served --------------------------------------------------------------------

OUTLOOKS = {
    "llama": ({}, "served, in records that engines and vLLM share$"),
    "gpt_oss": ({}, "served, in records that engines and vLLM share$"),
    "qwen3_5": ({}, r"served in records of its own if its cache passes a proof at the first start"),
    "gemma3n_text": ({}, r"served in records of its own if .* keeps KV in 20 layers; .* says 35"),
    "mamba": ({}, "served in records of its own if its cache passes a proof"),
    "published quantised": (
        {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
        "served, in records of its own: its weights were published quantised$",
    ),
    "quantised for others": (
        {"model_type": "llama", "quantization_config": {"quant_method": "modelopt"}},
        r"refused: Transformers ignores the quantization_config \(modelopt\)",
    ),
    "quantised by foreign kernels": (
        {"model_type": "llama", "quantization_config": {"quant_method": "vptq"}},
        "refused: the model is quantised by 'vptq', whose kernels have no known name",
    ),
    "t5": ({}, "refused: .* an encoder-decoder"),
    "openai-gpt": ({}, "refused: OpenAIGPTLMHeadModel takes no cache"),
    "vit": ({}, "refused: .* has no class for it that generates text"),
    "length-dependent": (
        {
            "model_type": "llama",
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
        "refused: .* 'dynamic' rotary embeddings",
    ),
    "remote code": (
        {"model_type": "of_its_own", "auto_map": {"AutoConfig": "configuration.Its"}},
        "refused: .*config.json cannot be used: .*custom code",
    ),
    "newer than this release": (
        {"model_type": "of_tomorrow"},
        "refused: .*config.json cannot be used: .*does not recognize this architecture",
    ),
}


@pytest.mark.parametrize("name", OUTLOOKS)
def test_what_is_served_of_a_model_is_said_before_it_is_loaded(run, tmp_path, name):
    fields, expected = OUTLOOKS[name]
    config = fields or CONFIG_MAPPING[name]().to_dict()  # of the full size
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    (tmp_path / "model.safetensors").write_bytes(b"no weight is read")
    ran = run("doctor", "--model", tmp_path, "--json", "-")
    assert ran.code == 0
    about = json.loads(ran.out)["about"]
    assert re.match(expected, about["stored_kv"])
    assert ("sizes" in about) == ("record_bytes" not in about)


def test_without_transformers_it_is_said_that_nothing_is_known(run, model_dir, monkeypatch):
    monkeypatch.setattr(output, "find_spec", lambda name: None)
    ran = run("doctor", "--model", model_dir, "--json", "-")
    assert ran.code == 0
    about = json.loads(ran.out)["about"]["stored_kv"]
    assert re.match("not known: StoredKV needs transformers.*pip install", about)


# -- stores ---------------------------------------------------------------------------------------


def test_2_a_server_that_hangs(found, url_of):
    place = url_of("valkey")
    port = int(re.search(rf"{LOCALHOST}:(\d+)", place)[1])
    with running_proxy(port) as proxy:
        proxy.black_hole()
        started = time.monotonic()
        (what,) = found(place.replace(str(port), str(proxy.port)), "--timeout", 1)
        assert time.monotonic() - started < 60
    assert re.search("^late .*(took more than 1 s|the first answer failed)", what)


def test_3_a_directory_that_is_no_store(found, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis").touch()
    for path in ("missing", "other"):
        (what,) = found((tmp_path / path).as_uri())
        assert what.startswith("unusable ")
        assert str(tmp_path / path) in what


def change_records(root: Path, changed: Callable[[bytes], bytes | None]) -> None:
    """Replace each record's file by another one, or by none."""
    for path in [each for each in (root / "records").rglob("*") if each.is_file()]:
        content = changed(path.read_bytes())
        path.unlink()
        if content is not None:
            path.write_bytes(content)


def quarantine_one(root: Path) -> None:
    with open_one(root.as_uri()) as store:
        store.discard(next(store.catalogue().scan()).key, "bad_checksum")


def store_shard(root: Path) -> None:
    groups = (dataclasses.replace(GROUP, num_layers=2),)
    whole = RecordSchema.for_groups(namespace=space_of().digest, chunk_tokens=4, groups=groups)
    shard = whole.of_shard([GroupShard(layers=(0, 1), heads=(0, 1))])
    key, table = ChunkKey(bytes(32)), bytes(16 * shard.num_leaves)
    head = shard.encode_head(key, 0, table, of=bytes(32))
    with open_one(root.as_uri()) as store:
        for entry in list(store.catalogue().scan()):
            store.delete(entry.key)
        assert store.put(key, [head, bytes(shard.payload_bytes)]).is_there


def damage_description(root: Path) -> None:
    (root / "namespaces" / f"{space_of().digest.hex()}.json").write_text("[" * 10_000)


@pytest.mark.parametrize(
    ("code", "says", "options", "plant"),
    [
        ("no-quota", "has no quota", "", None),
        ("quota-above-disk", "its quota (9000TiB) does not fit", "?max_bytes=9000TiB", None),
        ("untrusted", "can be written by others", QUOTA, lambda root: root.chmod(0o777)),
        ("quarantine", "1 damaged records", QUOTA, quarantine_one),
        ("description", "is damaged, or of another", QUOTA, damage_description),
        ("shards", "1 of 1 records", QUOTA, store_shard),
        ("damaged", "4 of 4", QUOTA, lambda root: change_records(root, lambda old: old[:100])),
        (
            "damaged",
            "4 of 4",
            QUOTA,
            lambda root: change_records(root, lambda old: b"\0" + old[1:]),
        ),
        ("vanished", "not by kvferry", QUOTA, lambda root: change_records(root, lambda _: None)),
    ],
)
def test_what_is_wrong_with_a_directory(found, root, code, says, options, plant):
    put_prompt(root.as_uri())
    if plant is not None:
        plant(root)
    (what,) = found(f"{root.as_uri()}{options}")
    assert what.startswith(f"{code} {root.as_uri()}: ")
    assert says in what


def test_6_a_quota_that_is_smaller_than_a_prompt(found, url, model_dir):
    (what,) = found(url.replace("100MiB", "150KiB"), "--model", model_dir)
    assert what.startswith("quota-below-prompt ")
    assert "its quota holds 128 tokens of this model, less than one prompt of 1,024" in what


def test_7_few_free_inodes():
    report = StoreReport("file:///kv")
    check_room(report, 1 << 30, 0, 1 << 40, 9)
    (finding,) = report.findings
    assert (finding.problem, "room for 9 more files" in finding.text) == (Problem.FEW_FILES, True)


def test_10_a_server_that_is_full_and_does_not_evict(found, tmp_path):
    with running_valkey(maxmemory="1mb", maxmemory_policy="noeviction") as server:
        whats = found(f"valkey://{LOCALHOST}:{server.port}/kv")
    assert len(whats) == 1
    assert whats[0].startswith("full ")


def test_each_kind_of_fault_has_a_finding_of_its_own(guarded, url_of):
    limits = {"maxmemory": "100mb", "maxmemory_policy": "allkeys-lru"}
    place = f"{LOCALHOST}:{guarded.port}/kv"
    assert faults(f"valkey://{place}") == [Problem.LOGIN]
    assert faults(f"valkey://:no@{place}") == [Problem.LOGIN]
    assert faults(f"valkey://reader:correct-horse@{place}") == [Problem.RIGHTS]
    assert faults(f"valkeys://{place}") == [Problem.LATE]
    (bucket,) = faults(url_of("s3").replace("http:", "https:"))
    assert bucket in (Problem.PROTOCOL, Problem.LATE)
    guarded.ask("ACL", "SETUSER", "keeper", "on", ">horse", "~*", "+@all", "-del", "-unlink")
    assert Problem.NOT_DELETED in faults(f"valkey://keeper:horse@{place}")
    with running_valkey(**limits) as server:
        place = f"{LOCALHOST}:{server.port}/kv"
        assert faults(f"valkey://{place}?cluster=true") == [Problem.CLUSTER]
        server.ask("REPLICAOF", LOCALHOST, "1")
        assert faults(f"valkey://{place}")[0] is Problem.READ_ONLY
    with running_valkey(cluster_enabled="yes") as server:
        assert faults(f"valkey://{LOCALHOST}:{server.port}/kv") == [Problem.CLUSTER]
    assert faults(f"valkey://{place}") == [Problem.AWAY]
    assert faults(f"valkeys://{place}") == [Problem.AWAY]  # refused: TLS is not the question


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "no-maxmemory"),
        ({"maxmemory_policy": "allkeys-lru"}, "no-maxmemory"),
        ({"maxmemory": "100mb", "maxmemory_policy": "noeviction"}, "evicts-nothing"),
        ({"maxmemory": "100mb", "maxmemory_policy": "volatile-lru"}, "evicts-nothing"),
        ({"maxmemory": "100mb", "maxmemory_policy": "allkeys-lfu"}, None),
    ],
)
def test_a_server_that_will_stop_storing(found, options, says):
    with running_valkey(**options) as server:
        whats = found(f"valkey://{LOCALHOST}:{server.port}/kv")
    assert [each.split()[0] for each in whats] == ([says] if says else [])


def test_13_two_engines_of_one_model_that_do_not_share(found, url):
    plain = url.partition("?")[0]
    put_prompt(plain)
    put_prompt(plain, space_of("another tenant"))  # which is deliberate
    assert found(url) == []
    put_prompt(plain, space_of(rope_theta=5))
    (what,) = found(url)
    assert what.startswith("not-shared ")
    assert "do not share: config.rope_theta" in what


def test_engines_of_one_hybrid_whose_blocks_differ_need_one_block_size(found, url):
    plain = url.partition("?")[0]
    put_prompt(plain, with_states(4, 2))
    put_prompt(plain, with_states(7, 1))
    (what,) = found(url)
    assert what.startswith("other-blocks ")
    assert "chunk_tokens (" in what
    assert "--block-size" in Problem.OTHER_BLOCKS.todo
    put_prompt(plain, with_states(7, 1, rope_theta=5))
    assert {each.split()[0] for each in found(url)} == {"other-blocks", "not-shared"}


KERNELS = {
    "cpu_blocks": "amx of 128 tokens",
    "latents_of": "vllm on cuda",
    "states_of": "vllm on cuda",
    "whole_blocks": ["64 tokens on cuda"],
}
"""A value of each field that no option sets."""


def test_the_kernels_of_a_host_have_a_field_each():
    assert KERNELS.keys() == HOST_FIELDS


@pytest.mark.parametrize("field", KERNELS)
def test_no_option_is_advised_where_kernels_keep_engines_apart(found, url, field):
    plain = url.partition("?")[0]
    put_prompt(plain)
    put_prompt(plain, space_of(**{field: KERNELS[field]}))
    (what,) = found(url)
    assert what.startswith("other-kernels ")
    assert f"do not share: config.{field}" in what
    assert "option" not in Problem.OTHER_KERNELS.todo.replace("no option", "")


@pytest.mark.parametrize("field", KERNELS)
def test_an_option_that_differs_is_named_without_the_kernels(found, url, field):
    plain = url.partition("?")[0]
    put_prompt(plain)
    put_prompt(plain, space_of(rope_theta=5, **{field: KERNELS[field]}))
    (what,) = found(url)
    assert what.startswith("not-shared ")
    assert "config.rope_theta" in what
    assert field not in what


@pytest.mark.parametrize("field", KERNELS)
@pytest.mark.parametrize("knows_kernels", [False, True])
def test_a_store_of_an_engine_of_this_model_on_a_host_of_its_own(url, field, knows_kernels):
    """A directory does not say on which host its engine runs; the vLLM of an environment does."""
    put_prompt(url.partition("?")[0], space_of(**{field: KERNELS[field]}))
    written = space_of().description
    model = Model(
        identity=ModelIdentity(
            weights=bytes.fromhex(written["weights"]), config=written["config"], name="m"
        ),
        options={},
        chunk_tokens=7,
        record_bytes=7000,
        token_bytes=1000,
        context_tokens=None,
        knows_kernels=knows_kernels,
    )
    report = run_check(
        url, lambda parsed, _calls: open_one(parsed, Opening(index=False)), model, 60.0
    )
    assert [each.problem for each in report.findings] == [Problem.OTHER_KERNELS] * knows_kernels
    assert [each["read_by_model"] for each in report.namespaces] == [not knows_kernels]


def test_14_a_store_of_another_model(found, url, model_dir):
    put_prompt(url.partition("?")[0])
    (what,) = found(url, "--model", model_dir)
    assert what.startswith("other-model ")
    assert "the nearest namespace differs in config." in what


def test_files_that_no_host_reads_make_no_other_model_and_are_named(
    run, url, model_dir, tokens_file, tmp_path
):
    plain, both = url.partition("?")[0], tmp_path / "both"
    with LLM(model_dir, store=plain, connector_options={"chunk_tokens": 16}) as llm:
        llm.generate([[7] * 40], SamplingParams(max_tokens=1))
    shutil.copytree(model_dir, both)
    (both / "pytorch_model.bin").write_bytes(b"twin")
    (both / "consolidated.safetensors").write_bytes(b"of Mistral")
    found = json.loads(run("doctor", url, "--model", both, "--json", "-").out)
    assert found["about"]["weights"].startswith("model.safetensors (by its content")
    assert found["about"]["not_counted"] == (
        "consolidated.safetensors, pytorch_model.bin; vLLM and SGLang count "
        "consolidated.safetensors"
    )
    assert [each["read_by_model"] for each in found["stores"][0]["namespaces"]] == [True]
    (both / "model.safetensors").write_bytes(
        (both / "model.safetensors").read_bytes()[:-4] + b"more"
    )
    said = run("explain", plain, "--model", both, "--tokens", tokens_file).out
    assert f"The weights of {both}: model.safetensors (by its content" in " ".join(said.split())


def test_a_store_that_keeps_nothing():
    """A stand-in: a server does so only while its buffers are full."""

    class Forgetful(MemoryStore):
        def read(self, key, ranges, deadline=NO_DEADLINE):
            return None

    report = StoreReport("memory:")
    check("memory://x", lambda *_: Forgetful(), None, report)
    assert [each.problem for each in report.findings] == [Problem.EVICTS_AT_ONCE]


def test_a_directory_that_refuses_records(found, url, root):
    shutil.rmtree(root / "records")
    (root / "records").write_text("")
    (what,) = found(url)
    assert what.startswith("refused ")


def test_rows_of_a_host_are_no_damaged_description(run, found, url):
    plain = url.partition("?")[0]
    put_prompt(plain)
    put_row(plain)
    assert found(url) == []
    (store,) = json.loads(run("doctor", url, "--json", "-").out)["stores"]
    assert {each["model"] for each in store["namespaces"]} == {"m", "m (rows of vllm)"}


def test_17_a_clock_that_differs(url_of, monkeypatch):
    report = StoreReport("s3://bucket")
    ahead = SimpleNamespace(**vars(time) | {"time": lambda: time.time() + 3600})
    monkeypatch.setattr("kvferry.doctor.stores.time", ahead)
    check(url_of("s3"), lambda parsed, _calls: open_one(parsed, Opening(index=False)), None, report)
    (finding,) = report.findings
    assert finding.problem is Problem.CLOCK
    assert re.search("its clock differs .* by 3[56]..", finding.text)


# -- vLLM's configuration -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        (config(kv_rol="kv_both"), "config", "unknown key 'kv_rol'; did you mean 'kv_role'?"),
        (config(kv_connector="KVFerryConector"), "config", "mean 'KVFerryConnector'?"),
        ('{"kv_role": "kv_both"}', "config", "kv_connector is missing"),
        (config(kv_role="kv_boht"), "config", "unknown kv_role 'kv_boht'; did you mean 'kv_both'?"),
        (config(kv_role=None), "config", "kv_role is missing"),
        (
            config(kv_connector_extra_config={"chunk_token": 64}),
            "config",
            "did you mean 'chunk_tokens'?",
        ),
        (config(kv_connector_extra_config={"store": 3}), "config", "option 'store'"),
        (config(kv_connector_extra_config=[3]), "config", "is a list, not an object"),
        (
            config(kv_connector_module_path="kvferry.vllm"),
            "config",
            "unknown kv_connector_module_path",
        ),
        (
            json.dumps({"kv-transfer-config": CONFIG, "enable-prefix-caching": False}),
            "no-prefix-caching",
            "prefix caching is off",
        ),
        (
            json.dumps({"kv_transfer_config": IN_MULTI, "pipeline-parallel-size": "2"}),
            "config",
            "pipeline_parallel_size=2 is not served inside a MultiConnector",
        ),
        (
            json.dumps({"kv_transfer_config": CONFIG, "decode-context-parallel-size": "2"}),
            "config",
            "decode_context_parallel_size=2 is not served",
        ),
        (json.dumps({"kv_transfer_config": [3]}), "config", "kv_transfer_config is no object"),
        ("{'kv_role': 'kv_both'}", "config", "no JSON"),
        ("{" + '"a":[' * 50_000, "config", "no JSON"),
        ('{"store": "file:///kv"}', "config", "kv_connector is missing"),
    ],
)
def test_18_the_json(found, given, code, says):
    (what,) = found("--vllm-config", given)
    assert what.startswith(f"{code} ")
    assert says in what


def test_errors_come_before_warnings_wherever_they_are(found, url):
    transfer = {**CONFIG, "kv_role": None}
    given = json.dumps({"enable_prefix_caching": False, "kv_transfer_config": transfer})
    whats = found(url.partition("?")[0], "--vllm-config", given)
    assert [each.split()[0] for each in whats] == ["config", "no-prefix-caching", "no-quota"]


def test_every_option_of_the_connector_is_known(found):
    extra = {"store": "memory://a", "handover": False, "chunk_tokens": 64, "save_generated": True}
    extra["client_options"] = ["store"]
    assert found("--vllm-config", config(kv_connector_extra_config=extra)) == []
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 4, "max_model_len": None}
    assert found("--vllm-config", json.dumps({"kv_transfer_config": CONFIG, **sizes})) == []


def test_stores_of_the_configuration_are_looked_at(found, url):
    inner = {**CONFIG, "kv_connector_extra_config": {"store": ["memory://a", url + "&x=1"]}}
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}, inner]},
    }
    (what,) = found("--vllm-config", json.dumps(multi))
    assert "unknown option 'x'" in what


def test_the_default_store_is_looked_at(run, found, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert found("--vllm-config", config()) == []  # the first start makes it
    root = tmp_path / "kvferry" / "kv"
    root.mkdir(parents=True, mode=0o700)
    put_prompt(root.as_uri())
    assert found("--vllm-config", config()) == []
    root.chmod(0o777)
    (what,) = found("--vllm-config", config())
    assert what.startswith(f"untrusted {root.as_uri()}: ")
    (other,) = found("--vllm-config", config(kv_connector_extra_config={"store": "file:///none"}))
    assert "/none" in other


def test_chunks_that_nobody_sized_have_the_size_that_an_engine_gives_them(
    run, found, url, model_dir, monkeypatch
):
    token_bytes = 3 * 2 * 4 * 8 * 4
    monkeypatch.setattr(schema, "CHUNK_BYTES", 32 * token_bytes)
    with LLM(model_dir, store=url.partition("?")[0]) as llm:
        llm.generate([range(3, 70)], SamplingParams(max_tokens=1))
        assert llm.drain(60)
    options = [
        "--model",
        model_dir,
        "--vllm-config",
        config(kv_connector_extra_config={"store": url}),
    ]
    assert found(*options) == []
    value = json.loads(run("doctor", *options, "--json", "-").out)
    assert 32 * token_bytes < value["about"]["record_bytes"] < 64 * token_bytes


@pytest.mark.parametrize("options", [{"chunk_tokens": 32}, {"tenant": "b"}], ids=str)
def test_a_configuration_that_nobody_has_written_by(run, found, url, model_dir, options):
    written = {"chunk_tokens": 16, "tenant": "a"}
    with LLM(model_dir, store=url.partition("?")[0], connector_options=written) as llm:
        llm.generate([range(3, 70)], SamplingParams(max_tokens=1))
        assert llm.drain(60)
    ask = ["--model", model_dir, "--vllm-config"]
    same = {**written, "store": url}
    assert found(*ask, config(kv_connector_extra_config=same)) == []
    (what,) = found(*ask, config(kv_connector_extra_config={**same, **options}))
    assert what.startswith("other-model ")
    assert f"the nearest namespace differs in {next(iter(options))}" in what


def test_what_vllm_logs_is_not_on_stdout(run, monkeypatch):
    def logs():
        print("INFO of vLLM")
        return []

    monkeypatch.setattr("kvferry.doctor.vllm.check_installed", logs)
    ran = run("doctor", "--vllm", "--json", "-")
    assert json.loads(ran.out)
    assert "INFO of vLLM" in ran.err


def test_20_a_vllm_that_does_not_load_it(found):
    (what,) = found("--vllm")
    assert what == "no-vllm vllm: vLLM is not installed in this environment"


def test_a_vllm_that_is_not_served_and_does_not_load_it(tmp_path, monkeypatch):
    """A stand-in: no two vLLMs are installed here."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.5.0"')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("kvferry.doctor.vllm.entry_points", lambda **_: EntryPoints())
    try:
        findings = check_installed({"VLLM_PLUGINS": "other"})
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == "vllm"]:
            del sys.modules[name]
    found = [each.problem for each in findings]
    assert found == [Problem.PLUGINS, Problem.ENTRY_POINT, Problem.RELEASE]


def test_a_configuration_that_is_not_there_is_one_line(run, tmp_path):
    ran = run("doctor", "--vllm-config", tmp_path / "none")
    assert ran.code == 2
    assert "cannot read --vllm-config" in ran.error_line


# -- the machine ----------------------------------------------------------------------------------


def pool_of(extra: dict[str, object], **engine: object) -> str:
    transfer = {**CONFIG, "kv_connector_extra_config": {"store": "memory://a", **extra}}
    return json.dumps({"kv_transfer_config": transfer, **engine})


def test_21_a_host_pool_that_does_not_fit_into_memory(found):
    half = machine_bytes() // 2
    (what,) = found("--vllm-config", pool_of({"memory_bytes": half + 1}))
    assert what.startswith("pool-above-memory machine: ")
    assert found("--vllm-config", pool_of({"memory_bytes": half})) == []


def test_a_host_pool_below_two_steps(found, model_dir):
    token_bytes = 3 * 2 * 4 * 8 * 4

    def ask(memory_bytes: int, step: object) -> list[str]:
        extra = {"memory_bytes": memory_bytes}
        given = pool_of(extra, **{"max-num-batched-tokens": step})
        return found("--model", model_dir, "--vllm-config", given)

    (what,) = ask(2 * 8192 * token_bytes - 1, 8192)
    assert what.startswith("pool-below-steps ")
    assert "is smaller than the KV of two steps of 8,192 tokens" in what
    assert ask(2 * 8192 * token_bytes, "8192") == []
    assert ask(2 * 8192 * token_bytes - 1, None) == []


def test_an_installation_without_a_compiler_is_found():
    (finding,) = check_checksums(is_compiled=False)
    assert finding.problem is Problem.IN_PYTHON
    assert check_checksums(is_compiled=True) == []


def test_the_default_of_the_host_pool_is_checked_too():
    model = Model(
        identity=ModelIdentity(weights=bytes(32), config={}), options={}, chunk_tokens=128,
        record_bytes=129 << 20, token_bytes=1 << 20, context_tokens=None,
    )  # fmt: skip
    (default,) = check_pool(8 << 30, None, model, 4096)  # a quarter of the machine
    assert default.problem is Problem.POOL_BELOW_STEPS
    assert "the host pool (2GiB)" in default.text
    assert check_pool(64 << 30, None, model, 4096) == []
    small = dataclasses.replace(model, record_bytes=5000)  # which take two pages each
    (below,) = check_pool(64 << 30, 16383, small, 0)
    assert below.problem is Problem.POOL_BELOW_RECORDS
    assert check_pool(64 << 30, 16384, small, 0) == []


@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_a_host_pool_that_holds_no_two_records_is_found_where_an_engine_refuses_it(
    found, model_dir, chunk_tokens
):
    def says(memory_bytes: int) -> list[str]:
        extra = {"memory_bytes": memory_bytes, "chunk_tokens": chunk_tokens}
        return found("--model", model_dir, "--vllm-config", pool_of(extra))

    def start(memory_bytes: int) -> None:
        options = {"memory_bytes": memory_bytes, "chunk_tokens": chunk_tokens}
        LLM(model_dir, store="memory://", connector_options=options).close()

    least = next(size for size in range(4096, 1 << 20, 4096) if not says(size))
    start(least)
    with pytest.raises(ConfigError, match=f"set it to at least {least}"):
        start(least - 1)
    (what,) = says(least - 1)
    assert what.startswith("pool-below-records ")


# -- bad input ------------------------------------------------------------------------------------


def test_a_hostile_configuration_is_shown_as_it_is(run):
    for name in NAMES:
        ran = run("doctor", "--vllm-config", json.dumps({"kv_connector": name, name: 1}))
        assert (ran.code, is_plain(ran.out)) == (1, True)


def test_an_empty_directory_and_a_store_in_use(run, found, tmp_path, url):
    (tmp_path / "empty").mkdir()
    (what,) = found((tmp_path / "empty").as_uri())
    assert what.startswith("unusable ")
    assert "empty" in what
    with open_one(url):
        assert found(url) == []
    assert run("doctor").code == 0


def test_a_full_store_is_measured_without_an_eviction(found, root, url):
    keys = put_prompt(url.partition("?")[0])
    with FileStore(root) as store:
        used = store.stat().used_bytes
    assert found(f"{root.as_uri()}?max_bytes={used}B") == []
    with open_one(root.as_uri()) as store:
        assert all(store.read(key, ()) for key in keys)


def test_a_store_that_is_left_in_the_middle_keeps_no_record_of_the_check(url):
    """As after Ctrl-C."""
    report = StoreReport("file")

    def opened(_parsed, _calls) -> Store:
        report.is_over.set()
        return open_one(url.partition("?")[0])

    check(url, opened, None, report)
    assert "put_gb_per_second" not in report.facts
    with open_one(url) as store:
        assert list(store.catalogue().scan()) == []


@pytest.mark.parametrize(
    ("opened", "kept", "wrong"),
    [
        (["?max_bytes=1GiB"], 1 << 30, []),
        (["?max_bytes=1GiB", "?max_bytes=2GiB"], 2 << 30, []),
        (["?max_bytes=1GiB", ""], None, [Problem.NO_QUOTA]),
        ([""], None, [Problem.NO_QUOTA]),
    ],
)
def test_a_store_remembers_the_quota_of_its_last_engine(run, root, opened, kept, wrong):
    plain = root.as_uri()
    for options in opened:
        open_one(f"{plain}{options}").close()
    for _ in range(2):
        assert faults(plain) == wrong
        assert run("ls", plain, "--by", "namespace").code == 0
        (facts,) = json.loads(run("doctor", plain, "--json", "-").out)["stores"]
        assert facts["max_bytes"] == kept
        with open_one(plain, Opening(index=False)):  # as `copy` and `warm` do
            pass
    shutil.rmtree(root)  # the quota comes back with the store, if its engine goes on
    with FileStore(root, max_bytes=1 << 30, background=False) as store:
        store.put(ChunkKey(bytes(32)), [b"value"])
        for each in root.iterdir():
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        store.put(ChunkKey(bytes(32)), [b"value"])
        assert store.directory.quota() == {"max_bytes": 1 << 30}


def test_of_a_store_of_an_earlier_version_the_quota_is_not_known(run, root):
    open_one(root.as_uri()).close()
    marker = root / "kvferry.json"
    marker.write_text('{"format": "kvferry-store", "version": 2}\n')
    ran = run("doctor", root.as_uri(), "--json", "-")
    assert ran.code == 0
    (facts,) = json.loads(ran.out)["stores"]
    assert facts["quota"] == "not known"
    assert "max bytes" not in run("ls", root.as_uri(), "--by", "namespace").out
    for wrong in (-1, 0, True, "1GiB", [1]):
        marker.write_text(json.dumps({"format": "kvferry-store", "version": 2, "max_bytes": wrong}))
        assert run("doctor", root.as_uri()).code == 0


def test_every_finding_is_in_the_docs_as_in_the_code():
    rows = [f"| `{each.code}` | {each.severity} | {each.text} | {each.todo} |" for each in Problem]
    texts = [page.read_text() for page in (Path(__file__).parents[2] / "docs").glob("*.md")]
    (text,) = (each for each in texts if rows[0] in each.splitlines())
    lines = text.splitlines()
    start = lines.index(rows[0])
    assert lines[start : lines.index("", start)] == rows, "write this:\n" + "\n".join(rows)


def test_every_finding_has_a_test():
    files = Path(__file__), Path(__file__).with_name("test_unforeseen.py")
    source = "".join(file.read_text() for file in files)
    missing = [
        each.name
        for each in Problem
        if each.name not in FaultKind.__members__  # below, one and all
        and f"Problem.{each.name}" not in source and f'"{each.code} ' not in source
        and f'"{each.code}"' not in source
    ]  # fmt: skip
    assert missing == []


class Refusing(MemoryStore):
    """Says of a read, or of a write, why it cannot do it."""

    def __init__(self, call: str, why: Fault) -> None:
        super().__init__()
        self.call, self.why = call, why

    def read(self, key, ranges, deadline=NO_DEADLINE):
        if self.call == "read":
            raise StoreError(*self.why)
        return super().read(key, ranges, deadline)

    def put(self, key, buffers, deadline=NO_DEADLINE):
        return Put.failed(self.why) if self.call == "put" else super().put(key, buffers, deadline)


@pytest.mark.parametrize("is_tier", [False, True], ids=["a store", "a tier"])
@pytest.mark.parametrize("call", ["read", "put"])
@pytest.mark.parametrize("kind", FaultKind)
def test_what_a_store_says_is_the_row_of_its_kind_whatever_the_words(call, kind, is_tier):
    # Words of another kind, which no program may read.
    store = Refusing(call, Fault(kind, "WRONGPASS: Permission denied, READONLY, Odd.put failed: "))
    report = StoreReport("memory:")
    opened = TieredStore([store]) if is_tier else store
    check("memory://x", lambda *_: opened, None, report)
    assert [each.problem for each in report.findings] == [Problem[kind.name]]


@pytest.mark.parametrize("kind", FaultKind)
def test_what_is_wrong_with_a_url_is_the_row_of_its_kind(kind):
    def opened(_url, _calls):
        raise ConfigError("Permission denied", kind)

    report = StoreReport("memory:")
    check("memory://x", opened, None, report)
    assert [each.problem for each in report.findings] == [Problem[kind.name]]


def test_the_checks_read_no_text_of_ours():
    for path in (Path(doctor.__path__[0])).glob("*.py"):
        assert not re.search(r"^(import|from) re\b| in str\(", path.read_text(), re.MULTILINE), path


def test_a_finding_is_filled_in_and_quotes_braces_as_they_are():
    finding = Problem.UNUSABLE.at("{x}", said="{0} {y}")
    assert (finding.where, finding.text) == ("{x}", "it cannot be used: {0} {y}")
