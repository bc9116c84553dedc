"""The plug-in on the interfaces of every release that it serves, and refused by name on others."""

from __future__ import annotations

import inspect
from functools import partial

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.errors import ConfigError
from kvferry.store.base import Where
from kvferry.types import ChunkKey

from .released import Release, calls_of, number, versions
from .versioned_config import CHUNK, NUM_TOKENS, make_config, options, prompt, whole_blocks
from .versioned_host import VersionedHost
from .versioned_kv import BACKENDS, BLOCK, shapes_of

pytestmark = pytest.mark.slow

OLDEST = (0, 11, 1)
"""The first release to which a connector can report a failed load."""

SERVED = [version for version in versions() if number(version) >= OLDEST]
REFUSED = [version for version in versions() if number(version) < OLDEST]


@pytest.fixture(params=SERVED)
def release(request):
    return Release(request.param)


def test_every_abstract_method_is_written(release, plugin):
    assert not inspect.isabstract(plugin.KVFerryConnector)
    assert issubclass(plugin.KVFerryConnector, release.types["KVConnectorBase_V1"])


def test_every_call_of_the_host_fits(release, plugin):
    calls = calls_of(release)
    assert len(calls) >= 19
    for call in calls:
        call.binds_to(plugin.KVFerryConnector)


def test_serves_several_kv_groups_where_the_host_has_them(release, plugin):
    hma = release.types.get("SupportsHMA")
    if hma is None:
        assert release.facts["supports_hma"] is None
    else:
        assert issubclass(plugin.KVFerryConnector, hma)


def test_is_built_in_every_way_in_which_the_host_builds_one(release, plugin, model, tmp_path):
    config = make_config(release, model, extra=options(tmp_path))
    groups = VersionedHost.groups_of(release)
    for arguments in release.construction(groups):
        for role in release.types["KVConnectorRole"]:
            connector = plugin.KVFerryConnector(config, role, *arguments)
            connector.shutdown()
            connector.shutdown()


@pytest.mark.parametrize("backend", BACKENDS)
def test_reuses_kv_in_another_process_byte_for_byte(release, engine, backend):
    if backend not in shapes_of(release):
        assert backend == "CPUAttentionBackend"  # before its own kernels
        return
    first = engine(backend)
    cold = first.run("cold", prompt(), budget=7)
    first.settle()
    first.shutdown()
    warm = engine(backend).run("warm", prompt(), generate=3)
    assert cold.hit == 0
    assert warm.hit == whole_blocks(NUM_TOKENS)


def test_what_one_attention_backend_stored_every_other_reads(release, engine):
    for number_, writer in enumerate(shapes_of(release)):
        first = engine(writer)
        first.run("cold", prompt(number_), budget=5)
        first.settle()
        first.shutdown()
        for reader in shapes_of(release):
            assert engine(reader).run("warm", prompt(number_)).hit == whole_blocks(NUM_TOKENS)


def test_a_second_engine_in_a_process_does_not_get_the_connector_of_the_first(engine):
    # vLLM builds one worker-side connector per process and registers every engine's caches with it.
    writer = engine()
    [worker] = writer.workers
    own = writer.held[0].tensors()
    with pytest.raises(ConfigError, match="another engine in this process"):
        worker.register_kv_caches({name: tensor.clone() for name, tensor in own.items()})
    worker.register_kv_caches(own)
    writer.run("a", prompt())
    writer.settle()
    writer.shutdown()
    assert engine().run("b", prompt()).hit == whole_blocks(NUM_TOKENS)


def test_only_the_scheduler_keeps_track_of_what_is_stored(engine, tmp_path):
    host = engine()
    host.run("cold", prompt())
    host.settle()
    host.rest_until_saved()
    stored = (tmp_path / "store").rglob("*.safetensors")
    keys = [ChunkKey(bytes.fromhex(path.stem)) for path in stored]
    stores = [one._cache.store for one in (host.scheduler, *host.workers)]
    assert stores[0].wait_indexed(60)
    assert keys
    assert [{store.where(key) is Where.HERE for key in keys} for store in stores] == [
        {True},
        {False},
    ]


def test_hits_inside_a_multi_connector_too(engine):
    host = engine(in_multi=True)
    host.run("cold", prompt())
    host.rest_until_saved()
    assert host.run("warm", prompt()).hit == whole_blocks(NUM_TOKENS)


@pytest.mark.parametrize("in_multi", [False, True])
def test_counts_of_the_scheduler_are_reported_in_the_step_without_reports_of_workers(
    in_multi, engine
):
    host = engine(in_multi=in_multi)
    for number_ in range(3):
        host.run(f"short {number_}", prompt(count=CHUNK - 1))
        assert host.counters["requests_missed"] == number_ + 1


