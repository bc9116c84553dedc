"""`kvferry export` and `import`: prompts between stores, and files that are not what they claim."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvferry.adapters.transformers import StoredKV
from kvferry.cli.prompts import model_identity
from kvferry.engine import LLM, SamplingParams
from kvferry.errors import ConfigError
from kvferry.keys import ModelIdentity, Namespace, opaque_key, opaque_namespace
from kvferry.prompt_file import MAX_PROMPT_BYTES, PromptFile, StoredPrompt, export_prompt
from kvferry.record.schema import RecordSchema, digest, leaf_digests
from kvferry.store.base import PutResult
from kvferry.store.file.directory import record_path
from kvferry.store.kind import Opening
from kvferry.store.url import open_one
from kvferry.testing.models import make_tiny_model
from kvferry.types import NO_EXTRA_KEYS, ChunkKey, ExtraKeys
from tests.cli.test_explain import CHUNK, GROUP, SPACE, TOKENS, put_prompt, space_of
from tests.cli.test_remote_commands import seaweed, url_of, valkey_server
from tests.transformers_cache import with_cache

__all__ = ["seaweed", "url_of", "valkey_server"]

READER = """
import json, sys
from kvferry.engine import LLM, SamplingParams
given = json.loads(sys.argv[1])
options = {"chunk_tokens": given["chunk_tokens"], "audit": "off"}
first = SamplingParams(max_tokens=1, ignore_eos=True, return_logits=True)
for store in given["stores"]:
    with LLM(given["model"], store=store, connector_options=options) as llm:
        for _ in range(4):  # a busy machine may cut a load short
            llm.reset_prefix_cache()
            (completion,) = llm.generate([given["prompt"]], first)
            if completion.num_external_tokens == given["hit"]:
                break
    print(json.dumps([completion.num_external_tokens, completion.first_logits.tolist()]))
