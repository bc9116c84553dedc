"""Our roles as a V1 connector: driven by a host of that shape they behave as they do directly."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from kvferry.contract.driver import StepDriver
from kvferry.contract.guard_scheduler import GuardedScheduler
from kvferry.contract.messages import FinishResult, Plan, WorkerMeta, WorkerOutput
from kvferry.errors import ConfigError, ContractError
from kvferry.observe import Counters
from kvferry.testing.clock import FakeClock
from kvferry.types import (
    DEFAULT_OPTIONS,
    NO_EXTRA_KEYS,
    ExtraKeys,
    Handover,
    MultimodalItem,
    RequestOptions,
)
from kvferry.v1.driven import V1SchedulerRole, V1WorkerRole
from kvferry.v1.facade import RolesAsV1
from kvferry.v1.host import (
    ADAPTER_SECONDS,
    CLIENT_OPTIONS,
    UNCACHEABLE,
    HostRequests,
    UnknownAdapterError,
    UnreadAdapterError,
)
from kvferry.v1.types import (
    CachedRequestData,
    CounterStats,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    NewRequestData,
    PlanMetadata,
    SchedulerOutput,
)  # fmt: skip
from tests.contract.dict_roles import DictScheduler, DictWorker, Faulty, FaultyWorker
from tests.contract.recording import LoadPlan, RecordingLayerwiseWorker, RecordingWorker
from tests.contract.tiny_host import TinyHost, true_output
from tests.v1.test_driven import make_config

PROMPT = list(range(100, 122))
SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


def with_set(output):
    """vLLM 0.12 to 0.32: continuing requests say by a set which of them were resumed."""
    cached = output.scheduled_cached_reqs
    output.scheduled_cached_reqs = SimpleNamespace(
        req_ids=cached.req_ids, new_block_ids=cached.new_block_ids,
        num_computed_tokens=cached.num_computed_tokens, resumed_req_ids=cached.resumed_req_ids,
    )  # fmt: skip
    return output


def with_list(output):
    """vLLM 0.10 and 0.11: by a list; preempted requests are not named."""
    cached = output.scheduled_cached_reqs
    return SimpleNamespace(
        scheduled_new_reqs=output.scheduled_new_reqs,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=cached.req_ids, new_block_ids=cached.new_block_ids,
            num_computed_tokens=cached.num_computed_tokens,
            resumed_from_preemption=cached.resumed_from_preemption,
        ),
        num_scheduled_tokens=output.num_scheduled_tokens,
        total_num_scheduled_tokens=output.total_num_scheduled_tokens,
        finished_req_ids=output.finished_req_ids,
    )  # fmt: skip


def with_resumed_as_new(output):
    """vLLM 0.32, newer model runner."""
    cached = output.scheduled_cached_reqs
    for index in reversed(range(len(cached.req_ids))):
        request_id = cached.req_ids[index]
        if request_id in cached.resumed_req_ids:
            output.scheduled_new_reqs.append(
                SimpleNamespace(
                    req_id=request_id, prompt_token_ids=cached.all_token_ids[request_id],
                    block_ids=cached.new_block_ids[index],
                    num_computed_tokens=cached.num_computed_tokens[index],
                )
            )  # fmt: skip
            for column in (cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
                del column[index]
    cached.resumed_req_ids = set()
    return output


class DictConnector(RolesAsV1):
    """What a connector of ours looks like; `spelling` makes the host one of several versions."""

    spelling = staticmethod(lambda output: output)

    def __init__(self, vllm_config, role, kv_cache_config=None, *, store, **options):
        super().__init__(
            vllm_config, role, kv_cache_config,
            scheduler=DictScheduler(store, **options) if role is SCHEDULER else None,
            worker=DictWorker(store) if role is WORKER else None,
        )  # fmt: skip

    def build_connector_meta(self, scheduler_output):
        return super().build_connector_meta(self.spelling(scheduler_output))


def make_host(store, *, spelling=None, budget=11, num_blocks=40, **options) -> TinyHost:
    observer = Counters()
    scheduler = DictConnector(make_config(), SCHEDULER, store=store, **options)
    worker = DictConnector(make_config(), WORKER, store=store)
    if spelling is not None:
        scheduler.spelling = spelling
    host = TinyHost(
        GuardedScheduler(V1SchedulerRole(scheduler), observer, block_size=4),
        V1WorkerRole(worker),
        observer=observer, strict=True, budget=budget, num_blocks=num_blocks,
    )  # fmt: skip
    host.observer, host.connectors = observer, (scheduler, worker)
    return host


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("delay_free", [False, True])
@pytest.mark.parametrize("spelling", [None, with_set, with_list, with_resumed_as_new])
def test_roles_behind_the_facade_save_load_and_resume(spelling, is_async, delay_free):
    store: dict = {}
    options = {"spelling": spelling, "is_async": is_async, "delay_free": delay_free}
    for budget in (5, 11):
        host = make_host(store, budget=budget, **options)
        requests = [host.add(f"r{i}", prompt, 5) for i, prompt in enumerate([PROMPT, PROMPT[:9]])]
        for _ in range(5):
            host.step()
        if host.running:
            host.preempt(host.running[0])
        host.run()
        for request, prompt in zip(requests, [PROMPT, PROMPT[:9]], strict=True):
            assert request.all_token_ids == true_output(prompt, 5)
        assert host.observer["hook_failed"] == host.observer["contract_violation"] == 0
    assert requests[0].hit_tokens >= 20
    assert max(len(key) for key in store) == 24  # whole blocks of 26 tokens that had KV


def test_faults_of_a_role_stay_behind_the_facade():
    store: dict = {}
    host = make_host(store)
    host.add("r", PROMPT)
    host.run()
    broken = FaultyWorker(DictWorker(store), Faulty({("start_load", 1): "before"}))
    facade = RolesAsV1(make_config(), WORKER, worker=broken)
    host = make_host(store)
    host.driver = StepDriver(V1WorkerRole(facade))
    facade.register_kv_caches(host.kv)
    request = host.add("r", PROMPT, 3)
    host.run()
    assert request.hit_tokens == 20
    assert request.all_token_ids == true_output(PROMPT, 3)


def going_on(new=(), **blocks):
    """A step of requests that begin, and of others that go on and get these blocks."""
    return SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(
                req_id=name, prompt_token_ids=PROMPT, prefill_token_ids=PROMPT,
                block_ids=([1, 2],), num_computed_tokens=0,
            )
            for name in new
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=list(blocks), new_block_ids=list(blocks.values()),
            num_computed_tokens=[8] * len(blocks),
        ),
        num_scheduled_tokens=dict.fromkeys([*blocks, *new], 4),
    )  # fmt: skip


def test_requests_of_a_step_that_cannot_be_read_are_not_cached_in_wrong_blocks(caplog):
    requests = HostRequests(lambda _lora: None, str)

    def step(blocks, new=()):
        return requests.step(going_on(new, **blocks))

    for name in ("first", "last", "other"):
        requests.view(host_request(name))
    assert len(step({}, new=["first", "last"]).scheduled) == 2
    with pytest.raises(ValueError, match="argument 2 is longer"):
        _ = step({"first": ([3], [4]), "last": ([5],)}).scheduled
    for _ in range(2):
        scheduled = step({"first": ([6],), "last": ([7],)}, new=["other"]).scheduled
        assert [each.request.request_id for each in scheduled] == ["other"]
    assert len(caplog.records) == 2


# --- construction ------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [SCHEDULER, WORKER])
@pytest.mark.parametrize("given", ["both", "none", "other"])
def test_exactly_the_half_that_was_asked_for_is_taken(role, given):
    halves = {SCHEDULER: {"scheduler": DictScheduler({})}, WORKER: {"worker": DictWorker({})}}
    other = WORKER if role is SCHEDULER else SCHEDULER
    roles = {"both": {**halves[role], **halves[other]}, "none": {}, "other": halves[other]}[given]
    with pytest.raises(ConfigError, match=f"asks for the {role.name} half"):
        RolesAsV1(make_config(), role, **roles)


def test_a_method_of_the_other_half_is_refused():
    facade = RolesAsV1(make_config(), SCHEDULER, scheduler=DictScheduler({}))
    with pytest.raises(ContractError, match="worker-side method"):
        facade.bind_connector_metadata(PlanMetadata(LoadPlan(), has_tokens=True))
    facade = RolesAsV1(make_config(), WORKER, worker=RecordingWorker())
    with pytest.raises(ContractError, match="scheduler-side method"):
        facade.build_connector_meta(None)


# --- worker side -------------------------------------------------------------------------------


def worker_facade(*outputs, role=None):
    role = role or RecordingWorker(*outputs)
    return RolesAsV1(make_config(), WORKER, worker=role), role


def bind(facade, plan=None, has_tokens=True):
    facade.bind_connector_metadata(PlanMetadata(plan or LoadPlan(), has_tokens))


class Note(WorkerMeta, frozen=True, kw_only=True):
    words: tuple[str, ...]

    def aggregate(self, other):
        return Note(words=self.words + other.words)


def test_a_report_is_collected_once_and_asked_for_in_parts():
    facade, role = worker_facade(
        WorkerOutput(
            finished_recving=frozenset({"r"}), invalid_block_ids=frozenset({3}),
            stats={"hits": 2}, events=["e"], meta=Note(words=("a",)),
        )
    )  # fmt: skip
    bind(facade, LoadPlan(recving=frozenset({"r"})))
    facade.wait_for_save()
    assert facade.get_finished(set()) == (None, {"r"})
    assert facade.get_block_ids_with_load_errors() == {3}
    assert facade.get_kv_connector_stats() == CounterStats({"hits": 2})
    assert facade.get_kv_connector_kv_cache_events() == ["e"]
    meta = facade.build_connector_worker_meta()
    assert meta.aggregate(Note(words=("b",))) == Note(words=("a", "b"))
    facade.clear_connector_metadata()
    assert role.calls == ["begin_step", "save", "collect", "end_step"]
    bind(facade)
    assert facade.get_block_ids_with_load_errors() == set()


def test_a11_failed_loads_are_reported_to_later_hosts():
    failed = WorkerOutput(finished_recving=frozenset({"r"}), failed_recving=frozenset({"r"}))
    facade, _ = worker_facade(failed)
    bind(facade, LoadPlan(recving=frozenset({"r"})))
    assert facade.get_transfer_results(set()).failed_recving == {"r"}


def test_a6_reports_are_held_to_the_rules():
    facade, _ = worker_facade(WorkerOutput(finished_recving=frozenset({"stranger"})))
    bind(facade)
    assert facade.get_finished(set()) == (None, None)


@pytest.mark.parametrize(
    ("has_tokens", "host_saves", "saves"), [(False, False, 1), (False, True, 1), (True, False, 0)]
)
def test_a13_a_step_without_tokens_is_saved_once_by_old_hosts_too(has_tokens, host_saves, saves):
    facade, role = worker_facade()
    bind(facade, has_tokens=has_tokens)
    if host_saves:
        facade.wait_for_save()
    facade.get_finished(set())
    assert role.calls.count("save") == saves


def run_step(facade, error=None):
    """A step as hosts run it."""
    bind(facade)
    try:
        if error is not None:
            raise error
    finally:
        facade.wait_for_save()
        facade.get_finished(set())
        facade.clear_connector_metadata()


@pytest.mark.parametrize("error", [RuntimeError("in the forward"), SystemExit()])
def test_what_a_forward_that_raised_computed_is_not_saved(error):
    facade, role = worker_facade()
    with pytest.raises(type(error)):
        run_step(facade, error)
    assert role.calls == ["begin_step", "collect", "end_step"]
    run_step(facade)
    assert role.calls[-4:] == ["begin_step", "save", "collect", "end_step"]


def test_an_engine_that_runs_while_its_caller_handles_an_error_saves():
    facade, role = worker_facade()
    try:
        raise ValueError("of the caller")
    except ValueError:
        run_step(facade)
        with pytest.raises(RuntimeError):
            run_step(facade, RuntimeError("in the forward"))
    assert role.calls.count("save") == 1


def test_a_step_that_began_in_its_callers_error_handler_and_ends_outside_saves():
    facade, role = worker_facade()
    try:
        raise ValueError("of the caller")
    except ValueError:
        bind(facade)
    facade.wait_for_save()
    assert role.calls == ["begin_step", "save"]


def test_a_step_that_the_host_does_not_end_ends_with_the_next(caplog):
    facade, role = worker_facade(WorkerOutput(invalid_block_ids=frozenset({3})))
    bind(facade, LoadPlan(blocks=frozenset({3})))
    facade.get_finished(set())
    bind(facade)
    assert role.calls == ["begin_step", "collect", "end_step", "begin_step"]
    assert facade.get_block_ids_with_load_errors() == set()


def test_a2_layer_hooks_outside_of_a_step_do_nothing():
    facade, role = worker_facade(role=RecordingLayerwiseWorker())
    facade.wait_for_layer_load("a")
    facade.save_kv_layer("a", None, None)
    assert role.calls == []
    bind(facade)
    facade.wait_for_layer_load("a")
    facade.save_kv_layer("a", None, None)
    assert role.calls[1:] == ["wait a", "save a"]


def test_steps_of_another_connector_do_nothing_and_say_so_once(caplog):
    class Other(KVConnectorMetadata):
        pass

    facade, role = worker_facade()
    for _ in range(2):
        facade.bind_connector_metadata(Other())
        facade.start_load_kv(None)
        facade.wait_for_layer_load("a")
        facade.save_kv_layer("a", None, None)
        facade.wait_for_save()
        assert facade.get_finished({"r"}) == (None, None)
        assert facade.get_block_ids_with_load_errors() == set()
        assert facade.get_kv_connector_stats() is None
        assert facade.build_connector_worker_meta() is None
        facade.clear_connector_metadata()
        assert not facade.has_connector_metadata()
    assert role.calls == []
    assert [record.getMessage() for record in caplog.records] == [
        "the host bound a Other, which the other half of this connector did not make: nothing is "
        "loaded or saved in such steps"
    ]
    bind(facade)
    facade.wait_for_save()
    assert role.calls == ["begin_step", "save"]


# --- scheduler side ----------------------------------------------------------------------------


class Learns(DictScheduler):
    def __init__(self, **answers):
        super().__init__({})
        self.outputs, self.answers = [], answers

    def update_output(self, output):
        self.outputs.append(output)

    def request_finished(self, request, block_ids):
        return FinishResult(True, {"remote": 1})

    def take_stats(self):
        return {"lookups": 1}


@pytest.mark.parametrize(
    ("of_host", "read"),
    [
        (
            SimpleNamespace(
                finished_sending=None, finished_recving={"r"}, kv_connector_stats=None,
                invalid_block_ids=None,
            ),
            WorkerOutput(finished_recving=frozenset({"r"})),
        ),
        (
            KVConnectorOutput(
                kv_connector_stats=CounterStats({"a": 1}),
                kv_connector_worker_meta=Note(words=("x",)),
            ),
            WorkerOutput(stats={"a": 1}, meta=Note(words=("x",))),
        ),
    ],
    ids=["old", "new"],
)  # fmt: skip
def test_an_output_of_any_host_is_read(of_host, read):
    role = Learns()
    RolesAsV1(make_config(), SCHEDULER, scheduler=role).update_connector_output(of_host)
    assert role.outputs == [read]


def test_the_end_of_a_request_and_the_counters_are_passed_on():
    facade = RolesAsV1(make_config(), SCHEDULER, scheduler=Learns())
    request = host_request()
    assert facade.request_finished(request, [1]) == (True, {"remote": 1})
    assert facade.request_finished_all_groups(request, ([1], [2])) == (True, {"remote": 1})
    assert facade.get_kv_connector_stats() == CounterStats({"lookups": 1})
    assert facade.requires_kv_delivery is False
    assert facade.reset_cache() is True


@pytest.mark.parametrize(
    ("status", "is_told"),
    [("STOPPED", True), ("LENGTH_CAPPED", True), ("ABORTED", False), ("ERROR", False)],
)
def test_only_the_client_of_a_finished_request_gets_an_answer(status, is_told):
    facade = RolesAsV1(make_config(), SCHEDULER, scheduler=Learns())
    request = host_request(status=SimpleNamespace(name=f"FINISHED_{status}"))
    assert facade.request_finished(request, [1]) == (True, {"remote": 1} if is_told else None)


def test_the_parameters_of_a_request_are_read_once_and_left_alone():
    params = {"do_remote_decode": True, "remote_host": None}
    requests = HostRequests(lambda _lora: None, str)
    view = requests.view(host_request(kv_transfer_params=params))
    assert view.handover == Handover(gives=True, answers=True)
    assert params == {"do_remote_decode": True, "remote_host": None}
    assert requests.view(host_request("other", kv_transfer_params=[1])).handover is None
    assert requests.view(host_request("older host")).handover is None
    beside = HostRequests(lambda _lora: None, str, hands_over=False)
    assert beside.view(host_request(kv_transfer_params=params)).handover is None


def test_counters_add_up_and_survive_the_process_line():
    stats = RolesAsV1.build_kv_connector_stats(CounterStats({"a": 1}).to_dict())
    assert stats.aggregate(CounterStats({"a": 2, "b": 5})).reduce() == {"a": 3, "b": 5}
    stats.reset()
    assert stats.is_empty()


# --- what hosts say ----------------------------------------------------------------------------


def host_request(request_id="r", **attributes):
    tokens = list(PROMPT)
    return SimpleNamespace(
        **{
            "request_id": request_id, "prompt_token_ids": tokens, "all_token_ids": tokens,
            "num_tokens": len(tokens), "num_prompt_tokens": len(tokens), "num_computed_tokens": 0,
            **attributes,
        }
    )  # fmt: skip


def place(offset, length=4):
    return SimpleNamespace(offset=offset, length=length)


def image(digest, offset):
    return SimpleNamespace(identifier=digest, mm_position=place(offset))


def item(digest, offset, length=4):
    return MultimodalItem(digest=digest, offset=offset, length=length)


class Adapter:
    """As vLLM's, equal to any adapter of the same name."""

    def __init__(self, content):
        self.content = content

    def __eq__(self, other):
        return isinstance(other, Adapter)

    def __hash__(self):
        return 0


