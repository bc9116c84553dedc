"""`kvferry rm --salt`: all of one person, in every store that is named and in engines that run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvferry.cli.erase import _Erased, _tell
from kvferry.keys import ChunkKeys
from kvferry.store.erasures import MAX_NAMES, add_to_notice
from kvferry.store.file.store import FileStore
from kvferry.store.url import open_one
from kvferry.testing.stores.hooks import wait_until
from kvferry.types import ExtraKeys
from tests.cache.hosts import make_shared_storage_host
from tests.cli.test_explain import SPACE, TOKENS, put_prompt, space_of
from tests.servers.process import LOCALHOST, free_ports

PROMPT = list(range(500, 565))
CHUNK = 8
NUM_CHUNKS = len(PROMPT) // CHUNK
ALICE, BOB = ExtraKeys(cache_salt="alice@example.org"), ExtraKeys(cache_salt="bob@example.org")


def count(url: str) -> int:
    with open_one(url) as store:
        return sum(1 for _ in store.catalogue().scan())


def quota(url: str) -> str:
    return f"{url}?max_bytes=1GiB"


@pytest.fixture
def place(url_of, tmp_path):
    return lambda kind, name: (tmp_path / name).as_uri() if kind == "file" else url_of(kind)


@pytest.mark.parametrize("far_kind", ["file", "valkey"])
def test_all_of_one_salt_is_gone_everywhere_and_the_other_salt_keeps_its_hits(
    run, place, tmp_path, far_kind
):
    """Two salts, two tiers, a copy, a pinned prompt, an engine that runs."""
    near, copied = place("file", "near"), place("file", "copied")
    far = place(far_kind, "far")
    host = make_shared_storage_host(
        {"store": [quota(near), far], "chunk_tokens": CHUNK, "memory_bytes": 1 << 20},
        num_blocks=256,
    )
    try:
        for name, extra in (("alice", ALICE), ("bob", BOB), ("nobody", ExtraKeys())):
            host.run(name, PROMPT, extra_keys=extra)
        host.settle()
        wait_until(lambda: count(far) == 3 * NUM_CHUNKS, "the copies in the far tier")
        namespace = host.scheduler.requests.namespace
        (ids := tmp_path / "ids").write_text(json.dumps(PROMPT))
        prompt = ["--namespace", namespace.hex(), "--tokens", ids, "--salt", ALICE.cache_salt]
        assert run("copy", near, copied).code == 0
        assert run("pin", quota(near), *prompt, "--until", "1h").code == 0

        command = ["rm", near, far, copied, "--salt", ALICE.cache_salt, "--yes", "--json", "-"]
        dry = json.loads(run(*command, "--dry-run").out)
        ran = run(*command)
        report = json.loads(ran.out)
        assert (ran.code, report["records"]) == (0, 3 * NUM_CHUNKS)
        for row, dry_row in zip(report["stores"], dry["stores"], strict=True):
            assert row == dry_row
            assert row["records"] == row["unmarked"] == NUM_CHUNKS
            assert (row["unreadable"], row["left"]) == (0, None)
        assert any("prefix cache" in note for note in report["notes"])
        assert [count(each) for each in (near, far, copied)] == [2 * NUM_CHUNKS] * 3

        wait_until(lambda: bool(host.parts[0].store.erased_since(0)), "the notice in the engine")
        assert host.run("again", PROMPT, extra_keys=ALICE).num_external_tokens == 0
        for _ in range(2):  # from memory, and from the store
            whole = NUM_CHUNKS * CHUNK
            assert host.run("bob again", PROMPT, extra_keys=BOB).num_external_tokens == whole
            assert host.run("no salt", PROMPT).num_external_tokens == whole
            host.scheduler.pool.clear()
        # What a request that came at once computed is in memory alone, for a minute.
        host.settle()
        ran = run(*command)
        assert (ran.code, json.loads(ran.out)["records"]) == (1, 0)
    finally:
        host.stop()
    files = [each for each in tmp_path.rglob("*") if each.is_file()]
    assert len(files) > 2 * NUM_CHUNKS
    assert not [each for each in files if ALICE.cache_salt.encode() in each.read_bytes()]


@pytest.mark.parametrize("salted", ["s", None], ids=["some are stored", "none is stored"])
@pytest.mark.parametrize("num_gone", [0, 1, 3, 4])
def test_the_report_says_all_that_went_whoever_was_first(
    run, tmp_path, monkeypatch, num_gone, salted
):
    """Between the notice and the deletion, engines take back what they wrote, in any number; what
    they stored between the listing and the notice goes, too."""
    one, two = ((tmp_path / name).as_uri() for name in ("one", "two"))
    for url in (one, two):
        put_salted(url, "s", "t")
    size = sum(path.stat().st_size for path in (tmp_path / "one").rglob("*.safetensors")) // 2
    later = list(range(900, 900 + len(TOKENS)))
    heard = set()

    def tell(erased, names, at):
        _tell(erased, names, at)
        if erased.url in heard or erased.url == two:
            return
        heard.add(erased.url)
        with open_one(one) as store:
            keys = ChunkKeys(SPACE.digest, 7, ExtraKeys(cache_salt="s"))
            keys.extend(TOKENS)
            for key in keys.keys[:num_gone]:
                assert store.delete(key)
        put_prompt(one, SPACE, later, extra=ExtraKeys(cache_salt=salted))

    monkeypatch.setattr("kvferry.cli.erase._tell", tell)
    ran = run("rm", one, two, "--salt", "s", "--yes", "--json", "-")
    report = json.loads(ran.out)
    num_more = 4 * (salted is not None)
    assert [row["records"] for row in report["stores"]] == [4 + num_more, 4]
    assert report["stores"][1]["num_bytes"] == size
    assert report["stores"][0]["num_bytes"] == size * (4 + num_more) // 4
    assert any(f"{num_gone} of them" in note for note in report["notes"]) == (num_gone > 0)
    assert [count(url) for url in (one, two)] == [8 - num_more, 4]


def test_what_is_used_while_the_command_asks_stays_and_is_not_reported(run, tmp_path, monkeypatch):
    url = quota((tmp_path / "kv").as_uri())
    put_salted(url, "s", "t")
    with open_one(url) as store:
        used = max(entry.last_used for entry in store.catalogue().scan())

    now = [used + 10.0]
    monkeypatch.setattr("kvferry.cli.choice.time.time", lambda: now[0])
    monkeypatch.setattr("kvferry.cli.erase.confirm", lambda *_, **__: now.__setitem__(0, used))
    ran = run("rm", url, "--salt", "s", "--older-than", "5s", "--json", "-")
    assert (ran.code, json.loads(ran.out)["records"], count(url)) == (1, 0, 8)


def test_what_is_there_and_chosen_no_more_is_left_and_said(run, tmp_path, monkeypatch):
    url = (tmp_path / "kv").as_uri()
    put_prompt(url, space_of("team-a"))

    def confirm(_question, *, yes):
        for path in (tmp_path / "kv" / "namespaces").iterdir():
            path.unlink()  # so no namespace is the tenant's any more

    monkeypatch.setattr("kvferry.cli.erase.confirm", confirm)
    ran = run("rm", url, "--tenant", "team-a", "--json", "-")
    report = json.loads(ran.out)
    assert (ran.code, report["records"], count(url)) == (3, 0, 4)
    assert "still there" in report["stores"][0]["left"]


def test_one_store_named_twice_is_refused(run, tmp_path):
    url = (tmp_path / "kv").as_uri()
    put_salted(url, "s")
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    for twice in (url, url + "/", (tmp_path / "link").as_uri()):
        ran = run("rm", url, twice, "--salt", "s", "--yes")
        assert (ran.code, count(url)) == (2, 4)
        assert "leave one out" in ran.error_line


def test_what_comes_after_the_question_would_have_been_asked_is_not_deleted(
    run, tmp_path, monkeypatch
):
    url = (tmp_path / "kv").as_uri()
    put_salted(url, "t")

    def tell(erased, names, at):
        _tell(erased, names, at)
        if count(url) == 4:
            put_salted(url, "s")

    monkeypatch.setattr("kvferry.cli.erase._tell", tell)
    ran = run("rm", url, "--salt", "s", "--json", "-")
    assert (ran.code, count(url)) == (1, 8)


@pytest.mark.parametrize("options", [[], ["--yes"]], ids=["it would ask", "--yes"])
def test_engines_drop_what_no_store_has_any_more(run, tmp_path, options):
    url = (tmp_path / "kv").as_uri()
    host = make_shared_storage_host(
        {"store": quota(url), "chunk_tokens": CHUNK, "memory_bytes": 1 << 20}, num_blocks=256
    )
    try:
        host.run("alice", PROMPT, extra_keys=ALICE)
        host.settle()
        with open_one(url) as store:
            for entry in list(store.catalogue().scan()):
                store.delete(entry.key)  # as a quota does
        assert run("rm", url, "--salt", ALICE.cache_salt, "--dry-run").code == 1
        ran = run("rm", url, "--salt", ALICE.cache_salt, *options)
        assert (ran.code, "drop it from memory" in ran.err) == (1, True)
        wait_until(lambda: bool(host.parts[0].store.erased_since(0)), "the notice in the engine")
        assert host.run("again", PROMPT, extra_keys=ALICE).num_external_tokens == 0
    finally:
        host.stop()


def put_salted(url: str, *salts: str | None, space=SPACE) -> None:
    for salt in salts:
        put_prompt(url, space, extra=ExtraKeys(cache_salt=salt))


def test_a_salt_in_one_tenant_is_not_that_of_another(run, url):
    spaces = space_of("a"), space_of("b")
    for space in spaces:
        put_salted(url, "s", "t", space=space)
    ran = run("rm", url, "--salt", "s", "--tenant", "a", "--yes", "--json", "-")
    assert json.loads(ran.out)["records"] == 4
    for space, left in zip(spaces, (0, 4), strict=True):
        keys = ChunkKeys(space.digest, 7, ExtraKeys(cache_salt="s"))
        keys.extend(TOKENS)
        with open_one(url) as store:
            assert sum(store.read(key, ()) is not None for key in keys.keys) == left
    assert run("rm", url, "--salt", "u", "--yes").code == 1
    assert count(url) == 12


@pytest.mark.parametrize("kind", ["valkey", pytest.param("s3", marks=pytest.mark.slow)])
def test_on_servers_by_the_same_command(run, url_of, kind):
    where = url_of(kind)
    put_salted(where, "s", "t", None)
    ran = run("rm", where, "--salt", "s", "--yes", "--json", "-")
    (row,) = json.loads(ran.out)["stores"]
    assert (row["records"], row["unmarked"], count(where)) == (4, 4, 8)
    assert run("ls", where, "--by", "namespace").code == 0


def test_one_store_that_does_not_answer_is_named_and_the_others_are_erased(run, tmp_path):
    one, two = ((tmp_path / name).as_uri() for name in ("one", "two"))
    for url in (one, two):
        put_salted(url, "s", "t")
    (port,) = free_ports(1)
    down = f"valkey://{LOCALHOST}:{port}/kv"
    command = ["rm", one, down, two, "--salt", "s", "--yes", "--json", "-"]
    ran = run(*command)
    rows = json.loads(ran.out)["stores"]
    assert (ran.code, [row["records"] for row in rows]) == (3, [4, 0, 4])
    assert [bool(row["left"]) for row in rows] == [False, True, False]
    assert str(port) in rows[1]["left"]
    ran = run(*command)  # again: nothing more, and still not all
    assert (ran.code, json.loads(ran.out)["records"]) == (3, 0)


def test_a_notice_that_cannot_be_written_is_said_and_the_records_go_all_the_same(run, tmp_path):
    one, two = ((tmp_path / name).as_uri() for name in ("one", "two"))
    for url in (one, two):
        put_salted(url, "s", "t")
    (tmp_path / "one" / "erased.json").mkdir()  # in the way
    ran = run("rm", one, two, "--salt", "s", "--yes", "--json", "-")
    rows = json.loads(ran.out)["stores"]
    assert (ran.code, [row["records"] for row in rows]) == (3, [4, 4])
    assert ["notice" in (row["left"] or "") for row in rows] == [True, False]


class Contended:
    """A store whose notice other commands replace, some times, once it was written."""

    def __init__(self, num_times: int) -> None:
        self.text, self.num_times = None, num_times

    def catalogue(self):
        return self

    def notice(self, text=None):
        if text is not None:
            self.text = text
            if self.num_times:
                self.num_times -= 1
                self.text = add_to_notice(None, ["mark:of another"], 1.0)
        return self.text


@pytest.mark.parametrize(("num_times", "told"), [(0, True), (2, True), (99, False)])
@pytest.mark.parametrize("num_names", [1, 3, MAX_NAMES, MAX_NAMES + 9])
def test_engines_count_as_told_only_while_all_names_are_there(num_times, told, num_names):
    erased = _Erased("url", Contended(num_times))
    _tell(erased, {f"mark:{number}" for number in range(num_names)}, 2.0)
    assert erased.told is told


def test_what_cannot_be_read_may_be_left_and_is_said(run, url):
    put_salted(url, "s")
    with FileStore(Path(url.removeprefix("file://"))) as store:
        key = next(iter(store.catalogue().scan())).key
        path = Path(store.directory.path_of(key)) if hasattr(store.directory, "path_of") else None
    if path is None:
        path = next(Path(url.removeprefix("file://")).rglob("*.safetensors"))
    path.write_bytes(b"x" * 100)
    ran = run("rm", url, "--salt", "s", "--yes", "--json", "-")
    (row,) = json.loads(ran.out)["stores"]
    assert (ran.code, row["records"], row["unreadable"]) == (3, 3, 1)
    assert "1 records could not be read" in row["left"]


@pytest.mark.parametrize("options", [[], ["--yes"], ["--dry-run"]])
def test_one_place_that_is_no_store_changes_nothing_anywhere(run, url, tmp_path, options):
    put_salted(url, "s")
    (tmp_path / "empty").mkdir()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    ran = run("rm", url, (tmp_path / "empty").as_uri(), "--salt", "s", *options)
    assert (ran.code, bool(ran.error_line)) == (2, True)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*.safetensors")}
    with open_one(url) as store:
        assert store.catalogue().notice() is None


def test_by_age_and_size_one_store_is_made_smaller(run, url):
    put_salted(url, "s")
    ran = run("rm", url, url, "--max-bytes", "0", "--yes")
    assert (ran.code, "give one URL" in ran.error_line, count(url)) == (2, True, 4)
