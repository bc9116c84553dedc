"""`kvferry copy --join`: what ranks on several machines stored apart becomes whole records."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from kvferry.cli import stores
from kvferry.errors import FaultKind, StoreError
from kvferry.keys import ChunkKeys, ModelIdentity, Namespace
from kvferry.record.schema import RecordSchema
from kvferry.store.base import Store
from kvferry.store.catalogue import Entry, Indexed
from kvferry.store.file.catalogue import FileCatalogue
from kvferry.store.file.directory import record_path
from kvferry.store.kind import Opening
from kvferry.store.url import open_one
from kvferry.types import ChunkKey, ExtraKeys, KVGroup
from tests.cli.conftest import CHUNK_TOKENS as CHUNK
from tests.cli.conftest import TOKENS
from tests.record.samples import encode, payload_of
from tests.record.test_join import CLAIMS, claim, cut

GROUPS = (
    KVGroup(num_layers=4, num_kv_heads=2, content_size=8, dtype="float32", block_size=16),
    KVGroup(num_layers=2, num_kv_heads=1, content_size=3, dtype="bfloat16", block_size=16),
)
IDENTITY = ModelIdentity(weights=bytes(32), config={"dtype": "float32"}, name="m")
SPACE = Namespace.of(IDENTITY, GROUPS, CHUNK, "")
SCHEMA = RecordSchema.for_groups(namespace=SPACE.digest, chunk_tokens=CHUNK, groups=GROUPS)
RANKS = ([((0, 4), (0, 1)), ((0, 2), (0, 1))], [((0, 4), (1, 2)), ((0, 2), (0, 1))])
STAGES = ([((0, 1), (0, 2)), ((0, 2), (0, 1))], [((1, 4), (0, 2)), ((0, 0), (0, 0))])


class Made:
    """Records, and the same as shards.

    Attributes:
        records: whole records by key.
    """

    def __init__(
        self, tokens: Iterable[int] = TOKENS, salt: str | None = None, space: Namespace = SPACE
    ) -> None:
        keys = ChunkKeys(space.digest, CHUNK, ExtraKeys(cache_salt=salt))
        keys.extend(tokens)
        self._schema = SCHEMA.with_namespace(space.digest)
        self.records = {
            key: encode(
                self._schema,
                bytes(byte % 64 for byte in payload_of(SCHEMA, seed=number)),  # all are finite
                key=key,
                first_token=number * CHUNK,
                mark=keys.mark,
                of=b"",
            )
            for number, key in enumerate(keys.keys)
        }
        self.keys = keys.keys

    def shards(self, *splits: Sequence[object]) -> dict[ChunkKey, memoryview]:
        """The records of shards by key, of each whole record in order."""
        made = {}
        for key, record in self.records.items():
            for ranges in splits:
                info, data = cut(self._schema, record, ranges, of=key)
                made[info.key] = data
        return made


def put_all(
    url: str, values: dict[ChunkKey, memoryview], space: Namespace = SPACE
) -> list[ChunkKey]:
    with open_one(url, Opening(namespace=space.digest)) as store:
        store.describe(space.digest, space.as_text())
        for key, value in values.items():
            store.put(key, [value])
    return list(values)


def stored(url: str) -> dict[ChunkKey, bytes]:
    """All that a store has."""
    found = {}
    with open_one(url) as store:
        for entry in store.catalogue().scan():
            values = store.in_namespace(entry.namespace)
            value = bytearray(values.read(entry.key, ()))
            values.read(entry.key, [(0, memoryview(value))])
            found[entry.key] = bytes(value)
    return found


@pytest.fixture
def other(tmp_path):
    return (tmp_path / "other").as_uri()


@pytest.fixture
def joined(run):
    def join(*arguments: object, code: int = 0) -> dict[str, object]:
        ran = run("copy", *arguments, "--join", "--json", "-")
        assert ran.code == code, ran.err
        return json.loads(ran.out)

    return join


def counts(value) -> tuple[int, ...]:
    names = ("records", "of_shards", "shards", "stored", "existing", "vanished")
    return tuple(value[name] for name in names)


@pytest.mark.parametrize("splits", [RANKS, STAGES, (*RANKS, STAGES[0])])
def test_shards_become_the_records_that_one_machine_stores(joined, url, other, splits):
    made = Made()
    shards = made.shards(*splits)
    put_all(url, shards)
    value = joined(url, other)
    assert counts(value) == (4, 4, len(shards), 4, 0, 0)
    assert value["num_bytes"] == sum(map(len, shards.values()))
    assert stored(other) == made.records
    with open_one(other) as store:
        assert store.catalogue().description(SPACE.digest) == SPACE.as_text()
        assert store.stat().used_bytes == 4 * SCHEMA.record_bytes


def test_without_join_shards_stay_shards(run, url, other):
    shards = Made().shards(*RANKS)
    put_all(url, shards)
    assert run("copy", url, other).code == 0
    assert stored(other) == shards


def test_whole_records_are_copied_beside_and_joined_records_come_into_the_same_store(joined, url):
    made = Made()
    first = made.keys[0]
    put_all(url, made.shards(*RANKS))
    put_all(url, {first: made.records[first]})
    before = stored(url)
    value = joined(url, url)
    # The whole record counts, and again as one that its shards make.
    assert counts(value) == (5, 4, 8, 3, 2, 0)
    assert stored(url) == {**before, **made.records}
    damage(Path(record_path(url.removeprefix("file://"), next(iter(before)))))
    assert counts(joined(url, url)) == (8, 4, 8, 0, 8, 0)  # and what is there is not read again


@pytest.mark.parametrize("join", [True, False])
def test_chunks_of_a_prompt_are_evicted_in_its_order(join, run, url, other, tokens_file):
    made = Made()
    shards = made.shards(*RANKS)
    of_first = dict(list(shards.items())[:2])
    put_all(url, {key: made.records[key] for key in made.keys[1:]} | of_first)
    chosen = ["--namespace", SPACE.digest.hex(), "--tokens", tokens_file]
    ran = run("copy", url, other, *chosen, *(["--join"] if join else []))
    assert ran.code == 0, ran.err
    with open_one(other) as store:
        recent = [entry.key for entry in Indexed.of(store, "has no index").recent(9)]
    first = made.keys[:1] if join else list(of_first)
    assert set(recent[: len(first)]) == set(first)
    assert recent[len(first) :] == made.keys[1:]


def test_only_what_was_chosen_is_joined(joined, run, url, other, tokens_file):
    prompt = ["--namespace", SPACE.digest.hex(), "--tokens", tokens_file]
    made, salted, rest = Made(), Made(salt="s"), Made(tokens=range(50))
    for each in (made, salted, rest):
        put_all(url, each.shards(*RANKS))
    dry = joined(url, other, *prompt, "--dry-run")
    assert (dry["records"], dry["of_shards"], dry["shards"]) == (4, 4, 8)
    assert counts(joined(url, other, *prompt)) == (4, 4, 8, 4, 0, 0)
    assert stored(other) == made.records
    assert counts(joined(url, other, "--salt", "s")) == (4, 4, 8, 4, 0, 0)
    assert stored(other) == made.records | salted.records
    ran = run("copy", url, other, "--tenant", "x", "--join")
    assert (ran.code, "no such namespace" in ran.error_line) == (1, True)


def lose(path: Path) -> None:
    path.unlink()


def damage(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def test_only_whole_and_sound_sets_make_records(joined, run, url, other):
    """A shard is lost, one is damaged, one cut; of the last record all is well."""
    made = Made()
    shards = put_all(url, made.shards(*RANKS))
    for number, fault in enumerate((lose, damage, cut_short)):
        fault(Path(record_path(url.removeprefix("file://"), shards[2 * number + 1])))
    value = joined(url, other, code=1)
    assert stored(other) == {made.keys[3]: made.records[made.keys[3]]}
    lacks = "4 of 8 rows of kv.0 are in no shard, first layer 0, head 1"
    assert {each["key"]: each["reason"] for each in value["bad"]} == {
        **{key.hex(): lacks for key in made.keys[:3]},
        shards[3].hex(): "bad_checksum",
        shards[5].hex(): "wrong_size",
    }
    assert value["stored"] == 1
    # Another split stored the same: its shards fill the gaps.
    put_all(url, made.shards(*STAGES))
    assert joined(url, other, code=1)["stored"] == 3
    assert stored(other) == made.records


@pytest.mark.parametrize("claimed", CLAIMS)
def test_a_shard_that_claims_what_cannot_be_costs_its_record_alone(claimed, joined, url, other):
    made, hostile = Made(), ChunkKey(bytes(32))
    info, data = claim(*CLAIMS[claimed], SPACE.digest, of=hostile)
    put_all(url, {info.key: data} | made.shards(*RANKS))
    value = joined(url, other, code=1)
    assert [each["key"] for each in value["bad"]] == [hostile.hex()]
    assert stored(other) == made.records


@pytest.mark.parametrize("lie", ["name", "record"])
def test_a_shard_whose_key_does_not_follow_from_its_record_is_wrong(lie, joined, run, url, other):
    """All its checksums hold; but it lies under the name of another, or says another record."""
    made = Made()
    first, second = made.keys[:2]
    (key, shard), (lacking, _), *_ = made.shards(*RANKS).items()
    foreign, data = cut(SCHEMA, made.records[second], RANKS[1], of=second)
    payload = bytes(data[foreign.schema.head_bytes :])
    key_of_lie, of = {"name": (lacking, second), "record": (foreign.key, first)}[lie]
    wrong = encode(foreign.schema, payload, key=key_of_lie, of=of)
    put_all(url, {key: shard, key_of_lie: wrong})
    value = joined(url, other, code=1)
    assert {"key": key_of_lie.hex(), "reason": "other_record"} in value["bad"]
    assert value["stored"] == 0
    ran = run("verify", url, "--dry-run")
    assert (ran.code, "other_record" in ran.out) == (1, True)


KILLED = """
import os, signal, sys
from kvferry.cli import copy
from kvferry.cli.main import main