def extra_keys_of(request, lora_identity=lambda _lora: None, item_identity=str):
    return HostRequests(lora_identity, item_identity).view(request).extra_keys


def test_salt_images_and_adapters_are_part_of_the_identity():
    request = host_request(
        cache_salt="tenant", lora_request="adapter", mm_features=[image("b", 9), image("a", 2)]
    )
    keys = extra_keys_of(request, lambda lora: f"content of {lora}")
    assert (keys.cache_salt, keys.lora, keys.cacheable) == ("tenant", "content of adapter", True)
    assert keys.items == (
        MultimodalItem(digest="a", offset=2, length=4),
        MultimodalItem(digest="b", offset=9, length=4),
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't start new thread"), {}),
        (ValueError("no number"), {}),
        (
            UnknownAdapterError("is being hashed"),
            {"reason": "adapter", "why": "the LoRA adapter is being hashed"},
        ),
    ],
)
def test_a_request_under_an_adapter_that_is_not_known_is_not_cached(error, said):
    def refuse(lora):
        raise error

    keys = extra_keys_of(host_request(lora_request="adapter"), refuse)
    assert keys == ExtraKeys(cacheable=False, **said)


def test_items_are_what_the_host_makes_of_their_names():
    request = host_request(mm_features=[image("a", 2)])
    keys = extra_keys_of(request, item_identity=lambda name: f"read so:{name}")
    assert keys.items[0].digest == "read so:a"
    assert extra_keys_of(request, item_identity=lambda _: None).cacheable is False


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"mm_features": [image("a", 2)]}, ExtraKeys(items=(item("a", 2),))),
        ({"mm_hashes": ["a"], "mm_positions": [place(2)]}, ExtraKeys(items=(item("a", 2),))),
        ({"cache_salt": "later"}, ExtraKeys(cache_salt="later")),
        ({"lora_request": Adapter("a")}, ExtraKeys(lora="content of a")),
        ({"mm_features": [image("", 2)]}, UNCACHEABLE),
        ({"mm_features": [object()]}, UNCACHEABLE),
        ({"mm_hashes": ["a"], "mm_positions": []}, UNCACHEABLE),
        ({"prompt_embeds": object()}, UNCACHEABLE),
        ({"prompt_token_ids": None}, UNCACHEABLE),
        ({"num_prompt_tokens": len(PROMPT) + 1}, UNCACHEABLE),
        ({"lora_request": Adapter("")}, UNCACHEABLE),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
