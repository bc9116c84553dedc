"""`kvferry explain`: every reason on real stores, journals, and what a user can get wrong."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvferry.config import format_size
from kvferry.errors import FaultKind, StoreError
from kvferry.explain import PromptSearch, Space
from kvferry.identity import adapter_digest
from kvferry.keys import (
    HOST_FIELDS,
    ChunkKeys,
    ModelIdentity,
    Namespace,
    opaque_key,
    opaque_namespace,
    state_keys,
)
from kvferry.record.schema import RecordSchema, leaf_digests
from kvferry.store.base import PutResult
from kvferry.store.file.catalogue import FileCatalogue
from kvferry.store.file.directory import record_path
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.recordio import put_record
from kvferry.store.url import open_one
from kvferry.survey import differences
from kvferry.testing.models import make_tiny_model
from kvferry.types import NO_EXTRA_KEYS, ChunkKey, ExtraKeys, KVGroup
from tests.cli.conftest import CHUNK_TOKENS as CHUNK
from tests.cli.conftest import TOKENS
from tests.tokenizers import save_tiny_tokenizer

GROUP = KVGroup(num_layers=1, num_kv_heads=1, content_size=8, dtype="float32", block_size=16)


def space_of(tenant: str = "", **config: object) -> Namespace:
    identity = ModelIdentity(weights=bytes(32), config={"dtype": "float32", **config}, name="m")
    return Namespace.of(identity, (GROUP,), CHUNK, tenant)


def with_states(chunk_tokens: int, state_parts: int, **config: object) -> Namespace:
    """Of a model with recurrent states, as an engine whose blocks such chunks divide names it."""
    model = space_of(**config).description["config"]
    identity = ModelIdentity(weights=bytes(32), config=model, name="m")
    state = KVGroup(num_layers=2, num_kv_heads=2, content_size=40, dtype="float32", block_size=1)
    return Namespace.of(
        identity, (GROUP,), chunk_tokens, states=((state,),), state_parts=state_parts
    )


SPACE = space_of()


def put_prompt(
    url: str,
    space: Namespace = SPACE,
    tokens: Sequence[int] = TOKENS,
    extra: ExtraKeys = NO_EXTRA_KEYS,
    states: Sequence[int] = (),
) -> list[ChunkKey]:
    """Store a prompt as an engine does, with the states behind some chunks, and describe its
    namespace."""
    size = space.description["chunk_tokens"]
    schema = RecordSchema.for_groups(namespace=space.digest, chunk_tokens=size, groups=(GROUP,))
    keys = ChunkKeys(space.digest, size, extra)
    keys.extend(tokens)
    payload = bytes(schema.payload_bytes)
    table = leaf_digests(schema.components[0], memoryview(payload))
    with open_one(url, Opening(namespace=space.digest)) as store:
        store.describe(space.digest, space.as_text())
        records = list(enumerate(keys.keys)) + [
            (number, part)
            for number in states
            for part in state_keys(keys.keys[number], space.state_parts)
        ]
        for number, key in records:
            image = memoryview(bytearray(schema.head_bytes) + payload)
            stored = put_record(store, schema, key, number * size, table, image, mark=keys.mark)
            assert stored.result is PutResult.STORED
    return keys.keys


def without_age(text: str) -> str:
    """A busy machine asks twice in different seconds."""
    return re.sub(r"\d+ (s|m) ago", "lately", text)


@pytest.fixture
def asked(run, tokens_file):
    def ask(url: str, *options: object, space: Namespace = SPACE) -> dict[str, object]:
        command = ["explain", url, "--namespace", space.digest.hex(), "--tokens", tokens_file]
        command += ["--block-size", 1]
        shown = run(*command, *options)
        assert shown.code == 0, shown.err
        assert max(map(len, shown.out.splitlines()[1:])) <= 80
        value = json.loads(run(*command, *options, "--json", "-").out)
        assert without_age(shown.out.splitlines()[0]) == without_age(value["summary"])
        return value

    return ask


def runs_of(value) -> list[tuple[int, int, str]]:
    chunks = value["namespaces"][0]["chunks"]
    return [(each["first_token"], each["num_tokens"], each["why"]) for each in chunks]


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "hit"),
    [(28, 1, 27), (28, 4, 24), (28, 16, 16), (28, 32, 0), (30, 1, 28), (30, 14, 28), (30, 16, 16)],
)
def test_a_hit_is_whole_blocks_of_the_engine(url, run, tokens_file, num_tokens, block_size, hit):
    put_prompt(url)
    tokens_file.write_text(json.dumps(list(TOKENS[:num_tokens])))
    command = ["explain", url, "--namespace", SPACE.digest.hex(), "--tokens", tokens_file]
    value = json.loads(run(*command, "--block-size", block_size, "--json", "-").out)
    assert (value["hit_tokens"], value["reason"]) == (hit, "partial")
    hits = [(0, hit, "hit")] if hit else []
    assert runs_of(value) == [*hits, (hit, num_tokens - hit, "partial")]
    is_whole = (num_tokens, block_size) == (28, 1)
    assert ("the last token is always computed" in value["summary"]) == is_whole
    default = json.loads(run(*command, "--json", "-").out)
    assert default["hit_tokens"] == 16  # of vLLM on GPUs, and of the embedded engine


def test_a_prompt_that_is_shorter_than_a_chunk(url, asked, tokens_file):
    put_prompt(url)
    tokens_file.write_text("[1, 2, 3]")
    assert "shorter than a chunk of 7 tokens" in asked(url)["summary"]
    tokens_file.write_text("[]")
    assert "the prompt is empty" in asked(url)["summary"]


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (space_of("tenant-b"), "tenant"),
        (space_of(dtype="bfloat16"), "config.dtype"),
        (space_of(rope_theta=5), "config.rope_theta"),
        (
            Namespace.of(
                ModelIdentity(weights=b"w" * 32, config={"dtype": "float32"}), (GROUP,), 7
            ),
            "weights",
        ),
        (
            Namespace.of(
                ModelIdentity(weights=bytes(32), config={"dtype": "float32"}), (GROUP,), 5
            ),
            "chunk_tokens",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_stored_under_another_namespace(url, asked, other, field):
    put_prompt(url, tokens=range(7))
    put_prompt(url, other)
    value = asked(url)
    assert value["reason"] == "other_namespace"
    assert value["elsewhere"]["namespace"] == other.digest.hex()
    assert list(value["elsewhere"]["differs"]) == [field]
    (values,) = value["elsewhere"]["differs"].values()
    assert value["summary"].startswith(
        f"other_namespace: 28 tokens are stored under {field} {str(values['there'])[:24]}"
        if field != "chunk_tokens"
        else "other_namespace: 29 tokens are stored under chunk_tokens 5 (asked for: 7); 0 of 30"
    )


def test_an_adapter_is_named_by_its_directory(url, asked, run, tmp_path, tokens_file):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    options = ["--namespace", SPACE.digest.hex(), "--tokens", tokens_file, "--lora", adapter]
    put_prompt(url)
    for command in (["explain"], ["rm", "--dry-run"]):
        ran = run(command[0], url, *command[1:], *options)
        assert ran.code == 2
        assert str(adapter) in ran.error_line
    save_file({"w": np.arange(4.0)}, adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    put_prompt(url, extra=ExtraKeys(lora=adapter_digest(adapter)))
    shutil.copytree(adapter, tmp_path / "copy")
    assert asked(url, "--lora", tmp_path / "copy")["hit_tokens"] == 28
    (adapter / "adapter_config.json").write_text('{"r": 9}')
    assert asked(url, "--lora", adapter)["reason"] == "other_keys"


@pytest.mark.parametrize("kind", ["valkey", "s3"])
def test_tiers_are_asked_nearest_first(url_of, url, run, tokens_file, kind):
    far = url_of(kind)
    put_prompt(url, tokens=TOKENS[:7])
    keys = put_prompt(far)
    command = ["explain", url, far, "--namespace", SPACE.digest.hex(), "--tokens", tokens_file]
    command += ["--block-size", 1]
    value = json.loads(run(*command, "--json", "-").out)
    assert runs_of(value) == [(0, 7, "hit"), (7, 21, "hit"), (28, 2, "partial")]
    details = [each["detail"] for each in value["namespaces"][0]["chunks"]]
    assert details[:2] == [f"tier 1, {url}", f"tier 2, {far.partition('?')[0]}"]
    assert "tier 2" in run(*command).out
    with open_one(far, Opening(namespace=SPACE.digest)) as store:
        assert store.delete(keys[2])
    value = json.loads(run(*command, "--json", "-").out)
    assert [why for _, _, why in runs_of(value)[2:4]] == ["absent", "behind"]


def test_files_are_explained_without_a_listing(url, asked, monkeypatch):
    put_prompt(url, tokens=range(7))
    put_prompt(url, space_of("b"))

    def refuse(store):
        raise AssertionError("the store is listed")

    monkeypatch.setattr(FileCatalogue, "scan", refuse)
    assert asked(url)["reason"] == "other_namespace"


# -- by model -------------------------------------------------------------------------------------


def test_a_prompt_of_an_engine_is_found_by_its_model(run, model_dir, tmp_path, url):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the statement was executed, and " * 20)
    command = ["generate", model_dir, "--prompt-file", prompt, "--max-tokens", 2, "--store", url]
    for size in (16, 32):
        assert run(*command, "--chunk-tokens", size).code == 0
    command = ["explain", url, "--model", model_dir, "--prompt-file", prompt, "--json", "-"]
    value = json.loads(run(*command).out)
    assert value["reason"] == "partial"
    assert {each["chunk_tokens"] for each in value["namespaces"]} == {16, 32}
    assert all(not each["differs"] for each in value["namespaces"])
    other = make_tiny_model(tmp_path / "other", seed=1)
    save_tiny_tokenizer(other)
    command[3] = other
    value = json.loads(run(*command).out)
    assert (value["namespaces"], value["reason"]) == (
        [],
        "other_namespace",
    )
    assert list(value["elsewhere"]["differs"]) == ["weights"]
    assert value["elsewhere"]["hit_tokens"] > 0
    assert "nothing in this store is of this model" in value["summary"]


def test_a_hit_that_the_engine_does_not_see_is_told_apart(run, model_dir, tmp_path, url):
    """By a stranger who knows his model, his prompt and the store, and nothing of namespaces."""
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the statement was executed, and " * 20)
    asked = ["--model", model_dir, "--prompt-file", prompt]
    stored = ["generate", model_dir, "--prompt-file", prompt, "--max-tokens", 2, "--store", url]
    assert run(*stored, "--dtype", "bfloat16", "--chunk-tokens", 16).code == 0
    out = " ".join(run("explain", url, *asked).out.split())
    assert "would hit for an engine that differs from the model directory in config.dtype " in out
    assert ", bfloat16, 16 tokens a chunk)" in out
    assert "config.dtype bfloat16 float32" in out
    assert run(*stored, "--chunk-tokens", 16).code == 0
    out = " ".join(run("explain", url, *asked).out.split())
    assert "would hit for" not in out
    assert ", float32, 16 tokens a chunk)" in out


def gone(reason: str, store: FileStore, keys: Sequence[ChunkKey]) -> None:
    """Take the chunks of a prompt away, or the first of them."""
    if reason == "evicted":
        store.catalogue().gc(max_bytes=0)
    for key in keys[:1] if reason == "behind" else keys:
        if reason in ("deleted", "behind"):
            store.delete(key)
        elif reason == "damaged":
            store.discard(key, "wrong")
        elif reason == "vanished":
            Path(record_path(store.url.removeprefix("file://"), key)).unlink()


@pytest.mark.parametrize("reason", ["evicted", "deleted", "damaged", "vanished", "behind"])
def test_the_namespace_that_had_a_prompt_answers_before_one_that_never_had(url, reason):
    """Though the other one runs the model more as it was asked for."""
    never, had = space_of(), space_of(dtype="bfloat16")
    put_prompt(url, never, range(500, 530))
    keys = put_prompt(url, had)
    spaces = [Space(never, {}), Space(had, {"config.dtype": ("bfloat16", "float32")})]
    with FileStore(url.removeprefix("file://"), max_bytes=1 << 30) as store:
        gone(reason, store, keys)
    with FileStore(url.removeprefix("file://"), read_only=True) as store:
        answer = PromptSearch({"file": store}, TOKENS).answer(spaces, list)
    assert [each.space.namespace for each in answer.found] == [had, never]
    assert answer.reason == ("deleted" if reason == "behind" else reason)


@pytest.mark.parametrize("field", sorted(HOST_FIELDS))
def test_what_kernels_decide_is_not_taken_for_an_option(url, run, asked, field):
    put_prompt(url, space_of(**{field: "amx"}))
    put_prompt(url, SPACE, range(500, 530))
    notes = asked(url)["notes"]
    assert (
        f"No option sets config.{field}: it follows from the kernels of an engine's host." in notes
    )
    assert not any(
        "No option" in each for each in asked(url, space=space_of(**{field: "amx"}))["notes"]
    )


@pytest.mark.parametrize(
    ("here", "there", "says"),
    [
        (with_states(7, 1), with_states(4, 2), True),
        (with_states(7, 1), with_states(4, 1), True),
        (with_states(7, 1), with_states(4, 2, rope_theta=5), False),
        (with_states(7, 1), with_states(7, 1, rope_theta=5), False),
        (SPACE, Namespace.of(ModelIdentity(
            weights=bytes(32), config={"dtype": "float32"}, name="m"), (GROUP,), 4), False),
    ],
)  # fmt: skip
def test_a_miss_by_the_size_of_blocks_with_states_names_the_option(url, asked, here, there, says):
    put_prompt(url, there)
    put_prompt(url, here, range(500, 530))
    value = asked(url, space=here)
    assert value["reason"] == "other_namespace"
    assert ("one --block-size" in value["summary"]) == says
    sizes = {each.description["chunk_tokens"] for each in (here, there)}
    noted = any("Engines share with one --block-size" in each for each in value["notes"])
    assert noted == (len(sizes) > 1 and here is not SPACE)


def test_where_states_are_stored_and_how_large_they_are_is_said(url, asked):
    space = with_states(7, 2)
    keys = put_prompt(url, space, states=(0, 2))
    said = asked(url, space=space)
    [found] = said["namespaces"]
    assert (said["hit_tokens"], found["states"]) == (21, [7, 21])
    record = found["chunks"][0]["num_bytes"] // 3
    assert found["state_bytes"] == 2 * record
    size = format_size(2 * record)
    assert f"States are stored after 7, 21 tokens, each of {size} in 2 records." in said["notes"]
    with open_one(url, Opening(namespace=space.digest)) as store:
        assert store.delete(state_keys(keys[2], 2)[1])
    said = asked(url, space=space)
    assert (said["hit_tokens"], said["namespaces"][0]["states"]) == (7, [7])


def test_of_namespaces_that_never_had_a_prompt_the_most_alike_answers(url):
    spaces = [
        Space(space_of("team", dtype="bfloat16"), {"config.dtype": ("bfloat16", "float32")}),
        Space(space_of("team"), {}),
        Space(space_of(), {}),
    ]
    put_prompt(url, spaces[0].namespace, range(500, 530))
    with FileStore(url.removeprefix("file://"), read_only=True) as store:
        answer = PromptSearch({"file": store}, TOKENS).answer(spaces, list)
    assert [each.space for each in answer.found] == spaces[::-1]


def test_what_became_of_a_prompt_is_said_of_each_namespace_of_its_model(
    run, model_dir, tmp_path, url
):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the statement was executed, and " * 20)
    generate = ["generate", model_dir, "--prompt-file", prompt, "--max-tokens", 2, "--store", url]
    assert run(*generate, "--dtype", "bfloat16").code == 0
    assert run("rm", url, "--everything", "--yes").code == 0
    (other := tmp_path / "other.txt").write_text("clauses are statements " * 20)
    generate[3] = other
    assert run(*generate).code == 0
    command = ["explain", url, "--model", model_dir, "--prompt-file"]
    assert run(*command, prompt).out.startswith("deleted: the chunk at token 1, ")
    shown = run(*command, other).out
    assert shown.startswith("partial: ")
    assert re.search(r"^[0-9a-f]{16} +\d+ +0 +absent +config.dtype bfloat16", shown, re.MULTILINE)
    assert run(*generate[:3], prompt, *generate[4:]).code == 0
    shown = run(*command, prompt).out
    assert re.search(r"^[0-9a-f]{16} +\d+ +0 +deleted +config.dtype bfloat16", shown, re.MULTILINE)


def test_the_other_form_of_a_prompt_is_tried(run, tmp_path, url):
    """With the chat template and without."""
    model_dir = make_tiny_model(tmp_path / "model")
    save_tiny_tokenizer(model_dir)
    template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
    (model_dir / "chat_template.jinja").write_text(template)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("the statement was executed, and " * 20)
    generate = ["generate", model_dir, "--prompt-file", prompt, "--max-tokens", 2]
    command = ["explain", url, "--model", model_dir, "--prompt-file", prompt]
    assert run(*generate, "--chunk-tokens", 16, "--store", url, "--raw").code == 0
    assert "\nWith --raw, " in run(*command).out
    assert run(*command, "--raw").out.startswith("partial: ")
    assert run(*generate, "--chunk-tokens", 16, "--store", url + "2").code == 0
    command[1] = url + "2"
    assert "\nWithout --raw, in the chat template, " in run(*command, "--raw").out
    assert "--raw" not in run(*command).out


def test_a_model_and_an_empty_store(run, model_dir, url, tokens_file):
    open_one(url).close()
    ran = run("explain", url, "--model", model_dir, "--tokens", tokens_file)
    assert ran.code == 0
    assert "absent: nothing in this store is of this model; 0 of 30 tokens would hit" in ran.out


# -- journals -------------------------------------------------------------------------------------


def line(**fields: object) -> str:
    base = {"time": 1.0, "chunk_tokens": 7, "num_tokens": 30, "keys": ["00"]}
    return json.dumps(base | fields) + "\n"


def test_a_reason_that_is_not_known_and_a_line_under_way(run, tmp_path):
    path = tmp_path / "journal"
    path.write_text(line() + line(request="cmpl-7-a", misses={"new_reason": 30}) + '{"time": 1')
    out = run("explain", "--journal", path).out
    assert "it ended before" in " ".join(out.split())
    assert "does not know" in " ".join(out.split())
    value = json.loads(run("explain", "--journal", path, "--request", "cmpl-7", "--json", "-").out)
    assert [each["request"] for each in value["requests"]] == ["cmpl-7-a"]
    value = json.loads(run("explain", "--journal", path, "-n", 1, "--json", "-").out)
    assert len(value["requests"]) == 1
    path.write_text("")
    assert run("explain", "--journal", path).code == 1


@pytest.mark.parametrize(
    "content", [b"{}\n", b"[" * 100_000 + b"\n", b"\xff\n", b'{"time": "x"}\n']
)
def test_a_file_that_is_no_journal_is_one_line(run, tmp_path, content):
    (tmp_path / "journal").write_bytes(content)
    ran = run("explain", "--journal", tmp_path / "journal")
    assert ran.code == 2
    assert "line 1" in ran.error_line


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--model DIR or --namespace"),
        (["--namespace", "xyz"], "hexadecimal"),
        (["--namespace", "00"], "no namespace"),
        (["--namespace", "00" * 32], "no namespace"),
        (["--namespace", "00", "--prompt-file", "F"], "give --prompt-file FILE, --chat FILE or"),
        (["--journal", "none"], "not both"),
        (["--model", "none"], "config"),
    ],
)
def test_what_is_asked_wrongly_is_one_line(run, url, tokens_file, options, says):
    put_prompt(url)
    ran = run("explain", url, *options, "--tokens", tokens_file)
    assert ran.code == (1 if says == "no namespace" else 2)
    assert any(each in ran.error_line for each in says.split("|"))


@pytest.mark.parametrize(
    "content", ["[1, 2", "a b", "[1.5]", "[true]", "-1", "4294967296", "[" * 10**5]
)
def test_tokens_that_are_none_are_one_line(run, url, tokens_file, content):
    tokens_file.write_text(content)
    ran = run("explain", url, "--namespace", "00", "--tokens", tokens_file)
    assert ran.code == 2
    assert "token id" in ran.error_line


def test_a_namespace_without_a_description_is_one_line(run, url, tokens_file):
    put_prompt(url)
    (Path(url.removeprefix("file://")) / "namespaces" / f"{SPACE.digest.hex()}.json").write_text(
        "{}"
    )
    for digits in (SPACE.digest.hex(), SPACE.digest.hex()[:9]):
        ran = run("explain", url, "--namespace", digits, "--tokens", tokens_file)
        assert ran.code == 2
        assert "missing or damaged" in ran.error_line


def test_differences_are_fields_by_path():
    there = {"a": 1, "groups": [{"n": 1}, {"n": 2}], "only": 0, "list": [1]}
    here = {"a": 1, "groups": [{"n": 1}, {"n": 3}], "list": [1, 2]}
    assert differences(there, here) == {
        "groups.1.n": (2, 3),
        "list": ([1], [1, 2]),
        "only": (0, None),
    }


def test_records_whose_descriptions_are_lost_are_not_called_another_models(
    run, url, tokens_file, tmp_path
):
    put_prompt(url)
    for path in Path(url.removeprefix("file://"), "namespaces").iterdir():
        path.unlink()
    model = make_tiny_model(tmp_path / "model")
    ran = run("explain", url, "--model", model, "--tokens", tokens_file)
    assert ran.code == 2
    assert "has 4 records of namespaces without a description" in ran.error_line


def test_descriptions_that_cannot_be_listed_are_not_called_lost(
    run, url, tokens_file, tmp_path, monkeypatch
):
    put_prompt(url)
    for path in Path(url.removeprefix("file://"), "namespaces").iterdir():
        path.unlink()

    def refuse(_store):
        raise StoreError(FaultKind.RIGHTS, "permission denied")

    monkeypatch.setattr(FileCatalogue, "described", refuse)
    model = make_tiny_model(tmp_path / "model")
    for whose in (["--namespace", SPACE.digest.hex()], ["--namespace", "0a"], ["--model", model]):
        ran = run("explain", url, *whose, "--tokens", tokens_file)
        assert ran.code == 2
        assert ran.error_line == "error: file: away: permission denied"


def test_a_reason_of_another_release_is_shown_in_its_words(url, asked):
    keys = put_prompt(url)
    with FileStore(url.removeprefix("file://")) as store:
        store.discard(keys[1], "bad_checksum")
    with closing(sqlite3.connect(Path(url.removeprefix("file://"), "index.sqlite3"))) as db, db:
        db.execute("UPDATE removals SET reason = 'smelt'")
    value = asked(url)
    assert value["reason"] == "deleted"
    assert "smelt: bad_checksum" in value["summary"]


# -- opaque rows -----------------------------------------------------------------------------------


def put_row(url: str) -> Namespace:
    """Store an opaque row as a host's tier does."""
    identity = ModelIdentity(weights=bytes(32), config={"dtype": "float32"}, name="m")
    space = opaque_namespace(identity, {"name": "vllm"}, row_bytes=100, chunk_tokens=CHUNK)
    schema = RecordSchema.for_rows(namespace=space.digest, chunk_tokens=CHUNK, row_bytes=100)
    table = leaf_digests(schema.components[0], memoryview(bytes(100)))
    with open_one(url, Opening(namespace=space.digest)) as store:
        store.describe(space.digest, space.as_text())
        image = memoryview(bytearray(schema.record_bytes))
        key = opaque_key(space.digest, b"host key")
        assert put_record(store, schema, key, 0, table, image).result is PutResult.STORED
    return space