def put(copying, *record):
    real(copying, *record)
    if copying.num_read == 5:
        os.kill(os.getpid(), signal.SIGKILL)

real, copy._Copying._put = copy._Copying._put, put
sys.exit(main(sys.argv[1:]))
"""
"""The command, which is killed after its fifth record."""


@pytest.mark.parametrize("kind", ["file", "valkey"])
def test_an_interrupted_join_is_resumed(joined, url_of, kind, tmp_path):
    source, target = (tmp_path / "shards").as_uri(), url_of(kind)
    made = Made(tokens=range(100, 100 + 12 * CHUNK))
    put_all(source, made.shards(*RANKS))
    command = [sys.executable, "-c", KILLED, "copy", source, target, "--join"]
    ran = subprocess.run(command, check=False)
    assert ran.returncode == -signal.SIGKILL
    before = stored(target)
    assert len(before) == 5
    assert before.items() <= made.records.items()
    assert counts(joined(source, target)) == (12, 12, 24, 7, 5, 0)
    assert stored(target) == made.records


@pytest.mark.parametrize("with_whole", [False, True])
def test_what_is_erased_of_a_prompt_are_its_shards_too(run, url, tokens_file, with_whole):
    made, rest = Made(), Made(tokens=range(1000, 1050))
    put_all(url, made.shards(*RANKS, *STAGES) | (made.records if with_whole else {}))
    left = put_all(url, rest.shards(*RANKS))
    ran = run("rm", url, "--namespace", SPACE.digest.hex(), "--tokens", tokens_file, "--yes")
    assert ran.code == 0, ran.err
    assert set(stored(url)) == set(left)


GROUP = SPACE.description["groups"][0]
LATER = {
    "a field": [GROUP | {"later": 1}],
    "a field that this release adds itself": [GROUP | {"block_size": 16}],
    "a dtype": [GROUP | {"dtype": "float4"}],
    "a value of another type": [GROUP | {"num_layers": "4"}],
    "a value that cannot be": [GROUP | {"row_tokens": 0}],
    "a field less": [{}],
    "no object": ["kv"],
    "no list": {"kv": GROUP},
    "a number": 7,
}


@pytest.mark.parametrize("groups", LATER)
def test_groups_of_a_later_release_hide_no_shard_of_a_prompt(groups, run, url, other, tokens_file):
    space = Namespace.described({**SPACE.description, "groups": LATER[groups]}, "m")
    made, rest = Made(space=space), Made(tokens=range(1000, 1050), space=space)
    prompt = made.records | made.shards(*RANKS, *STAGES)
    put_all(url, prompt, space)
    left = put_all(url, rest.shards(*RANKS), space)
    chosen = ["--namespace", space.digest.hex(), "--tokens", tokens_file]
    pin = ["pin", f"{url}?max_bytes=1GiB", "--until", "1h"]
    for command in (["copy", url, other], pin, ["rm", url, "--yes"]):
        ran = run(*command, *chosen, "--json", "-")
        assert ran.code == 0, ran.err
        assert command[0] == "rm" or json.loads(ran.out)["records"] == len(prompt)
    assert stored(other) == prompt
    assert set(stored(url)) == set(left)


@pytest.mark.parametrize("join", [True, False])
@pytest.mark.parametrize(("form", "is_listed"), [("groups", True), ("cache", False)])
def test_a_store_is_listed_for_a_prompt_once_and_only_where_shards_may_be(
    form, is_listed, join, run, url, other, tokens_file, monkeypatch
):
    """Listing a bucket takes minutes."""
    described = dict(SPACE.description)
    groups = described.pop("groups")
    space = Namespace.described({**described, form: groups}, "m")
    put_all(url, Made(space=space).records, space)
    listed, entries = [], stores.entries

    def noted(store: Store, found: Iterable[Entry]) -> Iterator[Entry]:
        listed.append(store)
        yield from entries(store, found)

    monkeypatch.setattr(stores, "entries", noted)
    chosen = ["--namespace", space.digest.hex(), "--tokens", tokens_file]
    ran = run("copy", url, other, *chosen, *(["--join"] if join else []))
    assert ran.code == 0, ran.err
    assert len(listed) == is_listed


@pytest.mark.parametrize("whole", [(), (0,), (2,), (0, 1, 3)])
@pytest.mark.parametrize("splits", [RANKS, STAGES])
def test_explain_names_the_shards_of_chunks_without_a_whole_record(
    splits, whole, run, url, tokens_file
):
    made = Made()
    records = {made.keys[number]: made.records[made.keys[number]] for number in whole}
    put_all(url, records | made.shards(*splits))
    ran = run("explain", url, "--namespace", SPACE.digest.hex(), "--tokens", tokens_file)
    first = next(number for number in range(4) if number not in whole)
    assert ran.out.startswith(f"absent: the chunk at token {first * CHUNK + 1}, stored only in sha")
    assert "`kvferry copy --join`" in ran.out.partition("\n")[0]
    ran = run(
        "explain", url, "--namespace", SPACE.digest.hex(), "--tokens", tokens_file, "--json", "-"
    )
    runs = json.loads(ran.out)["namespaces"][0]["chunks"]
    in_shards = [each for each in runs if "shards" in each["detail"]]
    assert sum(each["num_tokens"] for each in in_shards) == (4 - len(whole)) * CHUNK


@pytest.mark.parametrize(
    ("splits", "why"),
    [
        (RANKS[:1], "4 of 8 rows of kv.0 are in no shard, first layer 0, head 1"),
        (RANKS[1:], "4 of 8 rows of kv.0 are in no shard, first layer 0, head 0"),
        (STAGES[:1], "6 of 8 rows of kv.0 are in no shard, first layer 1, head 0"),
        (STAGES[1:], "no shard has a row of component 1"),
        ((RANKS[0], STAGES[1]), "1 of 8 rows of kv.0 are in no shard, first layer 0, head 1"),
    ],
)
def test_explain_says_which_rows_are_in_no_shard(splits, why, run, url, tokens_file):
    """Of the chunk in the middle; all others are whole sets."""
    made = Made()
    shards = made.shards(*RANKS)
    of_second = [*shards][2:4]
    lacking = {key: shard for key, shard in shards.items() if key not in of_second}
    of_split = {
        info.key: data
        for ranges in splits
        for info, data in [cut(SCHEMA, made.records[made.keys[1]], ranges, of=made.keys[1])]
    }
    put_all(url, lacking | of_split)
    asked = ["--namespace", SPACE.digest.hex(), "--tokens", tokens_file, "--json", "-"]
    said = json.loads(run("explain", url, *asked).out)["namespaces"][0]["chunks"][:3]
    assert [each["num_tokens"] // CHUNK for each in said] == [1, 1, 2]
    assert why in said[1]["detail"]
    assert all("are in no shard" not in said[number]["detail"] for number in (0, 2))


@pytest.mark.parametrize("cause", ["others", "no time", "no listing"])
def test_explain_says_no_shards_of_which_it_knows_none(cause, run, url, tokens_file, monkeypatch):
    put_all(url, Made(tokens=range(1000, 1050) if cause == "others" else TOKENS).shards(*RANKS))
    if cause == "no time":
        monkeypatch.setattr("kvferry.explain.COMPARE_SECONDS", 0.0)
    if cause == "no listing":
        monkeypatch.setattr(FileCatalogue, "scan", refuse)
    ran = run("explain", url, "--namespace", SPACE.digest.hex(), "--tokens", tokens_file)
    assert ran.code == 0, ran.err
    assert ran.out.startswith("absent: the chunk at token 1, never stored, as far as ")


def refuse(_: FileCatalogue) -> NoReturn:
    raise StoreError(FaultKind.UNLISTED, "no right to list")


def test_a_shard_says_whose_rows_it_has(run, url):
    made = Made()
    key, *_ = put_all(url, made.shards(STAGES[1]))
    said = json.loads(run("ls", url, key.hex(), "--json", "-").out)
    assert (said["verdict"], said["of"]) == ("right", made.keys[0].hex())
    assert said["shard"] == "1-4/4,0-2/2 0-0/2,0-0/1"
    assert [each["shape"][:2] for each in said["components"]] == [[3, 2]]