@pytest.mark.parametrize("when", ["at first", "later", "in place"])
def test_what_decides_the_kv_of_a_request_is_followed(changed, expected, when):
    """vLLM changes a session's lists in place."""
    requests = HostRequests(
        lambda lora: f"content of {lora.content}" if lora.content else None, str
    )
    request = host_request(mm_features=[] if "mm_features" in changed else None)
    if when != "at first":
        assert requests.view(request).extra_keys is NO_EXTRA_KEYS
    if when == "in place" and "mm_features" in changed:
        request.mm_features.extend(changed["mm_features"])
    else:
        vars(request).update(changed)
    view = requests.view(request)
    assert view.extra_keys == expected
    nothing = dict.fromkeys(["mm_features", "mm_hashes", "mm_positions", "lora_request"])
    vars(request).update(vars(host_request(**nothing, cache_salt=None, prompt_embeds=None)))
    assert requests.view(request) is view
    # What was not cached once is not cached again.
    assert view.extra_keys == (NO_EXTRA_KEYS if expected.cacheable else UNCACHEABLE)


def test_an_adapter_of_the_same_name_is_another():
    requests = HostRequests(lambda lora: f"content of {lora.content}", str)
    request = host_request(lora_request=Adapter("a"))
    assert requests.view(request).extra_keys.lora == "content of a"
    request.lora_request = Adapter("b")
    assert requests.view(request).extra_keys.lora == "content of b"


