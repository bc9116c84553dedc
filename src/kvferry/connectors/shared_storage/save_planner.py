"""Which chunks to save in a step: whole, computed, confirmed, and not stored yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kvferry.connectors.shared_storage.messages import ChunkRef, Save, Saved, Session
from kvferry.connectors.shared_storage.requests import BrokenKeys, RequestState
from kvferry.connectors.shared_storage.tables import Tables
from kvferry.types import BlockTable, ChunkKey, ScheduledRequest, StepView

if TYPE_CHECKING:
    from kvferry.connectors.shared_storage.sessions import SharedWrites
    from kvferry.observe import Observer
    from kvferry.store.base import Store


class SavePlanner:
    """Runs in: scheduler thread; memory only.

    Args:
        store: asked what is known to be stored.
        requests: all live requests, by id.
        broken: chunks to store again although the store may seem to have them.
        observer: receives counts.
        chunk_tokens: tokens per chunk.
        tables: block tables of the host.
        save_generated: also save chunks that end in generated tokens.
        shared_writes: where several ranks write one record, else None.
    """

    def __init__(
        self,
        store: Store,
        requests: Mapping[str, RequestState],
        broken: BrokenKeys,
        observer: Observer,
        *,
        chunk_tokens: int,
        tables: Tables,
        save_generated: bool,
        shared_writes: SharedWrites | None,
    ) -> None:
        self._store = store
        self._requests = requests
        self._broken = broken
        self._observer = observer
        self._chunk = chunk_tokens
        self._tables = tables
        self._save_generated = save_generated
        self._shared_writes = shared_writes
        self._saving: set[bytes] = set()
        self._hears_workers = True
        self._unsaved: dict[str, RequestState] = {}

    def admitted(self, request_id: str, state: RequestState) -> None:
        """A request got blocks: look at its chunks from the first on."""
        state.next_save = 0
        state.barred = False
        self._unsaved[request_id] = state

    def forget(self, request_id: str) -> None:
        self._unsaved.pop(request_id, None)

    def expect_no_reports(self) -> None:
        """Nobody will tell how saves end: go by what the store knows."""
        self._hears_workers = False
        self._saving.clear()

    def bar_others(self, failed_requests: Collection[str]) -> None:
        """A load failed: save nothing more of the requests that may have computed on its blocks
        too, by way of the host's own prefix cache. The failed ones are computed again by the host;
        the others, vLLM lets run on."""
        for request_id in self._requests.keys() - set(failed_requests):
            self._requests[request_id].barred = True
            self.forget(request_id)

    @property
    def under_way(self) -> bool:
        """True until every save that was planned is reported."""
        return bool(self._saving)

    @property
    def has_unsaved(self) -> bool:
        """Whether the coming steps of some request have to be looked at."""
        return bool(self._unsaved)

    def clear(self) -> None:
        self._unsaved.clear()
        self._saving.clear()

    def plan(self, step: StepView) -> list[Save]:
        """The saves of this step. Costs nothing once every live prompt is saved."""
        saves: list[Save] = []
        if self._unsaved:
            for item in step.scheduled:
                state = self._unsaved.get(item.request.request_id)
                if state is not None:
                    self._plan_request(item, state, saves)
        return saves

    def _plan_request(self, item: ScheduledRequest, state: RequestState, saves: list[Save]) -> None:
        """Add every chunk that this step completes, or that an earlier one had to leave."""
        request = item.request
        # Tokens past `all_token_ids` are drafts: nobody confirmed them.
        limit = len(request.all_token_ids)
        if self._save_generated:
            state.keys.extend(request.all_token_ids)
        else:
            limit = min(limit, request.num_prompt_tokens)
            if state.next_save >= limit // self._chunk:
                self.forget(request.request_id)
                return
        computed = item.num_computed_tokens + item.num_scheduled_tokens
        whole = min(computed, limit) // self._chunk
        keys = state.keys.keys
        while state.next_save < whole:
            index = state.next_save
            save = self._save_of(ChunkRef(keys[index], index * self._chunk), item.block_ids)
            if save is not None:
                saves.append(save)
            state.next_save += 1

    def _save_of(self, chunk: ChunkRef, block_ids: BlockTable) -> Save | None:
        """The save of one chunk; None if somebody has it, or a table has dropped a part of it."""
        key = ChunkKey(chunk.key)
        if key in self._saving or (self._store.contains(key) and key not in self._broken):
            return None
        first = chunk.first_token
        blocks = self._tables.chunk_slices(block_ids, first, first + self._chunk)
        if blocks is None:
            self._observer.count("save_out_of_window")
            return None
        shared = self._shared_writes is not None
        if self._shared_writes is not None and not self._shared_writes.begin(key, first):
            return None
        if self._hears_workers:
            self._saving.add(key)
        return Save(chunk, blocks, shared)

    def sessions(self) -> Sequence[Session]:
        """Where the ranks write what they took out for earlier plans."""
        if self._shared_writes is None:
            return ()
        named = self._shared_writes.named()
        self._saving.difference_update(each.key for each in named if each.name is None)
        return named

    def learn(self, rank: int, saved: Saved) -> None:
        """A rank reported the end of a save."""
        retry = saved.retry
        if self._shared_writes is not None:
            settled = self._shared_writes.report(rank, saved)
            if settled is None:
                return
            retry = settled.retry
        elif saved.stored and not saved.existed:
            self._broken.mended(saved.key)
        self._saving.discard(saved.key)
        if retry:
            self.offer_again((saved.key,))

    def offer_again(self, keys: Collection[bytes]) -> None:
        """These are not stored after all (no staging memory, or the stored record was broken):
        requests that passed them look at them once more. Rare; walks all live requests."""
        for request_id, state in self._requests.items():
            passed = state.keys.keys[: state.next_save]
            first = next((i for i, key in enumerate(passed) if key in keys), None)
            if first is not None and not state.barred:
                state.next_save = first
                self._unsaved[request_id] = state