def test_opaque_rows_are_listed_and_verified_and_no_prompt_leads_to_them(run, url, tokens_file):
    space = put_row(url)
    (row,) = json.loads(run("ls", url, "--json", "-").out)
    assert row["model"] == "m (rows of vllm)"
    assert run("verify", url).code == 0
    ran = run("explain", url, "--namespace", space.digest.hex()[:9], "--tokens", tokens_file)
    assert ran.code == 2
    assert "do not follow from the tokens of a prompt" in ran.error_line


def test_opaque_rows_are_no_namespace_to_compare_a_prompt_with(url, asked):
    put_row(url)
    put_prompt(url, tokens=TOKENS[:14])
    value = asked(url)
    assert value["hit_tokens"] == 14
    assert value["elsewhere"] is None


def test_numbers_of_records_are_written_alike(url, run, tmp_path):
    put_prompt(url, tokens=range(1200 * CHUNK))
    other, page = (tmp_path / "other").as_uri(), tmp_path / "page.html"
    for command in (
        ["ls", url, "-n", 1],
        ["verify", url],
        ["rm", url, "--everything", "--dry-run"],
        ["copy", url, other, "--dry-run"],
        ["report", url, "--html", page],
    ):
        ran = run(*command)
        assert ran.code == 0, ran.err
        assert "1,200 records" in ran.out
    lines = run("ls", url, "--by", "namespace").out.splitlines()
    assert any(re.search(r"num records +1,200 *$", line) for line in lines), lines
    assert any(re.match(r"[0-9a-f]{16} +1,200 ", line) for line in lines), lines