def test_a_look_up_waits_for_an_adapter_that_is_being_read():
    """A short time. Then the request is computed; its keys are looked for again as it runs."""
    clock, known = FakeClock(), []

    def identify(_lora):
        if not known:
            raise UnreadAdapterError("is being hashed")
        return known[0]

    connector = DictConnector(make_config(), SCHEDULER, store={})
    requests = HostRequests(identify, str)
    requests.clock = clock
    connector.attach(DictScheduler({}), block_size=4, observer=None, requests=requests)
    first, second = (host_request(request_id=name, lora_request=Adapter("a")) for name in "ab")
    assert connector.get_num_new_matched_tokens(first, 0) == (None, False)
    clock.advance(ADAPTER_SECONDS)
    assert connector.get_num_new_matched_tokens(second, 0) == (None, False)  # its own time
    assert connector.get_num_new_matched_tokens(first, 0) == (0, False)
    known.append("content")
    assert connector.get_num_new_matched_tokens(second, 0) == (0, False)
    requests.allocated(requests.view(first), ([1, 2],), 0)
    [scheduled] = requests.step(going_on(a=None)).scheduled
    assert scheduled.request.extra_keys == ExtraKeys(lora="content")


def test_an_adapter_is_asked_for_once_while_a_request_stays_as_it_is():
    asked = []
    requests = HostRequests(lambda lora: asked.append(lora) or "content", str)
    request = host_request(lora_request=Adapter("a"))
    for _ in range(3):
        requests.view(request)
    assert len(asked) == 1


