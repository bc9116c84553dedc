"""Checks that both front ends serve a tiny model of an architecture with right hits, or refuse it
in one line.

`scripts/architectures` writes the results to docs/architectures.md; `make test-sweep` compares.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from kvferry.adapters.transformers import StoredKV
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.outlook import Served, outlook
from kvferry.engine import LLM, SamplingParams
from kvferry.engine.model import quiet_transformers
from kvferry.errors import ConfigError
from kvferry.testing.models import write_random_model
from tests.adapters.transformers.generating import CHUNK, generate, reuse
from tests.adapters.transformers.image_configs import (
    NO_IMAGE_MODEL,
    build_image_text,
    image_text_config,
)
from tests.adapters.transformers.tiny_configs import (
    NOT_BUILT,
    build_model,
    tiny_config,
)

PAGE = Path(__file__).parents[3] / "docs" / "architectures.md"

NUM_TOKENS = 103
HIT = NUM_TOKENS // CHUNK * CHUNK
PARAMS = SamplingParams(max_tokens=1, ignore_eos=True, return_logits=True)

WITHIN = 1e-4
"""Allowed difference of logits, relative to the largest. Another order of sums gives under 1e-5."""

DIFFERENT = 1e-2
"""Least difference of logits for other tokens in place of the stored ones. With less, a check could
not tell wrong KV."""


class Row(NamedTuple):
    """What each front end does with an architecture: None if it serves it, else why it refuses."""

    model_type: str
    stored_kv: str | None
    llm: str | None

    @property
    def answer(self) -> str:
        """The cells behind the name in the table of the page. Architectures with the same share a
        row, so a reason calls the architecture "its"."""
        served = ["no" if reason else "yes" for reason in (self.stored_kv, self.llm)]
        if self.model_type in NOT_BUILT:
            served = ["not run"] * 2
        reasons = [self.stored_kv or ""]
        if self.stored_kv != self.llm:
            both = (("StoredKV", self.stored_kv), ("LLM", self.llm))
            reasons = [f"{name}: {reason}" for name, reason in both if reason]
        why = "; ".join(reasons).replace(f"'{self.model_type}'", "its")
        return f" {' | '.join(served)} | {why} |"


class ImageTextRow(NamedTuple):
    """What `StoredKV` does with prompts of text for a class that takes images, too: None if it
    serves them, else why it refuses the class."""

    model_type: str
    stored_kv: str | None

    @property
    def answer(self) -> str:
        """As `Row.answer`."""
        served = "no" if self.stored_kv else "yes"
        served = "not run" if self.model_type in NO_IMAGE_MODEL else served
        why = (self.stored_kv or "").replace(f"'{self.model_type}'", "its")
        return f" {served} | {why} |"


class Answer(NamedTuple):
    """A front end's answer to the prompt."""

    num_hit: int
    logits: torch.Tensor
    """`[new tokens, vocab]`."""


def sweep(model_type: str, place: Path) -> Row:
    """Store a prompt with each front end that serves the architecture, read it with each of them,
    and compare with the model's own logits. Every use makes a new model and engine.

    Args:
        model_type: one of `MODEL_TYPES`.
        place: an empty directory.

    Raises:
        AssertionError: no hit, other logits, or a refusal of several lines.
    """
    if model_type in NOT_BUILT:
        return Row(model_type, NOT_BUILT[model_type], NOT_BUILT[model_type])
    with quiet_transformers():
        directory = _write(tiny_config(model_type), build_model, place / "model")
        load = partial(AutoModelForCausalLM.from_pretrained, directory, dtype=torch.float32)
        refusals = [
            _refusal(partial(_stored_kv, load, place / "empty"), directory),
            _refusal(partial(_llm, directory, place / "empty"), directory),
        ]
        front_ends: list[Callable[[Path], Answer]] = []
        if refusals[0] is None:
            front_ends.append(partial(_by_stored_kv, load))
        if refusals[1] is None:
            front_ends.append(partial(_by_llm, directory))
        if front_ends:
            _check(load, front_ends, place, have_one_form=_have_one_form(load, refusals))
        if refusals[0] is None:
            _check_outlook(directory, load)
    return Row(model_type, *refusals)


def sweep_image_text(model_type: str, place: Path) -> ImageTextRow:
    """As `sweep`, with a class that takes images and a prompt of text.

    Args:
        model_type: one of `IMAGE_TEXT_TYPES`.
    """
    if model_type in NO_IMAGE_MODEL:
        return ImageTextRow(model_type, NO_IMAGE_MODEL[model_type])
    with quiet_transformers():
        directory = _write(image_text_config(model_type), build_image_text, place / "model")
        load = partial(AutoModelForImageTextToText.from_pretrained, directory, dtype=torch.float32)
        refusal = _refusal(partial(_stored_kv, load, place / "empty"), directory)
        if refusal is None:
            _check(load, [partial(_by_stored_kv, load)], place, have_one_form=True)
            _check_outlook(directory, load)
    return ImageTextRow(model_type, refusal)


def _check_outlook(directory: Path, load: Callable[[], Any]) -> None:
    """What config.json alone says of a model that is served is what the loaded model shows, but for
    its own positions, which only values show."""
    host = HostModel(load(), None, None)
    is_shared = host.plain is not None or "numbers tokens otherwise" in host.why_not_plain
    assert outlook(directory).served == (Served.SHARED if is_shared else Served.PROVEN_FIRST)


