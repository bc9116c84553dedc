"""Bugs of real kinds, each a change of a few words in kvferry, that worlds must find.

    .venv/bin/python -m tests.testing.world.seeded_bugs [NAME ...] [--seeds 150]

Each bug lives in a process of its own, where one module of kvferry is loaded with the change. The
process runs seeds until an invariant is broken, and says which.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import NamedTuple

import kvferry

SRC = Path(kvferry.__file__).parent


class Edit(NamedTuple):
    """Where `old` stands once, `new` stands instead."""

    file: str
    old: str
    new: str


class Bug(NamedTuple):
    """A bug: one edit, or `more` where several places keep a fault from doing harm."""

    name: str
    file: str
    old: str
    new: str
    more: tuple[Edit, ...] = ()

    @property
    def edits(self) -> tuple[Edit, ...]:
        return (Edit(self.file, self.old, self.new), *self.more)


SCHEDULER = "cache/deciding/scheduler.py"
REQUEST = "cache/deciding/request.py"
REQUESTS = "cache/deciding/requests.py"
LOOKUP = "cache/deciding/lookup.py"
SEARCH = "cache/deciding/search.py"
SEARCHES = "cache/deciding/searches.py"
POOL = "cache/deciding/host_pool.py"
SAVES = "cache/deciding/saves.py"
AUDITS = "cache/deciding/audits.py"
ACCOUNTS = "cache/deciding/accounts.py"
LOANS = "cache/deciding/loans.py"
WRITES = "cache/deciding/shared_writes.py"
WORKER = "cache/moving/worker.py"
SLOTS = "cache/moving/slot_io.py"
HEALTH = "store/tiers/health.py"
TIERED = "store/tiers/tiered.py"
TIER = "store/tiers/tier.py"
THREAD = "store/tiers/thread.py"
KEYS = "store/servers/server_keys.py"
REMOTE = "store/servers/remote.py"
FAULTS = "store/faults.py"
TABLES = "blocks/tables.py"

BUGS = (
    # -- slots and pins
    Bug("a pin is forgotten when a request ends", REQUEST,
        "            self.search.release()\n", "            pass\n"),
    Bug("a load keeps its pins after its plan", REQUEST,
        "            self.load = None\n            hold.release()\n",
        "            self.load = None\n"),
    Bug("an audit keeps its slots", AUDITS,
        "        audit.hold.release()\n        if is_current:", "        if is_current:"),
    Bug("an audit that is given up keeps its slots", AUDITS,
        "            self.is_expected = False\n            self.hold.release()\n",
        "            self.is_expected = False\n"),
    Bug("a slot is assigned while a rank still fills it", POOL,
        "        if slot.num_filling:\n            return slot\n",
        "        slot.num_filling = 0\n"),
    Bug("a slot that is lent is assigned again", LOANS,
        "            return bool(self._current(slot))", "            return False"),
    Bug("a pinned slot may be evicted", POOL,
        "        slot.pins += 1\n        self._idle.pop(slot.key, None)\n",
        "        slot.pins += 1\n"),
    Bug("a slot that is evicted is still found", POOL,
        "                self._forget(slot)\n                return slot.index\n",
        "                del self._idle[key]\n                return slot.index\n"),
    Bug("a write that failed leaves its slot writing", POOL,
        "        if slot.failed:\n            self.end_write(slot)\n",
        "        if slot.failed:\n            self._settle(slot)\n"),
    Bug("a chunk that is evicted is still lent", POOL,
        "            self.loans.withdraw(slot.key)\n            del", "            del"),
    Bug("a pin of a hit is ended twice", SEARCH,
        "        self.pinned.release()\n        self.withdraw()\n",
        "        self.pinned._pool.unpin_all(list(self.pinned))\n"
        "        self.pinned.release()\n        self.withdraw()\n"),
    # -- hits
    Bug("a hit counts chunks that are still being read", LOOKUP,
        "            if chunk.what is HELD or self.groups(ask.wanted, number, hit) <= chunk.held:",
        "            if chunk.what is not STORED:"),
    Bug("a request loads more than its limit", SCHEDULER,
        "            most = view.options.max_load_tokens\n", "            most = None\n"),
    Bug("a request loads although it asked for none", SCHEDULER,
        "view.options.load", "True"),
    Bug("a request is stored although it asked not to be", SCHEDULER,
        "        return view.options.store and (", "        return ("),
    Bug("a hit ends with the last token", LOOKUP,
        "        return max(0, min(num_chunks * self._chunk, end)) // block * block",
        "        return max(0, min(num_chunks * self._chunk, end + 1)) // block * block"),
    Bug("a hit ends inside of a block", LOOKUP,
        "        return max(0, min(num_chunks * self._chunk, end)) // block * block",
        "        return max(0, min(num_chunks * self._chunk, end))"),
    Bug("a fetch has no deadline", LOOKUP,
        "        is_in_time = not isinstance(ask.state, Fetching) or ask.now < ask.state.until",
        "        is_in_time = True",
        (Edit(SEARCHES, "isinstance(state, Fetching) and self._clock() < state.until and",
              "isinstance(state, Fetching) and"),)),
    Bug("a wait for another engine has no end", LOOKUP,
        "        if ask.now >= wait.until:\n", "        if False:\n"),
    Bug("a promise stands although the host has other tokens itself", SEARCHES,
        "        if hit is None or hit.start != num_local:", "        if hit is None:"),
    Bug("a preempted request keeps its audit", REQUEST,
        "            self.drop_load()\n            self.drop_audit()\n\n    def block_saves",
        "            self.drop_load()\n\n    def block_saves"),
    Bug("a load begins a chunk too early", WORKER,
        "                yield _Loaded(load, chunk, ChunkCopy(slot, runs, chunk.first_token))",
        "                first = chunk.first_token - 1\n"
        "                yield _Loaded(load, chunk, ChunkCopy(slot, runs, max(0, first)))"),
    # -- windows
    Bug("a fetch of some groups counts as one of all", POOL,
        "            slot.held |= slot.filling", "            slot.held |= self._all_groups"),
    Bug("a hit takes chunks of which it lacks groups", LOOKUP,
        "or self.groups(ask.wanted, number, hit) <= chunk.held:", "or chunk.held:"),
    Bug("a load leaves out where a window begins", TABLES,
        "            first = stop - self.window + 1\n",
        "            first = stop - self.window + 1 + self.block_size\n"),
    Bug("what a window has dropped is saved", TABLES,
        "            if NULL_BLOCK in part.ids:\n                return None\n", ""),
    Bug("a load fills the null block before a window", TABLES,
        "        return max(start, first // self.block_size * self.block_size)",
        "        return max(start, first // self.block_size * self.block_size - self.block_size)"),
    # -- epochs, namespaces, keys
    Bug("a request that is saved keeps what it had before a reset", REQUESTS,
        "            request.outlive_epoch()\n", "            pass\n"),
    Bug("a reset does not change the namespace", REQUESTS,
        "        self.namespace = namespace\n        self.by_id", "        self.by_id"),
    Bug("records are written under the namespace before the reset", WORKER,
        "            self._records.switch_namespace(plan.namespace)", "            pass"),
    Bug("ranks' records keep the first namespace", WRITES,
        "        schema = self._schemas[number].with_namespace(record.namespace)",
        "        schema = self._schemas[number]"),
    Bug("a salt is no part of a key", "keys/chain.py",
        '            common["salt"] = extra.cache_salt\n', "            pass\n"),
    Bug("an adapter is no part of a key", "keys/chain.py",
        '            common["lora"] = extra.lora\n', "            pass\n"),
    Bug("an image counts only where it ends", "keys/chain.py",
        "            if item.offset < start + self._chunk_tokens and"
        " item.offset + item.length > start",
        "            if start < item.offset + item.length <= start + self._chunk_tokens"),
    Bug("of an image only the place counts", "keys/chain.py",
        "            [item.digest, item.offset - start, item.length]",
        "            [item.offset - start, item.length]"),
    Bug("how long an image is does not count", "keys/chain.py",
        "            [item.digest, item.offset - start, item.length]",
        "            [item.digest, item.offset - start]"),
    Bug("a key is no part of what is verified", "record/check.py",
        "    if not data.startswith(header):\n        return _why_header_differs(schema, size, data)",
        "    if not data.startswith(header):\n"
        "        header = data[:header_bytes]"),
    # -- reads
    Bug("leaves are not compared", "store/recordio.py",
        "        if not check_rows(component, buffer, leaves):",
        "        if not (check_rows(component, buffer, leaves) or True):"),
    Bug("a read that failed counts as filled", SLOTS,
        "            return Filled(chunk.slot, missed, seconds, detail=said, kind=kind)",
        "            return Filled(chunk.slot, None, seconds, detail=said, kind=kind)"),
    Bug("a wrong record stays in the store", "store/recordio.py",
        "        store.discard(read.key, reason)\n", "        pass\n"),
    Bug("a tier that fails hides the others", TIERED,
        "                fault = error\n                continue\n            if size is not None:",
        "                raise\n            if size is not None:"),
    # -- saves
    Bug("a save goes on after a failed load", WORKER,
        "        if failures_known >= self._ended.failures:", "        if True:"),
    Bug("others save what a failed load spoilt", SAVES,
        "name not in report.failed_requests:\n                    request.block_saves()",
        "name not in report.failed_requests:\n                    pass"),
    Bug("a chunk is saved before it is computed", SAVES,
        "        whole = min(computed, limit) // chunk_tokens\n",
        "        whole = min(computed + chunk_tokens - 1, limit) // chunk_tokens\n"),
    Bug("NaN is stored", SLOTS,
        "        if not are_finite:\n            return Sealed(chunk.slot, None, is_finite=False)\n",
        ""),
    Bug("a record is written before the last rank has hashed", WRITES,
        "            if len(record.digests) < self._world_size:",
        "            if not record.digests:"),
    Bug("ranks of a record are joined in the wrong order", "cache/deciding/rank_slots.py",
        "        for offset, part in sorted(found):",
        "        for offset, part in zip(sorted(at for at, _ in found),"
        " [part for _, part in found][::-1], strict=True):"),
    Bug("saves that wait never begin", "store/io_pool.py",
        "                        self._queue.put(self._waiting.popleft())\n"
        "                    else:\n                        self._num_begun -= 1",
        "                        self._queue.put(self._waiting.popleft())"),
    # -- accounts
    Bug("a report is applied twice", SCHEDULER,
        "                    self._learn(report)\n",
        "                    self._learn(report)\n                    self._learn(report)\n"),
    Bug("a reason is counted twice", ACCOUNTS,
        "        misses[missed] += limit - stop\n",
        "        misses[missed] += limit - stop\n"
        "        misses[LookupMiss.AUDIT] += misses[LookupMiss.AUDIT]\n"),
    Bug("a hit is counted for whole chunks", ACCOUNTS,
        "            tiers[tier] += min(stop, first + self._chunk) - max(start, first)",
        "            tiers[tier] += self._chunk"),
    Bug("tokens that the engine has are counted as misses", ACCOUNTS,
        "        local = min(search.num_local, num_tokens)", "        local = 0"),
    # -- stores and tiers
    Bug("a tier that was away never comes back", HEALTH,
        "        if self.state is State.AWAY:\n            self._back_at = self._clock()",
        "        if self.state is State.OPENING:\n            self._back_at = self._clock()"),
    Bug("a store that could not be opened is not tried again", HEALTH,
        "        self._tries.until = self._clock() + pause if is_tried_again else math.inf",
        "        self._tries.until = math.inf"),
    Bug("pauses grow without end", "store/backoff.py",
        "        self.pause = min(2 * self.pause or self._first, self._longest)",
        "        self.pause = 4 * self.pause or self._first"),
    Bug("a tier refuses writes for ever", HEALTH,
        "        is_over = self.state is State.REFUSING and self._writes.is_over",
        "        is_over = False"),
    Bug("near memory does not keep its quota", "store/memory.py",
        "            self._used_bytes -= len(value.content)\n            evicted",
        "            evicted"),
    Bug("a quota counts what was deleted", "store/memory.py",
        "            if value is not None:\n                self._used_bytes -= len(value.content)\n",
        ""),
    Bug("a key stays asked for after a question that failed", KEYS,
        "        finally:\n            self._asked.difference_update(*(each.keys for each in questions))",
        "        except ZeroDivisionError:\n            pass"),
    Bug("an answer that is late brings back what was forgotten", KEYS,
        "                if key not in forgotten:\n", "                if True:\n"),
    Bug("an absent key is never asked for again", KEYS,
        "ABSENT_SECONDS = 1.0", "ABSENT_SECONDS = 1e9"),
    Bug("a key that is gone stays known", REMOTE,
        "                self._keys.forget(key)\n", "                pass\n"),
    Bug("a value under our name that is none of ours stays", REMOTE,
        "        return size == 0 or (self._are_alike and size not in (None, num_bytes))",
        "        return False"),
    # -- the ends
    Bug("a close waits for threads that hang", "store/io_pool.py",
        "            thread.join(max(0.0, deadline - time.monotonic()))",
        "            thread.join()"),
    Bug("a client is not closed", REMOTE,
        "        self._keys.close()\n        self._client.close()\n", "        self._keys.close()\n"),
    Bug("the reader of notices does not end", "store/erasures.py",
        "        self._closing.set()\n        if", "        if"),
    Bug("what was erased stays in memory", "cache/deciding/erased.py",
        "        pool.erase(lambda slot: not names.isdisjoint(names_of(namespace, slot.key, slot.mark)))\n",
        ""),
    Bug("what was erased is written again", TIER,
        "        return self.erasures is not None and self.erasures.refuses(value)",
        "        return False",
        (Edit("store/erasures.py",
              "        if written.key in self._left or self._is_erased(written.names, began):\n",
              "        if False:\n"),)),
    # -- bugs that kvferry has had
    Bug("had: a reset drops a promise, and nothing fails", "contract/promises.py",
        "                self._of[name].lose()", "                pass"),
    Bug("had: a plan that cannot be built keeps its slots", SCHEDULER,
        "            self._cancel_copies()\n            raise", "            raise"),
    Bug("had: the thread of a tier spins", FAULTS,
        'f"{said} failed", passes=StoreError)', 'f"{said} failed", passes=Exception)',
        (Edit(TIER, 'self.faults.guard("trial", passes=StoreError)',
              'self.faults.guard("trial", passes=Exception)'),
         Edit(THREAD, 'self._target.faults.guard("copy"):', 'suppress():'),
         Edit(THREAD, "import threading\n", "import threading\nfrom contextlib import suppress\n"
              "import logging\n"),
         Edit(THREAD, "            except StoreError:  # of a store that broke its contract;"
              " after a while, others go on\n"
              "                is_broken = True\n"
              "                self._closing.wait(self._target.patience.look_seconds)\n",
              "            except Exception:\n"
              "                is_broken = True\n"
              '                logging.getLogger("kvferry").warning("copying a value")\n'))),
    Bug("had: a client's own fault is seen nowhere", FAULTS,
        'f"{said} failed", passes=StoreError)', 'f"{said} failed", passes=Exception)'),
    Bug("had: a request that ran uncached, and ends while it waits, keeps its pins", SCHEDULER,
        "            if request is not None:\n                request.give_back()",
        "            if request is not None and request.uncached is None:\n"
        "                request.give_back()"),
    Bug("had: a promise outlives the verdict on its record", AUDITS,
        "        self._withdraw(frozenset(keys))\n", ""),
    Bug("had: what is refused after a reset stays on the server", SAVES,
        "        self._take_out([each.key for each in saved], COMPUTED_WRONG, slot.namespace)",
        "        self._take_out([each.key for each in saved], COMPUTED_WRONG,"
        " self._requests.namespace)",
        (Edit(SAVES, "            self._take_out((slot.key,), COMPUTED_WRONG, slot.namespace)",
              "            self._take_out((slot.key,), COMPUTED_WRONG,"
              " self._requests.namespace)"),)),
    Bug("had: a fault before a plan is begun leaves its loads to the next one", SCHEDULER,
        "            self._erased.heed(self.requests, self.pool)\n            if step.pre", "            if step.pre",
        (Edit(SCHEDULER, "    def build_plan(self, step: StepView) -> Plan:\n",
              "    def build_plan(self, step: StepView) -> Plan:\n"
              "        self._erased.heed(self.requests, self.pool)\n"),)),
    Bug("had: a fault while a search settles leaves pins without an owner", SEARCHES,
        "        search.state = Settled(hit, before)  # what the audit has pinned has an owner from"
        " here on\n", "",
        (Edit(SEARCHES, "        self._learn(search, before, late)\n",
              "        self._learn(search, before, late)\n"
              "        search.state = Settled(hit, before)\n"),
         Edit("cache/deciding/owners.py", "            reclaim(role.pool, role.holds())\n", ""))),
    Bug("had: clients do not learn why a cache is off", SCHEDULER,
        "            miss = Miss(self._state.miss or LookupMiss.NOT_LOADING, self._state.why)",
        "            miss = Miss(self._state.miss or LookupMiss.NOT_LOADING)"),
    Bug("had: a second plan is blamed on the worker", "contract/guard_scheduler.py",
        "            return self._promises.repeat(self._empty_plan)",
        "            return self._promises.repeat(Plan())"),
    Bug("had: a request that outlives a reset does not learn what it got", REQUEST,
        "        self.uncached = self.uncached or self.answer\n", ""),
    Bug("had: a request that waits again after a reset does not learn what it got", REQUESTS,
        "time.time(), self.at_work, uncached=uncached)", "time.time(), self.at_work)"),
)  # fmt: skip


def applied(source: str, edits: Sequence[Edit]) -> str:
    """A module with a bug in it. Raises ValueError where the bug no longer fits."""
    for edit in edits:
        if source.count(edit.old) != 1:
            raise ValueError(f"{edit.file} has {edit.old!r} {source.count(edit.old)} times")
        source = source.replace(edit.old, edit.new)
    return source


class _Changed(SourceFileLoader):
    """Loads a module with a bug in it."""

    edits: Sequence[Edit]

    def get_code(self, fullname):
        source = Path(self.path).read_text(encoding="utf-8")
        return compile(applied(source, self.edits), self.path, "exec")


def infect(bug: Bug) -> None:
    """Have the modules of a bug loaded with it. Before they are imported."""
    changed: dict[str, list[Edit]] = {}
    for edit in bug.edits:
        name = "kvferry." + edit.file.removesuffix(".py").replace("/", ".")
        changed.setdefault(name, []).append(edit)

    class Finder:
        @staticmethod
        def find_spec(name: str, path=None, target=None) -> ModuleSpec | None:
            if name not in changed:
                return None
            spec = PathFinder.find_spec(name, path)
            spec.loader = _Changed(name, spec.origin)
            spec.loader.edits = changed[name]
            return spec

    sys.meta_path.insert(0, Finder)
    for name in [each for each in sys.modules if each.startswith("kvferry.")]:
        del sys.modules[name]


def find(bug: Bug, num_seeds: int) -> str:
    """Run seeds with a bug until one fails. Runs in: a process of its own."""
    infect(bug)
    from kvferry.testing.world.running import run, worlds
    from kvferry.testing.world.seeds import draw

    with worlds() as seam:
        for seed in range(num_seeds):
            failure = run(draw(seed), seam).failure
            if failure is not None:
                return f"seed {seed}: {str(failure)[:120]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=150)
    parser.add_argument("--in-process", action="store_true")
    given = parser.parse_args()
    by_name = {bug.name: bug for bug in BUGS}
    chosen = [by_name[name] for name in given.names or by_name]
    if given.in_process:
        print(find(chosen[0], given.seeds))
        return 0
    missed = []
    for bug in chosen:
        began = time.monotonic()
        command = [sys.executable, "-m", __spec__.name, bug.name, "--in-process"]
        done = subprocess.run(
            [*command, "--seeds", str(given.seeds)], capture_output=True, text=True, check=False
        )
        said = done.stdout.strip() if done.returncode == 0 else f"ERROR {done.stderr[-300:]}"
        print(f"{time.monotonic() - began:6.1f} s  {bug.name}: {said or 'NOT FOUND'}", flush=True)
        if not said or said.startswith("ERROR"):
            missed.append(bug.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} found; not: {missed}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