LOST = {
    "another in its place": (UnknownAdapterError("was loaded in place of another"), False),
    "no thread": (RuntimeError("can't start new thread"), False),
    "looked at again": (UnreadAdapterError("is being hashed"), True),
}


@pytest.mark.parametrize("event", ["look-up", "step"])
@pytest.mark.parametrize(("error", "stays"), LOST.values(), ids=LOST)
def test_a_request_that_runs_goes_uncached_when_its_adapter_loses_its_identity(error, stays, event):
    answers = iter(["content"])

    def identify(lora):
        for answer in answers:
            return answer
        raise error

    requests = HostRequests(identify, str)
    request = host_request(lora_request=Adapter("a"))
    view = requests.view(request)
    requests.allocated(view, ([1, 2],), 0)
    assert requests.view(request).extra_keys.lora == "content"  # the hit that was promised is read
    if event == "look-up":
        requests.view(request, is_lookup=True)
    else:
        [scheduled] = requests.step(going_on(r=None)).scheduled
        assert scheduled.request is view
    assert view.extra_keys.cacheable is stays


@pytest.mark.parametrize("drafts", [True, False])
def test_a_session_of_a_host_that_drafts_is_not_cached_once_it_grows(drafts):
    requests = HostRequests(lambda _lora: None, str, drafts=drafts)
    request = host_request()
    assert requests.view(request).extra_keys.cacheable
    request.all_token_ids.append(1)
    assert requests.view(request).extra_keys.cacheable
    request.num_prompt_tokens += 1
    assert requests.view(request).extra_keys.cacheable is not drafts