def _have_one_form(load: Callable[[], Any], refusals: list[str | None]) -> bool:
    """Whether the front ends that serve a model share its records."""
    return None not in refusals or HostModel(load(), None, None).plain is not None


def _check(
    load: Callable[[], Any],
    front_ends: list[Callable[[Path], Answer]],
    place: Path,
    *,
    have_one_form: bool,
) -> None:
    _, expected = generate(load(), _prompt())
    _, other = generate(load(), _prompt(changed=HIT))
    assert _difference(other, expected) >= DIFFERENT
    for number, writer in enumerate(front_ends):
        store = place / f"store {number}"
        written = writer(store)
        assert written.num_hit == 0
        assert _difference(written.logits, expected) <= WITHIN, "of the model without a hit"
        for reader in front_ends if have_one_form else [writer]:
            read = reader(store)
            assert read.num_hit == HIT, (writer, reader)
            assert _difference(read.logits, expected) <= WITHIN, (writer, reader)


def _prompt(changed: int = 0) -> torch.Tensor:
    """Return token ids `[1, NUM_TOKENS]`; the first `changed` of them are different ones."""
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(3, 250, (1, NUM_TOKENS), generator=generator)
    prompt[:, :changed] = prompt[:, :changed].flip(1)
    return prompt


def _difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected[: len(logits)]
    return float((logits - expected).abs().max() / expected.abs().max())


# ---- front ends


def _write(config: Any, build: Callable[[Any], Any], directory: Path) -> Path:
    write_random_model(directory, partial(build, config))
    if json.loads((directory / "config.json").read_text())["model_type"] != config.model_type:
        config.save_pretrained(directory)  # the whole config, since the model was only a part
    return directory


def _stored_kv(load: Callable[[], Any], store: Path) -> StoredKV:
    return StoredKV(load(), store.as_uri(), chunk_tokens=CHUNK)


def _llm(directory: Path, store: Path) -> LLM:
    options = {"chunk_tokens": CHUNK, "audit": "off"}  # an audit would compute the last chunk
    return LLM(
        directory,
        store=store.as_uri(),
        connector_options=options,
        dtype="float32",
        num_blocks=2 * NUM_TOKENS // CHUNK,
    )


def _refusal(make: Callable[[], StoredKV | LLM], directory: Path) -> str | None:
    """Return why a front end cannot be made, without the names of directory and class, or None."""
    try:
        make().close()
    except ConfigError as error:
        reason = str(error)
    else:
        return None
    assert "\n" not in reason
    named = re.escape(str(directory))
    reason = re.sub(rf"\w* from {named} |{named}( holds a '\S+' model,? |: | |/)", "", reason)
    return re.sub(r"^\w+ (?=cannot |takes |keeps |returns )", "", reason)


def _by_stored_kv(load: Callable[[], Any], store: Path) -> Answer:
    generated = reuse(load(), store.as_uri(), _prompt())
    assert (generated.num_saved == 0) == (generated.num_loaded == HIT)
    return Answer(generated.num_loaded, generated.logits)


def _by_llm(directory: Path, store: Path) -> Answer:
    with _llm(directory, store) as llm:
        (completion,) = llm.generate([_prompt()[0].tolist()], PARAMS)
        assert llm.drain(60.0)
    return Answer(completion.num_external_tokens, torch.from_numpy(completion.first_logits)[None])


# ---- the page


CAUSAL, IMAGE_TEXT = "| architectures |", "| classes that take images |"
"""How the heads of the page's tables begin."""


def answers_of_page(table: str) -> dict[str, str]:
    """Return what a table of the page says, by architecture: the cells behind its name."""
    lines = _table_of_page(table).splitlines()[2:]
    rows = [line[1:].partition("|") for line in lines]
    return {each.strip(): answer for names, _, answer in rows for each in names.split(",")}


def _table_of_page(table: str) -> str:
    text = PAGE.read_text(encoding="utf-8")
    return text[text.index(table) :].partition("\n\n")[0].rstrip("\n")


def version_of_page() -> str:
    """Return the version of Transformers with which the page's tables were made."""
    return re.search(r"Transformers (\d\S+\d)", PAGE.read_text(encoding="utf-8"))[1]


def write_page(rows: Iterable[Row], image_rows: Iterable[ImageTextRow]) -> None:
    """Replace the version and the tables of the page."""
    text = PAGE.read_text(encoding="utf-8").replace(version_of_page(), transformers.__version__)
    heads = {
        CAUSAL: [f"{CAUSAL} `StoredKV` | `LLM` | why not |", "|---|---|---|---|"],
        IMAGE_TEXT: [f"{IMAGE_TEXT} `StoredKV` | why not |", "|---|---|---|"],
    }
    for table, each in ((CAUSAL, rows), (IMAGE_TEXT, image_rows)):
        text = text.replace(_table_of_page(table), "\n".join([*heads[table], *_lines(each)]))
    PAGE.write_text(text, encoding="utf-8")


def _lines(rows: Iterable[Row | ImageTextRow]) -> list[str]:
    alike: dict[str, list[str]] = {}
    for row in rows:
        alike.setdefault(row.answer, []).append(row.model_type)
    largest_first = sorted(alike.items(), key=lambda each: -len(each[1]))
    return [f"| {', '.join(names)} |{answer}" for answer, names in largest_first]
