"""Bugs of public V1 connectors, each in a copy of `plain`, with the case of the kit that finds it.
`MISSED` are those that none does."""

from __future__ import annotations

import copy
import socket
import threading
import time
from collections import deque
from hashlib import blake2b
from pathlib import Path

from tests.testing.plain import Plain

OPTIONS = {"path": "{dir}"}

FOUND: dict[str, str] = {}
"""By name of the class: the case that must find its bug."""

MISSED: set[str] = set()


def found_by(case: str):
    def add(cls: type) -> type:
        FOUND[cls.__name__] = case
        return cls

    return add


def missed(cls: type) -> type:
    MISSED.add(cls.__name__)
    return cls


# --- what cases were written for ---


@found_by("preempted-in-chunks")
class AppendsBlocksOfHalfAPrompt(Plain):
    """The newcomer's: a table of a resumed request is replaced only once its prompt is computed."""

    def grow(self, known, is_resumed, blocks):
        whole = len(known.table) * self.size >= known.request.num_prompt_tokens
        super().grow(known, is_resumed and whole, blocks)


@found_by("preempted")
class AppendsBlocks(Plain):
    def grow(self, known, is_resumed, blocks):
        super().grow(known, False, blocks)


@found_by("local-blocks")
class LoadsTheFirstBlocks(Plain):
    def range(self, local, count):
        return 0, count // self.size


@found_by("weights-in-place")
class KeysByPath(Plain):
    """By all of the configuration's content, but of weights by their path alone."""

    def identity(self, config):
        model = config.model_config
        read = [Path(model.model, "config.json").read_bytes(), model.model.encode()]
        said = repr((read, str(model.dtype), self.size, config.parallel_config.world_size))
        return blake2b(said.encode()).digest()


@found_by("rope-in-place")
class KeysConfigurationByPath(Plain):
    def identity(self, config):
        model = config.model_config
        weights = Path(model.model, "model.safetensors").read_bytes()
        said = repr((weights, model.model, str(model.dtype), self.size))
        return blake2b(said.encode() + str(config.parallel_config).encode()).digest()


@found_by("weights-in-place")
class KeysByTimeOfChange(Plain):
    def identity(self, config):
        files = sorted(Path(config.model_config.model).iterdir())
        said = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        said += [str(config.model_config.dtype), self.size, config.parallel_config.world_size]
        return blake2b(repr(said).encode()).digest()


class SlowLookUps(Plain):
    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.be_slow()
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


@found_by("quick-look-ups")
class SleepsInLookUps(SlowLookUps):
    def be_slow(self):
        time.sleep(0.001)


@found_by("quick-look-ups")
class AsksASocketInLookUps(SlowLookUps):
    def be_slow(self):
        here, there = socket.socketpair()
        with here, there:
            here.send(b"?")
            there.recv(1)


@found_by("quick-look-ups")
class ComputesInLookUps(SlowLookUps):
    def be_slow(self):
        start = time.thread_time()
        while time.thread_time() - start < 0.08:
            pass


@found_by("quick-look-ups")
class WaitsForAnEventInLookUps(SlowLookUps):
    def be_slow(self):
        threading.Event().wait(0.001)


@found_by("quick-look-ups")
class WaitsForItsWriter(SlowLookUps):
    """A thread holds the lock of the index while it writes."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        super().__init__(vllm_config, role, kv_cache_config)
        self.lock = LOCK

    def be_slow(self):
        with self.lock:
            pass

    def write(self, block, key):
        held = {name: kv[block : block + 1].clone() for name, kv in self.kv.items()}

        def work():
            with self.lock:
                writer = copy.copy(self)
                writer.kv = held
                Plain.write(writer, 0, key)

        threading.Thread(target=work, daemon=True).start()


LOCK = threading.Lock()

# --- what no case was written for ---


@found_by("same-end")
class KeysBlocksAlone(Plain):
    """A block's key is that of its own tokens: the beginning is not in it."""

    def key(self, before, start, tokens):
        return blake2b(repr((start, tokens)).encode(), digest_size=16).digest()


@found_by("same-end")
class KeysBlocksWithoutSalt(Plain):
    """The salt is in the first block's key, and later ones do not have the first's."""

    def key(self, before, start, tokens):
        return blake2b(
            (before if start == 0 else b"") + repr((start, tokens)).encode(), digest_size=16
        ).digest()


@found_by("token-borders")
class JoinsTokensAsText(Plain):
    def key(self, before, start, tokens):
        return blake2b(before + "".join(map(str, tokens)).encode(), digest_size=16).digest()


@found_by("token-borders")
class KeysTokensOf16Bits(Plain):
    def key(self, before, start, tokens):
        return super().key(before, start, [token & 0xFFFF for token in tokens])