def test_the_prompt_of_a_request_is_as_long_as_the_host_says():
    requests = HostRequests(lambda _lora: None, str)
    request = host_request()
    view = requests.view(request)
    request.all_token_ids.extend([1, 2])
    request.num_prompt_tokens += 2
    assert view.num_prompt_tokens == len(view.all_token_ids) == len(PROMPT) + 2


def test_a5_the_table_of_an_async_load_is_whole_on_hosts_that_show_only_what_is_new():
    requests = HostRequests(lambda lora: None, str)
    view = requests.view(host_request())
    assert requests.allocated(view, ([1, 2],), 8) == ([1, 2],)
    assert requests.allocated(view, ([3],), 0) == ([1, 2, 3],)  # 0.13
    assert requests.allocated(view, ([1, 2, 3],), 0) == ([1, 2, 3],)  # 0.32


def test_a_host_of_no_known_version_costs_the_cache_not_the_engine():
    facade = RolesAsV1(make_config(), SCHEDULER, scheduler=DictScheduler({}))
    metadata = facade.build_connector_meta(
        SimpleNamespace(
            scheduled_cached_reqs=object(), scheduled_new_reqs=[], num_scheduled_tokens={},
            total_num_scheduled_tokens=0, finished_req_ids=set(),
        )
    )  # fmt: skip
    assert isinstance(metadata.plan, Plan)