def test_asked_for_metrics_once_per_child_of_a_multi_connector_there_is_one_set(release, plugin):
    registry = CollectorRegistry()

    types = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}

    def build():
        return plugin.KVFerryConnector.build_prom_metrics(None, types, ["engine"], {0: ["0"]})

    first = build()
    if first is None:
        assert "KVConnectorPromMetrics" not in release.types
        return
    assert build() is None
    first.observe({"hits": 2})
    assert registry.get_sample_value("vllm:kvferry_hits_total", {"engine": "0"}) == 2


@pytest.mark.parametrize("as_new", [False, True])
def test_a_preempted_request_resumes_in_the_spelling_of_the_release(engine, as_new):
    host = engine(resumes_as_new=as_new)
    request = host.add("r", prompt())
    host.admit(request)
    host.step([(request, 20)])
    other = host.run("other", prompt(7, 19))  # runs on in the blocks that were taken away
    host.preempt(request)
    host.step([])
    host.admit(request)
    host.prefill(request, budget=9)
    for number_ in range(2 * CHUNK):
        host.append(request, 40 + number_)
        host.prefill(request, budget=1)
    host.finish(request)
    host.settle()
    host.rest_until_saved()
    assert host.run("again", prompt()).hit == whole_blocks(NUM_TOKENS)
    assert other.hit == 0


def test_a_step_may_preempt_and_resume_at_once(engine):
    host = engine()
    request = host.add("r", prompt())
    host.admit(request)
    host.step([(request, 20)])
    host.preempt(request)
    host.admit(request)
    host.prefill(request)
    host.finish(request)


def test_ranks_of_two_read_what_one_wrote_and_back(engine):
    first, second = 1, 2
    for writer, reader, seed in ((first, second, 1), (second, first, 2)):
        host = engine(world=writer)
        host.run("cold", prompt(seed), budget=7)
        host.settle()
        host.rest_until_saved()
        host.shutdown()
        assert engine(world=reader).run("warm", prompt(seed)).hit == whole_blocks(NUM_TOKENS)


def test_blocks_of_unknown_kernels_are_kept_whole_and_for_their_like_only(
    release, engine, plugin, model, tmp_path
):
    backend = "CPUAttentionBackend"
    if backend not in shapes_of(release):
        return
    with pytest.raises(ConfigError, match=r"chunk_tokens=6 is no multiple of the block size 4"):
        engine(backend, kernels="amx")
    whole = {"chunk_tokens": 2 * BLOCK}
    host = engine(backend, kernels="amx", extra=whole)
    host.run("cold", prompt(), budget=7)
    host.settle()
    host.shutdown()
    warm = engine(backend, kernels="amx", extra=whole).run("warm", prompt())
    assert warm.hit == NUM_TOKENS // BLOCK // 2 * 2 * BLOCK
    for kernels in ("vec", "neon"):
        assert engine(backend, kernels=kernels, extra=whole).run("warm", prompt()).hit == 0


@pytest.mark.parametrize("version", REFUSED)
def test_releases_that_take_no_failed_loads_are_refused_by_name(version):
    release = Release(version)
    with (
        pytest.raises(
            ConfigError, match=rf"^vLLM {version} .*get_block_ids_with_load_errors; use 0.11.1"
        ) as error,
        release.installed(),
    ):
        pass
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("missing", ["get_finished", "wait_for_save", "build_connector_meta"])
def test_a_host_without_a_needed_hook_is_refused_by_its_name(missing):
    release = Release(SERVED[-1])
    del release.methods[missing]
    with (
        pytest.raises(ConfigError, match=rf"^vLLM {SERVED[-1]} .* lacks {missing}; "),
        release.installed(),
    ):
        pass


def test_a_host_without_connectors_is_refused_by_name():
    release = Release(SERVED[-1])
    with (
        pytest.raises(ConfigError, match=r"its V1 connectors cannot be imported: install 0.11.1"),
        release.installed(without="vllm.distributed.kv_transfer.kv_connector.v1.base"),
    ):
        pass


def test_what_is_not_known_of_a_later_release_does_not_stop_it(model, tmp_path):
    """A method more, a field more, a constructor as now."""
    release = Release(SERVED[-1])
    release.methods["a_hook_of_the_future"] = {"signature": "(self, what, more=None)"}
    release.facts["types"]["KVConnectorOutput"]["fields"].append("a_field_of_the_future=")
    with release.installed() as plugin:
        config = make_config(release, model, extra=options(tmp_path))
        host = VersionedHost(release, plugin.KVFerryConnector, config)
        host.run("cold", prompt())
        host.settle()
        host.rest_until_saved()
        assert host.run("warm", prompt()).hit == whole_blocks(NUM_TOKENS)
        host.shutdown()