"""


@pytest.fixture
def url(tmp_path):
    return (tmp_path / "store").as_uri()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "prompt.kv"


@pytest.fixture
def tokens_file(tmp_path):
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(list(TOKENS)))
    return path


@pytest.fixture
def exported(run, url, tokens_file, file):
    """Export the prompt of `put_prompt`; what the command said."""

    def export(*options: object, space: Namespace = SPACE, code: int = 0) -> dict[str, object]:
        named = ["--namespace", space.digest.hex(), "--tokens", tokens_file]
        ran = run("export", url, *named, *options, file, "--json", "-")
        assert ran.code == code, ran.err
        return json.loads(ran.out)

    return export


@pytest.fixture
def imported(run, file):
    def load(url: str, *options: object) -> dict[str, object]:
        ran = run("import", file, url, *options, "--json", "-")
        assert ran.code == 0, ran.err
        return json.loads(ran.out)

    return load


def values(url: str, keys: list[ChunkKey], space: Namespace = SPACE) -> list[bytes | None]:
    """What is stored under each key."""
    found: list[bytes | None] = []
    with open_one(url, Opening(namespace=space.digest)) as store:
        for key in keys:
            size = store.read(key, ())
            value = memoryview(bytearray(size or 0))
            found.append(None if store.read(key, [(0, value)]) is None else bytes(value))
    return found


def test_engines_of_another_process_hit_what_was_imported_from_store_to_store(
    run, url, url_of, tmp_path, file
):
    """Out of a directory into Valkey, out of Valkey into a bucket, out of that into a directory."""
    model, size, num_tokens = make_tiny_model(tmp_path / "model"), 32, 150
    hit = num_tokens // size * size
    rng = np.random.default_rng(3)
    prompt = rng.integers(3, 320, num_tokens).tolist()
    tokens = tmp_path / "ids"
    tokens.write_text(json.dumps(prompt))
    with LLM(model, store=url, connector_options={"chunk_tokens": size}) as llm:
        params = SamplingParams(max_tokens=1, ignore_eos=True, return_logits=True)
        (cold,) = llm.generate([prompt], params)
        assert llm.drain(60)
    stores = [url_of("valkey"), url_of("s3"), (tmp_path / "other").as_uri()]
    contents = set()
    for source, target in zip([url, *stores], stores, strict=False):
        out = run("export", source, "--model", model, "--tokens", tokens, file)
        assert (out.code, out.out.count(f"{hit} of {num_tokens} tokens")) == (0, 1), out.err
        contents.add(file.read_bytes())
        into = run("import", file, target, "--model", model)
        assert (into.code, "4 records" in into.out) == (0, True), into.err
    assert len(contents) == 1
    given = {
        "model": str(model), "stores": stores, "prompt": prompt, "hit": hit, "chunk_tokens": size,
    }  # fmt: skip
    command = [sys.executable, "-W", "error", "-c", READER, json.dumps(given)]
    ended = subprocess.run(
        command, env=os.environ, capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [answer[0] for answer in answers] == [hit] * 3
    for _, logits in answers:
        assert np.abs(np.array(logits) - cold.first_logits).max() <= 1e-3
    # Transformers has the same records.
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    input_ids = torch.tensor([prompt])
    with StoredKV(loaded, stores[2], chunk_tokens=size, audit="off") as kv:
        cache = kv.prefill(input_ids)
        assert kv.num_loaded == hit
    with torch.inference_mode():
        output = loaded(input_ids[:, -1:], **with_cache(cache))
    assert np.abs(output.logits[0, -1].numpy() - cold.first_logits).max() <= 1e-3


def test_the_file_is_a_tar_of_the_records_that_only_its_owner_reads(exported, url, file, tmp_path):
    keys = put_prompt(url)
    value = exported()
    assert (value["records"], value["num_tokens"], value["prompt_tokens"]) == (4, 28, 30)
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as tar:
        prompt, *names = tar.getnames()
        assert names == [f"{key.hex()}.safetensors" for key in keys]
        records = [tar.extractfile(name).read() for name in names]
        assert json.load(tar.extractfile(prompt))["token_ids"] == list(TOKENS)
    assert records == values(url, keys)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_salt_and_lora_travel_with_the_prompt(exported, imported, url, tmp_path):
    keys = put_prompt(url, extra=ExtraKeys(cache_salt="s", lora="l"))
    exported("--salt", "s", "--lora", "l")
    other = (tmp_path / "other").as_uri()
    assert imported(other)["stored"] == 4
    assert values(other, keys) == values(url, keys)
    with open_one(other) as store:
        assert store.describe(SPACE.digest) == SPACE.as_text()


def test_what_is_stored_already_stays_and_is_counted(exported, imported, url, tmp_path, file):
    keys = put_prompt(url)
    exported()
    other = (tmp_path / "other").as_uri()
    put_prompt(other, tokens=TOKENS[:14])
    assert imported(other, "--dry-run")["dry_run"] is True
    assert values(other, keys)[2:] == [None, None]
    value = imported(other)
    assert (value["stored"], value["existing"], value["num_tokens"]) == (2, 2, 28)
    assert values(other, keys) == values(url, keys)


def test_a_part_of_a_prompt_is_said_to_be_one(exported, imported, run, url, tmp_path, file):
    keys = put_prompt(url)
    Path(record_path(url.removeprefix("file://"), keys[2])).unlink()
    value = exported()
    assert (value["records"], value["num_tokens"], value["fault"]) == (2, 14, None)
    shown = run("import", file, (tmp_path / "other").as_uri(), "--dry-run")
    assert "2 records, 14 of 30 tokens of a prompt of m" in shown.out
    assert not (tmp_path / "other").exists()


def test_a_damaged_record_ends_the_export(exported, url):
    keys = put_prompt(url)
    path = Path(record_path(url.removeprefix("file://"), keys[1]))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    value = exported(code=1)
    assert (value["records"], value["fault"]) == (1, "bad_leaf")
    assert path.exists()


def test_nothing_stored_leaves_the_file_as_it_was(exported, run, url, tokens_file, file, tmp_path):
    put_prompt(url, tokens=range(50))
    file.write_text("before")
    assert exported(code=1)["records"] == 0
    assert exported("--salt", "s", code=1)["records"] == 0
    tokens_file.write_text("[1, 2]")
    assert exported(code=1)["prompt_tokens"] == 2
    assert file.read_text() == "before"
    tokens_file.write_text(json.dumps(list(range(50))))
    assert exported("--dry-run")["records"] == 7
    assert file.read_text() == "before"
    for path in (tmp_path, tmp_path / "none" / "x", "/dev/null"):
        ran = run("export", url, "--namespace", SPACE.digest.hex(), "--tokens", tokens_file, path)
        assert (ran.code, "cannot write" in ran.error_line) == (2, True)


def test_two_namespaces_with_the_prompt_must_be_told_apart(run, url, tokens_file, file, tmp_path):
    model = make_tiny_model(tmp_path / "model")
    for size in (8, 16):
        with LLM(model, store=url, connector_options={"chunk_tokens": size}) as llm:
            llm.generate([list(TOKENS)], SamplingParams(max_tokens=1))
            assert llm.drain(60)
    ran = run("export", url, "--model", model, "--tokens", tokens_file, file)
    assert (ran.code, "2 namespaces hold this prompt" in ran.error_line) == (2, True)
    digits = ran.error_line.rpartition(": ")[2].partition(",")[0]
    command = ["export", url, "--namespace", digits, "--tokens", tokens_file, file]
    assert run(*command).code == 0
    assert run("export", url, "--model", model, file).error_line.startswith(
        "error: give the prompt"
    )


@pytest.fixture
def opaque(url):
    """A store with rows of a host; their namespace."""
    identity = ModelIdentity(weights=bytes(32), config={}, name="m")
    space = opaque_namespace(identity, {"name": "vllm"}, row_bytes=64, chunk_tokens=CHUNK)
    with open_one(url) as store:
        store.describe(space.digest, space.as_text())
        store.put(opaque_key(space.digest, b"k"), [b"x" * 64])
    return space


def test_opaque_rows_are_refused_with_the_reason(run, url, opaque, tokens_file, file):
    command = ["--namespace", opaque.digest.hex(), "--tokens", tokens_file]
    for name, *rest in (("export", file), ("clear", "--yes"), ("pin", "--until", "1h")):
        ran = run(name, f"{url}?max_bytes=1GiB", *command, *rest)
        assert ran.code == 2
        assert "holds opaque m (rows of vllm): their keys are hashes of the host" in ran.error_line
    assert not file.exists()


def row_of(space: Namespace) -> bytes:
    """An opaque record of eight bytes."""
    schema = RecordSchema.for_rows(namespace=space.digest, chunk_tokens=7, row_bytes=8)
    key, row = opaque_key(space.digest, b"k"), bytes(8)
    return schema.encode_head(key, 0, leaf_digests(schema.components[0], memoryview(row))) + row


def test_a_model_of_which_there_are_opaque_rows_alone(run, url, tokens_file, file, tmp_path):
    model = make_tiny_model(tmp_path / "model")
    space = opaque_namespace(model_identity(model), {"name": "vllm"}, row_bytes=8, chunk_tokens=7)
    with open_one(url) as store:
        store.describe(space.digest, space.as_text())
        assert store.put(opaque_key(space.digest, b"k"), [row_of(space)]) is PutResult.STORED
    ran = run("export", url, "--model", model, "--tokens", tokens_file, file)
    assert "hashes of the host" in ran.error_line
    ran = run("clear", url, "--model", model, "--yes")  # a model's records of every kind
    assert (ran.code, ran.out.startswith("1 records")) == (0, True)


# -- files that are not what they claim ------------------------------------------------------------


@pytest.fixture
def content(exported, url, file):
    """A right file of four records."""
    put_prompt(url)
    exported()
    return file.read_bytes()


def refused(path: Path) -> str:
    """Why a file is refused; fails if it is not, or in more than a line."""
    with pytest.raises(ConfigError) as raised, PromptFile(path) as opened:
        opened.check()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_every_flipped_byte_and_every_cut_is_found(content, file):
    for at in [*range(0, 2048, 7), *range(2048, len(content), 61), len(content) - 1]:
        changed = bytearray(content)
        changed[at] ^= 4
        file.write_bytes(changed)
        refused(file)
    for size in [0, 1, 511, 512, 513, *range(600, len(content), 509), len(content) - 1]:
        file.write_bytes(content[:size])
        assert "truncated" in refused(file), size


def members(content: bytes) -> list[tuple[tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        return [(member, tar.extractfile(member).read()) for member in tar]


def tar_of(*parts: tuple[tarfile.TarInfo, bytes], kind: int = tarfile.GNU_FORMAT) -> bytes:
    pieces = []
    for member, text in parts:
        pieces += [member.tobuf(kind), text, bytes(-len(text) % 512)]
    return b"".join([*pieces, bytes(1024)])


def with_prompt(content: bytes, **changes: object) -> bytes:
    """The file with another description of its prompt."""
    (member, text), *records = members(content)
    value = json.dumps(json.loads(text) | changes, separators=(",", ":")).encode()
    return tar_of(prompt_of(member, value), *records)


def prompt_of(member: tarfile.TarInfo, text: bytes) -> tuple[tarfile.TarInfo, bytes]:
    return renamed(member, size=len(text), name=f"prompt-{digest(text).hex()}.json"), text


def renamed(member: tarfile.TarInfo, **changes: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(member.name)
    made.size, made.mode = member.size, member.mode
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def hostile(content: bytes) -> dict[str, tuple[bytes, str]]:
    """Files by what is wrong, with a part of the reason."""
    prompt, first, second, *rest = members(content)
    everything = [prompt, first, second, *rest]
    (head, record), wrong = first, "does not belong to the tokens"
    links = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd", "size": 0}
    opaque = opaque_namespace(
        ModelIdentity(weights=bytes(32), config={}), {"name": "sglang"}, row_bytes=8, chunk_tokens=7
    )
    newer = Namespace.described({**SPACE.description, "format_version": 2}, "m")
    vast = Namespace.described(
        {
            **SPACE.description,
            "groups": [{**SPACE.description["groups"][0], "content_size": 1 << 28}],
        },
        "m",
    )
    none = Namespace.described({**SPACE.description, "groups": [{"num_layers": 1.5}]}, "m")

    def of(space: Namespace) -> bytes:
        described = {"model": space.model, "description": space.description}
        return with_prompt(content, namespace=space.digest.hex(), **described)

    def with_first(**changes: object) -> bytes:
        return tar_of(prompt, (renamed(head, **changes), record), second, *rest)

    return {
        "path": (with_first(name="../../etc/cron.d/x"), wrong),
        "absolute path": (with_first(name="/etc/cron.d/x"), wrong),
        "link": (tar_of(prompt, (renamed(head, **links), b""), second, *rest), wrong),
        "executable": (with_first(mode=0o4755), wrong),
        "vast record": (with_first(size=1 << 60), wrong),
        "extended header": (tar_of(prompt, (renamed(head, mtime=1.5), record), kind=2), "damaged"),
        "no prompt": (tar_of(first, second), "no file of `kvferry export`"),
        "vast prompt": (
            tar_of((renamed(prompt[0], size=MAX_PROMPT_BYTES + 1), prompt[1])),
            "no file of `kvferry export`",
        ),
        "swapped": (tar_of(prompt, second, first, *rest), wrong),
        "behind a gap": (tar_of(prompt, second, *rest), wrong),
        "record of another": (tar_of(prompt, (head, second[1]), second), "wrong_key"),
        "twice": (tar_of(prompt, *[first] * 2), wrong),
        "empty": (tar_of(prompt), "holds no record"),
        "more than the prompt": (tar_of(*everything, first), "holds more than the prompt has"),
        "more behind its end": (content + bytes(512), "its end"),
        "other version": (with_prompt(content, version=2), "of version '2'"),
        "other format": (with_prompt(content, format="x", version=[2]), "of version 'None'"),
        "other tokens": (with_prompt(content, token_ids=[5, *TOKENS[1:]]), wrong),
        "other salt": (with_prompt(content, salt="s"), wrong),
        "tokens of another kind": (
            with_prompt(content, token_ids=["1"]),
            "the description of its prompt",
        ),
        "negative tokens": (
            with_prompt(content, token_ids=[-1] * 30),
            "the description of its prompt",
        ),
        "another field": (with_prompt(content, more=1), "the description of its prompt"),
        "other description": (
            with_prompt(content, description={**SPACE.description, "tenant": "b"}),
            "not the digest of its description",
        ),
        "other namespace": (of(space_of("b")), wrong),
        "opaque": (of(opaque), "hashes of the host"),
        "newer records": (of(newer), "versions (2, 1)"),
        "vast records": (of(vast), "above the bound"),
        "records that cannot be": (of(none), "no store can have"),
        "nested": (
            tar_of(prompt_of(prompt[0], b"[" * 200_000)),
            "damaged: the description of its prompt",
        ),
        "not a tar": (b"PK\x03\x04" + bytes(4000), "no file of `kvferry export`"),
    }


def test_hostile_files_are_refused_in_one_line_and_nothing_is_written(run, content, file, tmp_path):
    target = tmp_path / "target"
    for name, (changed, says) in hostile(content).items():
        file.write_bytes(changed)
        ran = run("import", file, target.as_uri())
        assert ran.code == 2, name
        assert says in ran.error_line, name
        assert not target.exists(), name
    file.write_bytes(content)
    assert run("import", file, target.as_uri()).code == 0


def test_a_file_of_prompts_that_are_records_of_no_position(content, file):
    """A chunk whose key is right and whose place in the prompt is not."""
    prompt, (head, record), *rest = members(content)
    with PromptFile(file) as opened:
        schema, key = opened.prompt.schema, opened.prompt.keys[0]
    table = record[schema.header_bytes + 16 : schema.head_bytes]
    moved = schema.encode_head(key, CHUNK, table) + record[schema.head_bytes :]
    file.write_bytes(tar_of(prompt, (head, moved), *rest))
    assert "damaged" in refused(file)


def test_what_is_no_regular_file(run, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, tmp_path / "none"):
        ran = run("import", path, (tmp_path / "target").as_uri())
        assert (ran.code, "cannot read" in ran.error_line) == (2, True)


def test_records_of_other_weights_and_of_a_model_that_ran_otherwise(run, url, file, tmp_path):
    model, other = make_tiny_model(tmp_path / "m"), make_tiny_model(tmp_path / "o", seed=3)
    tokens, target = tmp_path / "ids", (tmp_path / "target").as_uri()
    tokens.write_text(json.dumps(list(TOKENS)))
    with LLM(model, store=url, dtype="bfloat16", connector_options={"chunk_tokens": 8}) as llm:
        llm.generate([list(TOKENS)], SamplingParams(max_tokens=1))
        assert llm.drain(60)
    assert run("export", url, "--model", model, "--tokens", tokens, file).code == 0
    ran = run("import", file, target, "--model", other)
    assert (ran.code, "of other weights than those in" in ran.error_line) == (2, True)
    assert not (tmp_path / "target").exists()
    ran = run("import", file, target, "--model", model)
    assert ran.code == 0
    assert "ran with config.dtype = bfloat16" in ran.out


def test_stores_that_cannot_take_it(run, content, file, tmp_path):
    place = tmp_path / "target"
    for url, says in (
        ("memory://x", "ends with its process"),
        ("peer://127.0.0.1:1", "ends with its process"),
        (f"{place.as_uri()}?read_only=true", "says read_only"),
        (f"{place.as_uri()}?max_bytes=1KiB", "smaller than one chunk"),
        (f"{place.as_uri()}?max_bytes=12KiB", "less than the records of the prompt have"),
        ("nothing", "no scheme"),
    ):
        ran = run("import", file, url)
        assert (ran.code, says in ran.error_line) == (2, True), ran.err
        assert not place.exists()


def test_a_prompt_in_memory_has_a_bound(url, tmp_path):
    vast = replace(GROUP, content_size=1 << 28)
    space = Namespace.of(ModelIdentity(weights=bytes(32), config={}), (vast,), CHUNK)
    prompt = StoredPrompt(space, list(TOKENS), NO_EXTRA_KEYS)
    with pytest.raises(ConfigError, match="above the bound"), open_one(url) as store:
        export_prompt(store, prompt, tmp_path / "f")
    long = StoredPrompt(SPACE, [1 << 31] * (MAX_PROMPT_BYTES // 10), NO_EXTRA_KEYS)
    with pytest.raises(ConfigError, match="is too long for a file"):
        long.as_json()