def test_an_id_used_again_is_another_request():
    requests = HostRequests(lambda lora: None, str)
    first, second = host_request(), host_request(cache_salt="other")
    assert requests.view(first) is requests.view(first)
    assert requests.view(second).extra_keys.cache_salt == "other"


LOGPROBS = SimpleNamespace(extra_args=None, prompt_logprobs=1)
NEEDS = [
    ({}, {}, True),
    ({"skip_reading_prefix_cache": False}, {}, True),
    # As vLLM decides for logprobs of the prompt and for vectors of its tokens.
    ({"skip_reading_prefix_cache": True}, {}, False),
    ({"skip_reading_prefix_cache": False, "sampling_params": LOGPROBS}, {}, True),
    ({"sampling_params": LOGPROBS}, {}, False),  # an older host
    ({}, {"loads": False}, False),  # an engine that needs all tokens of each request
]


@pytest.mark.parametrize(("fields", "engine", "loads"), NEEDS)
@pytest.mark.parametrize("asks", [True, False])
def test_nothing_is_loaded_for_a_request_that_needs_every_token(fields, engine, loads, asks):
    params = {"kvferry": {"max_load_tokens": 64}} if asks else None
    view = HostRequests(lambda _lora: None, str, **engine).view(
        host_request(kv_transfer_params=params, **fields)
    )
    assert view.options.load is loads
    assert view.options.store


def test_the_options_of_a_request_are_read_from_both_places():
    requests = HostRequests(lambda _lora: None, str)
    params = {"kvferry": {"explain": True}}
    sampling = SimpleNamespace(extra_args={"kvferry": {"store": False}})
    asked = host_request(kv_transfer_params=params, sampling_params=sampling)
    assert requests.view(asked).options == RequestOptions(explain=True, store=False)
    assert requests.view(host_request("older host")).options is DEFAULT_OPTIONS
    assert params == {"kvferry": {"explain": True}}
    # Another connector answers: a second answer would end the host.
    beside = HostRequests(lambda _lora: None, str, hands_over=False)
    assert beside.view(asked).options == RequestOptions(store=False)


@pytest.mark.parametrize("allowed", [*sorted(CLIENT_OPTIONS), None])
def test_options_that_the_operator_forbids_have_no_effect(allowed, caplog):
    asked = RequestOptions(store=False, load=False, max_load_tokens=16, pin=60.0, explain=True)
    given = {"kvferry": msgspec.structs.asdict(asked)}
    requests = HostRequests()
    requests.client_options = frozenset({allowed} - {None})
    for number in range(3):
        view = requests.view(host_request(str(number), kv_transfer_params=given))
        for name in CLIENT_OPTIONS:
            expected = asked if name == allowed else DEFAULT_OPTIONS
            assert getattr(view.options, name) == getattr(expected, name)
    lines = [each for each in caplog.messages if "client_options leaves out" in each]
    assert len(lines) == len(CLIENT_OPTIONS) - (allowed is not None)  # once each
    plain = requests.view(host_request("plain"))
    assert plain.options is DEFAULT_OPTIONS


def test_wrong_options_are_one_line_and_the_request_runs_without_any(caplog):
    requests = HostRequests(lambda _lora: None, str)
    params = {"kvferry": {"store": False, "lode": False}}
    view = requests.view(host_request("r\x1b", kv_transfer_params=params))
    assert view.options is DEFAULT_OPTIONS
    assert requests.view(view.request) is view
    (line,) = caplog.messages
    assert line == (
        r"request r\x1b runs without options: kvferry: unknown option 'lode'; did you mean 'load'?"
    )
