"""A table of what may be wrong between a proof, its records and their use: each is a miss, is
counted, and says why."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers.models.lfm2 import modeling_lfm2

from kvferry.adapters.transformers import StoredKV
from kvferry.adapters.transformers import identity as identity_module
from kvferry.cli.main import main
from kvferry.errors import ConfigError
from kvferry.journal import read_journal
from kvferry.observe import Counters
from kvferry.testing.faults import flip_bit
from kvferry.testing.models import write_random_model
from tests.adapters.transformers.generating import generate
from tests.adapters.transformers.tiny_configs import build_model, tiny_config
from tests.adapters.transformers.trees import CHUNK, HIT, WITHIN, ids_of, reuse

MODEL = "lfm2"


class Place(NamedTuple):
    """What a row of the table may spoil."""

    store: Path
    other_store: Path
    """With the same prompt of another model."""
    model: Any
    patch: pytest.MonkeyPatch
    tmp: Path

    def records(self, store: Path | None = None, *, of_state: bool) -> list[Path]:
        paths = sorted((store or self.store).glob("records/*/*.safetensors"))
        return [each for each in paths if (b'"state":{' in each.read_bytes()[:4096]) == of_state]


class Bad(NamedTuple):
    spoil: Callable[[Place], object]
    counter: str
    word: str
    """In the journal."""
    explained: str
    """By `kvferry explain`, in the namespace that was asked: a reason, or a line."""
    is_while_open: bool = False


def _of_state(change: Callable[[Path], object]) -> Callable[[Place], object]:
    return lambda place: [change(each) for each in place.records(of_state=True)[-1:]]


def _from_other_model(place: Place) -> None:
    others = place.records(place.other_store, of_state=True)
    for path, other in zip(place.records(of_state=True), others, strict=True):
        path.write_bytes(other.read_bytes())


def _without_chunks(place: Place) -> None:
    for path in place.records(of_state=False):
        path.unlink()


def _edited_class(place: Place) -> None:
    """The next process reads another file."""
    copy = place.tmp / "modeling_lfm2.py"
    shutil.copy(modeling_lfm2.__file__, copy)
    copy.write_text(copy.read_text() + "\n# edited\n")
    place.patch.setattr(modeling_lfm2, "__file__", str(copy))
    place.patch.setattr(identity_module, "refuse_other_code", lambda _: None)


def _other_release(place: Place) -> None:
    version = identity_module._version
    place.patch.setattr(
        identity_module,
        "_version",
        lambda name: "transformers 5.25.0" if name == "transformers" else version(name),
    )


def _changed_model(place: Place) -> None:
    with torch.no_grad():
        place.model.model.layers[1].self_attn.k_proj.weight.mul_(1.1)


BAD = {
    "a state record is truncated": Bad(
        _of_state(lambda path: path.write_bytes(path.read_bytes()[:-1])),
        *("miss_wrong_size", "behind", "behind"),
    ),
    "a state record has a flipped bit": Bad(
        _of_state(lambda path: path.write_bytes(flip_bit(-8)(path.read_bytes()))),
        *("miss_bad_checksum", "behind", ""),  # `explain` looks at heads, `verify` at all
    ),
    "a state record is of another model": Bad(
        _from_other_model, "miss_other_record", "behind", "behind"
    ),
    "a state is missing, its chunks are there": Bad(
        _of_state(Path.unlink), "miss_no_state", "behind", "behind"
    ),
    "a state is there, its chunks are missing": Bad(
        _without_chunks, "requests_missed", "absent", "vanished"
    ),
    "a class is edited on disk": Bad(_edited_class, "requests_missed", "absent", "no namespace in"),
    "another release of Transformers": Bad(
        _other_release, "requests_missed", "absent", "no namespace in"
    ),
    "the model changes between proof and use": Bad(
        _changed_model, "model_changed", "", "", is_while_open=True
    ),
}


@pytest.fixture(scope="module")
def stores(tree_dir, tmp_path_factory):
    """Directories of a model and of another, and a store with the same prompt of each."""
    place = tmp_path_factory.mktemp("bad")
    torch.manual_seed(99)
    other = write_random_model(place / "other", lambda: build_model(tiny_config(MODEL)), 5)
    return tree_dir(MODEL), other, place


@pytest.mark.parametrize("name", BAD)
def test_what_is_bad_is_a_miss_and_says_why(
    stores, load_model, tmp_path, monkeypatch, name, capsys
):
    bad, (directory, other_dir, shared) = BAD[name], stores
    store, other_store = shared / "store", shared / "other store"
    if not store.exists():
        reuse(load_model(directory), store.as_uri(), ids_of())
        reuse(load_model(other_dir), other_store.as_uri(), ids_of())
    shutil.copytree(store, mine := tmp_path / "mine")
    model, journal = load_model(directory), tmp_path / "journal"
    place = Place(mine, other_store, model, monkeypatch, tmp_path)
    sound = reuse(load_model(directory), mine.as_uri(), ids_of())
    assert sound.num_loaded == HIT
    if not bad.is_while_open:
        bad.spoil(place)
    counts = Counters()
    options = {"chunk_tokens": CHUNK, "observer": counts, "record": str(journal)}
    with StoredKV(model, f"{mine.as_uri()}?read_only=true", **options) as kv:
        if bad.is_while_open:
            bad.spoil(place)
        sequences, logits = generate(kv, ids_of())
        assert kv.num_loaded == 0
        namespace = kv.namespace
    expected, cold = generate(model, ids_of())
    assert torch.equal(sequences, expected)
    assert (logits - cold).abs().max() <= WITHIN * cold.abs().max()
    assert counts[bad.counter] >= 1
    if bad.word:
        (line,) = read_journal(journal, None, 9)
        assert line.misses[bad.word] == HIT, line.misses
    if bad.explained:
        tokens = tmp_path / "tokens.json"
        tokens.write_text(json.dumps(ids_of()[0].tolist()))
        options = ("--namespace", namespace, "--tokens", str(tokens), "--json", "-")
        main(["explain", mine.as_uri(), *options])
        out, err = capsys.readouterr()
        assert bad.explained in (json.loads(out)["reason"] if out else err)


def test_a_class_that_was_edited_after_it_was_imported_is_refused(
    tree_dir, load_model, store_url, tmp_path, monkeypatch
):
    """Else the digest of the file would name code that this process does not run."""
    copy = tmp_path / "modeling_lfm2.py"
    text = Path(modeling_lfm2.__file__).read_text()
    before, after = "seq_len = hidden_states.shape[1]", "seq_len = hidden_states.size(1)"
    assert before in text
    copy.write_text(text.replace(before, after))
    original = modeling_lfm2.__file__
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(copy if str(path) == original else path)
    )
    with pytest.raises(ConfigError, match=r"Lfm2\w+\.\w+ runs otherwise than .*modeling_lfm2"):
        StoredKV(load_model(tree_dir(MODEL)), store_url, chunk_tokens=CHUNK)
