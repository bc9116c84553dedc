"""Bugs of V1 connectors, each in a copy of ours, with the case of the kit that must find it."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from dataclasses import replace

from kvferry.identity import running
from kvferry.store import recordio
from kvferry.v1.shared_storage import SharedStorageConnector
from kvferry.v1.types import CachedRequestData

OPTIONS = {
    "store": "file://{dir}", "kv_layout": "BHNC", "chunk_tokens": 16, "memory_bytes": 1 << 20,
    "audit": "off", "save_generated": True,
}  # fmt: skip

SEEDED: dict[str, str] = {}
"""By name of the class: the case that must find its bug."""


class Ours(SharedStorageConnector):
    """A connector without a bug, with the parts that bugs change."""

    def answer(self, count: int, request, num_local: int):
        return count, False

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if count is None:
            return count, is_async
        return self.answer(count, request, num_computed_tokens)


def found_by(case: str):
    def add(cls: type) -> type:
        SEEDED[cls.__name__] = case
        return cls

    return add


# --- look-ups ---


# Name, the case that must find it, and the answer to a look-up that found `count` tokens.
for name, case, answer in (
    ("PromisesABlockTooMany", "reuse", lambda count, *_: (count + 16 if count else 0, False)),
    ("AnswersNegativeCounts", "short-prompts", lambda count, *_: (count or -16, False)),
    ("CountsLocalTokens", "local-blocks",
     lambda count, _, num_local: (count + num_local if count else 0, False)),
    ("StartsAsyncLoadsOfNothing", "reuse", lambda count, *_: (count, count == 0)),
    ("LeavesNoTokenToCompute", "whole-blocks", lambda count, request, num_local: (
        request.num_tokens - num_local if count
        and request.num_tokens - num_local - count in (1, 16) else count, False)),
    ("EndsWithinABlock", "reuse", lambda count, *_: (max(0, count - 3), False)),
    ("AnswersACountAlone", "reuse", lambda count, *_: count),
    ("LosesTheLastBlock", "one-over-a-block", lambda count, request, _: (
        count - 16 if count and request.num_tokens % 16 == 1 else count, False)),
    ("MatchesWholePromptsOnly", "longer-prompt", lambda count, request, num_local: (
        count if num_local + count == (request.num_tokens - 1) // 16 * 16 else 0, False)),
    ("AsksAgainForEver", "reuse", lambda count, *_: (None if count else 0, False)),
):  # fmt: skip
    globals()[name] = type(name, (Ours,), {"answer": staticmethod(answer)})
    SEEDED[name] = case


@found_by("second-look-up")
class AnswersAsItDidFirst(Ours):
    def answer(self, count, request, num_local):
        self.first = getattr(self, "first", {})
        return self.first.setdefault(request.request_id, count), False


@found_by("reuse")
class ChangesTheRequest(Ours):
    def answer(self, count, request, num_local):
        request.num_computed_tokens = num_local + count
        return count, False


@found_by("quick-look-ups")
class LooksAtFiles(Ours):
    def answer(self, count, request, num_local):
        os.stat(".")
        return count, False


# --- identity ---


@found_by("salt")
class IgnoresSalts(Ours):
    def on_new_request(self, request):
        request.view.extra_keys = type(request.view.extra_keys)()
        request.cache_salt = None
        super().on_new_request(request)


@found_by("weights")
class IgnoresWeights(Ours):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        vllm_config.kv_transfer_config.kv_connector_extra_config["weights_version"] = "1"
        running.weights_digest = lambda *_, **__: bytes(32)
        super().__init__(vllm_config, role, kv_cache_config)


@found_by("rope")
class IgnoresRope(Ours):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        written = running.written_config
        running.written_config = lambda path: {**written(path), "rope_theta": 1.0}
        super().__init__(vllm_config, role, kv_cache_config)


@found_by("two-ranks")
class IgnoresItsRank(Ours):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        vllm_config.parallel_config.rank = 0
        super().__init__(vllm_config, role, kv_cache_config)


# --- steps ---


@found_by("chunked-prefill")
class SeesFirstChunksOnly(Ours):
    def build_connector_meta(self, scheduler_output):
        step = replace(scheduler_output, scheduled_cached_reqs=CachedRequestData())
        return super().build_connector_meta(step)


@found_by("preempted")
class AppendsBlocksOfResumedRequests(Ours):
    def build_connector_meta(self, scheduler_output):
        cached = scheduler_output.scheduled_cached_reqs
        old = [False] * len(cached.req_ids)
        cached = replace(cached, resumed_req_ids=set(), resumed_from_preemption=old)
        step = replace(scheduler_output, scheduled_cached_reqs=cached, preempted_req_ids=set())
        return super().build_connector_meta(step)


@found_by("reuse")
class PlansNothing(Ours):
    def build_connector_meta(self, scheduler_output):
        super().build_connector_meta(scheduler_output)


@found_by("reuse")
class SendsWhatCannotBePickled(Ours):
    def build_connector_meta(self, scheduler_output):
        metadata = super().build_connector_meta(scheduler_output)
        object.__setattr__(metadata, "lock", threading.Lock())
        return metadata


@found_by("aborts")
class KnowsRunningRequestsOnly(Ours):
    def request_finished_all_groups(self, request, block_ids):
        if not any(block_ids):
            raise KeyError(request.request_id)
        return super().request_finished_all_groups(request, block_ids)


@found_by("reuse")
class NeverReportsTheEnd(Ours):
    def request_finished_all_groups(self, request, block_ids):
        _, params = super().request_finished_all_groups(request, block_ids)
        return True, params


@found_by("unused-promise")
class LoadsWhatWasNotTaken(Ours):
    def answer(self, count, request, num_local):
        self.promised = getattr(self, "promised", {})
        self.promised[request.request_id] = count
        return count, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        count = self.promised.pop(request.request_id, num_external_tokens)
        super().update_state_after_alloc(request, blocks, count)


@found_by("part-of-a-promise")
class LoadsAllOfWhatWasTakenInPart(Ours):
    def answer(self, count, request, num_local):
        self.promised = getattr(self, "promised", {})
        self.promised[request.request_id] = count
        return count, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        count = self.promised.pop(request.request_id, 0) if num_external_tokens else 0
        super().update_state_after_alloc(request, blocks, count)


@found_by("repeated-reports")
class CountsReportsOfEnds(Ours):
    def request_finished_all_groups(self, request, block_ids):
        _, params = super().request_finished_all_groups(request, block_ids)
        self.sending = getattr(self, "sending", set()) | {request.request_id}
        return True, params

    def get_transfer_results(self, finished_req_ids):
        results = super().get_transfer_results(finished_req_ids)
        results.finished_sending = set(finished_req_ids)
        return results

    def update_connector_output(self, connector_output):
        super().update_connector_output(connector_output)
        for name in connector_output.finished_sending or ():
            self.sending.remove(name)


# --- bytes ---


@found_by("reuse")
class LoadsNothing(Ours):
    def register_kv_caches(self, kv_caches):
        super().register_kv_caches({name: kv.clone() for name, kv in kv_caches.items()})


@found_by("reuse")
class SkipsTheLastLayer(Ours):
    def register_kv_caches(self, kv_caches):
        *_, last = kv_caches
        super().register_kv_caches({**kv_caches, last: kv_caches[last].clone()})


@found_by("reuse")
class LoadsAfterTheForward(Ours):
    def start_load_kv(self, forward_context, **kwargs):
        self.late = forward_context

    def wait_for_save(self):
        super().start_load_kv(self.late)
        super().wait_for_save()


@found_by("reuse")
class SavesBeforeTheForward(Ours):
    def start_load_kv(self, forward_context, **kwargs):
        super().start_load_kv(forward_context)
        super().wait_for_save()

    def wait_for_save(self):
        pass


@found_by("local-blocks")
class WritesAllBlocks(Ours):
    def register_kv_caches(self, kv_caches):
        self.kv = kv_caches
        super().register_kv_caches(kv_caches)
        self.before = {name: kv.clone() for name, kv in kv_caches.items()}

    def start_load_kv(self, forward_context, **kwargs):
        for name, kv in self.kv.items():
            kv.copy_(self.before[name])
        super().start_load_kv(forward_context)

    def clear_connector_metadata(self):
        super().clear_connector_metadata()
        self.before = {name: kv.clone() for name, kv in self.kv.items()}


@found_by("flipped")
class TrustsItsDisk(Ours):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        recordio.check_rows = lambda *_: True
        super().__init__(vllm_config, role, kv_cache_config)


@found_by("reuse")
class StoresNothing(Ours):
    def wait_for_save(self):
        pass


@found_by("restart")
class StoresInMemory(Ours):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        vllm_config.kv_transfer_config.kv_connector_extra_config["store"] = "memory://kit"
        super().__init__(vllm_config, role, kv_cache_config)


# --- what operators see ---


@found_by("reset")
class ForgetsToReset(Ours):
    def reset_cache(self):
        return True


@found_by("quiet")
class LogsEachHit(Ours):
    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        logging.getLogger("kvferry").setLevel(logging.INFO)
        logging.getLogger("kvferry").info("hit of %d tokens", num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)


@found_by("directory-removed")
class ReadsItsMarkerInEachStep(Ours):
    def wait_for_save(self):
        with open(self.cache.store.url.removeprefix("file://") + "/kvferry.json"):
            super().wait_for_save()


@found_by("private-files")
class ShowsItsFiles(Ours):
    def clear_connector_metadata(self):
        super().clear_connector_metadata()
        for folder, folders, files in os.walk(self.cache.store.url.removeprefix("file://")):
            for name in [*folders, *files]:
                os.chmod(os.path.join(folder, name), 0o777)


# --- ends ---


@found_by("reuse")
class Hangs(Ours):
    def wait_for_save(self):
        threading.Event().wait()


@found_by("reuse")
class EndsTheProcess(Ours):
    def wait_for_save(self):
        os._exit(0)


@found_by("reuse")
class Crashes(Ours):
    def wait_for_save(self):
        ctypes.string_at(0)


@found_by("reuse")
class EatsMemory(Ours):
    def wait_for_save(self):
        self.eaten = b"x" * (10 << 30)


@found_by("starts")
class NeverShutsDown(Ours):
    def shutdown(self):
        threading.Event().wait()


class NeedsADevice(Ours):
    def __init__(self, vllm_config, role, kv_cache_config=None):
        raise RuntimeError("no CUDA device")