@found_by("random-walk")
class SavesAStepLate(Plain):
    """KV is copied in the next step, when its blocks may be others'."""

    late = ()

    def wait_for_save(self):
        for block, key in self.late:
            self.write(block, key)
        self.late = self._get_connector_metadata().saves


@found_by("full-pool")
class SavesBlocksBeforeTheyAreFull(Plain):
    def save(self, name, computed, step, moves):
        known = self.known[name]
        count = -(-(computed + step.num_scheduled_tokens[name]) // self.size) * self.size
        tokens = min(count, known.request.num_tokens)
        for block, key in zip(known.table, self.keys(known.request, tokens), strict=False):
            if key not in self.stored:
                moves.saves.append((block, key))


@found_by("gone-after-promise")
class ReportsOneBadBlockOfAll(Plain):
    def get_block_ids_with_load_errors(self):
        return set(sorted(super().get_block_ids_with_load_errors())[-1:])


@found_by("truncated")
class SwallowsFailedLoads(Plain):
    def get_block_ids_with_load_errors(self):
        super().get_block_ids_with_load_errors()
        return set()


@found_by("reuse")
class ReportsSyncLoads(Plain):
    def get_finished(self, finished_req_ids):
        return None, set(self._get_connector_metadata().loads) or None


@found_by("two-ranks")
class OnlyRankZeroSaves(Plain):
    def write(self, block, key):
        if self.rank == 0:
            super().write(block, key)


@found_by("reuse")
class NeverFreesBlocks(Plain):
    def request_finished(self, request, block_ids):
        super().request_finished(request, block_ids)
        return True, None


@found_by("aborts")
class KeepsBlocksOfWaitingRequests(Plain):
    """Keeps blocks of a request that never had any, and never gives them back."""

    def request_finished(self, request, block_ids):
        super().request_finished(request, block_ids)
        return not block_ids, None


class Async(Plain):
    """Loads end two steps later."""

    loads_async = True

    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        self.queue = deque([{}, {}])

    def get_finished(self, finished_req_ids):
        self.queue.append(self.running)
        self.running = self.queue.popleft()
        ended = super().get_finished(finished_req_ids)
        self.running = {}
        return ended


@found_by("reuse")
class ReportsLoadsTwice(Async):
    before = frozenset()

    def get_finished(self, finished_req_ids):
        _, ended = super().get_finished(finished_req_ids)
        again, self.before = self.before, frozenset(ended or ())
        return None, set(ended or ()) | again or None


@found_by("reuse")
class ReportsLoadsBeforeTheirBytes(Async):
    def get_finished(self, finished_req_ids):
        early = set(self.running) or None
        super().get_finished(finished_req_ids)
        return None, early


@found_by("aborts")
class ForgetsLoadsOfEndedRequests(Async):
    def get_finished(self, finished_req_ids):
        for loads in self.queue:
            for name in finished_req_ids & loads.keys():
                del loads[name]
        return super().get_finished(finished_req_ids)


@missed
class AnswersAHitAgainAfterAFailure(Async):
    def update_connector_output(self, connector_output):
        pass


@found_by("aborts")
class KeepsBlocksOfAbortedLoads(Async):
    """Two ends for one request: of its load, and of what it keeps."""

    def request_finished(self, request, block_ids):
        is_loading = request.request_id in {n for m in self.plans for n in m.loads}
        super().request_finished(request, block_ids)
        self.ended = getattr(self, "ended", set()) | {request.request_id}
        return is_loading, None


@found_by("forgotten-requests")
class KeepsEndedRequests(Plain):
    def request_finished(self, request, block_ids):
        return False, None


@found_by("reuse")
class ChangesTheStep(Plain):
    def build_connector_meta(self, scheduler_output):
        moves = super().build_connector_meta(scheduler_output)
        scheduler_output.num_scheduled_tokens.clear()
        return moves


@found_by("full-pool")
class ForgetsWhatABusyStepLoads(Plain):
    """Only the loads of the first request of a step are planned."""

    def build_connector_meta(self, scheduler_output):
        self.loads = dict(list(self.loads.items())[:1])
        return super().build_connector_meta(scheduler_output)


@found_by("reuse")
class LoadsInSteppedForwardsOnly(Async):
    """A step without tokens moves nothing."""

    def start_load_kv(self, forward_context, **kwargs):
        if forward_context.attn_metadata is not None:
            super().start_load_kv(forward_context)


@found_by("restart")
class KeysByPythonsHash(Plain):
    """Python's own hash of tokens, which differs in each process."""

    def key(self, before, start, tokens):
        return hash((before, *map(str, tokens))).to_bytes(16, "little", signed=True)


@missed
class KeysOf16Bits(Plain):
    def key(self, before, start, tokens):
        return blake2b(super().key(before, start, tokens), digest_size=2).digest() * 8
