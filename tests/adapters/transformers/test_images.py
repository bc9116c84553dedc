"""Prompts with images: what is stored of them is read right, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from kvferry.adapters.transformers import StoredKV, items
from kvferry.adapters.transformers.host_model import HostModel
from kvferry.adapters.transformers.items import Items
from kvferry.engine.model import quiet_transformers
from kvferry.errors import ConfigError
from kvferry.observe import Counters
from tests.adapters.transformers.generating import CHUNK, generate
from tests.adapters.transformers.image_models import (
    END,
    IMAGE,
    MODELS,
    MORE,
    START,
    VIDEO,
    ImagePrompt,
    Picture,
    image_prompt,
)
from tests.adapters.transformers.sweep import PAGE

WITHIN = 1e-5
"""Of the largest logit."""

QUICK = ("qwen3_5", "gemma3")
"""Of the two kinds that differ most: positions on three axes with states; images whose tokens see
each other, in windows."""


@pytest.fixture
def load(image_dir):
    def factory(model_type: str, dtype: torch.dtype = torch.float32):
        with quiet_transformers():
            return AutoModelForImageTextToText.from_pretrained(image_dir(model_type), dtype=dtype)

    return factory


def open_kv(model, url: str, **options) -> StoredKV:
    return StoredKV(model, url, chunk_tokens=CHUNK, **options)


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    return float((expected - found).abs().max() / expected.abs().max())


A, B, C = Picture(1), Picture(2, 3, 4), Picture(3, 3, 4)


def assert_right(
    kv: StoredKV, load, model_type: str, prompt: ImagePrompt, within: float = 1e-4
) -> None:
    """Assert that a call answers as the model without a store."""
    expected = generate(load(model_type), prompt.input_ids, **prompt.inputs)
    assert_same(expected, generate(kv, prompt.input_ids, **prompt.inputs), within)


def assert_same(expected, found, within: float = 1e-4) -> None:
    """Assert that two answers of `generate` are the same."""
    assert difference(expected[1], found[1]) <= within
    assert torch.equal(found[0], expected[0])


ALL_MODELS = [
    *QUICK,
    *(pytest.param(each, marks=pytest.mark.slow) for each in [*MODELS, *MORE] if each not in QUICK),
]


@pytest.mark.parametrize("model_type", ALL_MODELS)
def test_a_prompt_with_images_is_served(load, store_url, model_type):
    prompt = image_prompt(model_type, 40, A, 21, B, 50)
    other = image_prompt(model_type, 40, A, 21, C, 50)
    _, logits = generate(load(model_type), prompt.input_ids, **prompt.inputs)
    _, others = generate(load(model_type), other.input_ids, **other.inputs)
    assert difference(logits, others) > 1000 * WITHIN
    hit = (prompt.input_ids.shape[1] - 2) // CHUNK * CHUNK
    for num_loaded in (0, hit):
        counts = Counters()
        with open_kv(load(model_type), store_url, observer=counts, audit=1.0) as kv:
            assert_right(kv, load, model_type, prompt, WITHIN)
            assert kv.num_loaded == num_loaded
        assert counts["generated_without_store"] == 0
        assert counts["audits"] == bool(num_loaded)
        assert counts["audit_mismatch"] == 0


def test_the_page_names_the_classes_that_are_tried():
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"- in another process: {', '.join(sorted(MODELS))};" in text
    assert f"- in the same process: {', '.join(sorted(MORE))}." in text


def _tensors_alone(prompt: Items, ids, number, span) -> str:
    """As `_digest`, without the grid."""
    pixels = replace(prompt, tensors={"pixel_values": prompt.tensors["pixel_values"]})
    return items_digest(pixels, ids, number, span)


def _no_order(prompt: Items, *_) -> str:
    return str(sum(float(each.double().sum()) for each in prompt.tensors.values()))


items_digest = items._digest
LONG, WIDE = Picture(9, 2, 6), Picture(9, 3, 4)

CONTROLS = {
    # Which guard is taken away, what replaces it, the stored prompt, the prompt that is read, and
    # what may be read of it.
    "another image under equal tokens": (
        (items, "_digest", lambda *_: "an image"),
        (40, A, 21, B, 50),
        (40, A, 21, C, 50),
        64,
    ),
    "two images in swapped order": (
        (items, "_digest", _no_order),
        (40, B, 21, C, 50),
        (40, C, 21, B, 50),
        32,
    ),
    "another size of one image": (
        (items, "_digest", _tensors_alone),
        (40, LONG, 50),
        (40, WIDE, 50),
        32,
    ),
    "a boundary in an image": (
        (Items, "cut", lambda _, num_tokens: num_tokens),
        (40, Picture(8, 6, 6), 50),
        (40, Picture(8, 6, 6), 3, 50),
        41,
    ),
}


@pytest.mark.parametrize("is_guarded", [True, False])
@pytest.mark.parametrize("control", CONTROLS)
def test_what_an_image_needs_of_a_hit(load, store_url, monkeypatch, control, is_guarded):
    (place, name, mutant), stored, read, hit = CONTROLS[control]
    # Images see both ways in one, and have positions on three axes in the other.
    model_type = "gemma3" if control.startswith("two") else "qwen3_vl"
    stored, read = (image_prompt(model_type, *each) for each in (stored, read))
    if control.startswith("a boundary"):
        read.input_ids[:, -53:] = image_prompt(model_type, 53, seed=4).input_ids
    else:
        assert torch.equal(stored.input_ids, read.input_ids)
    proven = image_prompt(model_type, 20, Picture(7), 9)
    with open_kv(load(model_type), store_url, audit="off") as kv:
        kv.prefill(proven.input_ids, **proven.inputs)
        if not is_guarded and name == "_digest":
            monkeypatch.setattr(place, name, mutant)
        assert_right(kv, load, model_type, stored)
        if is_guarded:
            assert_right(kv, load, model_type, read)
            assert kv.num_loaded == hit
            return
        monkeypatch.setattr(place, name, mutant)
        with pytest.raises((AssertionError, ValueError)):
            assert_right(kv, load, model_type, read)


def test_text_before_an_image_is_shared_with_prompts_of_text(load, store_url):
    with_image, other = (image_prompt("qwen3_vl", 40, each, 50) for each in (A, C))
    text = image_prompt("qwen3_vl", 40, 60)
    with open_kv(load("qwen3_vl"), store_url) as kv:
        assert_right(kv, load, "qwen3_vl", text)
        for prompt, hit in ((with_image, 32), (other, 32), (text, 96), (with_image, 96)):
            assert_right(kv, load, "qwen3_vl", prompt)
            assert kv.num_loaded == hit


@pytest.mark.parametrize(
    ("model_type", "hits"),
    # With states, a hit ends where a prompt ended.
    [("qwen3_5", (0, 0, 0, 96, 96)), ("qwen3_vl", (0, 32, 48, 96, 96))],
)
def test_positions_that_images_leave_in_the_model_are_those_of_the_prompt(
    load, store_url, model_type, hits
):
    first, second = image_prompt(model_type, 40, A, 50), image_prompt(model_type, 40, A, 9, B, 50)
    text, model = image_prompt(model_type, 99), load(model_type)
    with open_kv(model, store_url) as kv:
        for hit, prompt in zip(hits, (first, text, second, first, text), strict=True):
            plain = load(model_type)
            with torch.no_grad():
                expected = plain(prompt.input_ids, **prompt.inputs)
            cache = kv.prefill(prompt.input_ids, **prompt.inputs)
            assert kv.num_loaded == hit
            left, as_left = model.model.rope_deltas, plain.model.rope_deltas
            assert (left is None) == (as_left is None)
            assert left is None or torch.equal(left, as_left)
            with torch.no_grad():  # as a loop of the caller's own goes on
                logits = model(prompt.input_ids[:, -1:], cache=cache).logits[:, -1]
            assert difference(expected.logits[:, -1], logits) <= WITHIN


def test_as_many_runs_as_images_need_not_be_one_each(load, store_url):
    """Two images in one run, and one in two runs, as a client may write them."""
    first, second = (
        image_prompt("gemma3", 20, each, Picture(2), 30, Picture(3), 50) for each in (A, C)
    )
    ids = first.input_ids.clone()
    ids[0, 20:34] = torch.tensor([START, *[IMAGE] * 8, END, 9, 9, 9, 9])
    inside = torch.nonzero(ids[0, 34:] == IMAGE)[:, 0] + 34
    ids[0, inside[2]], ids[0, inside[3] + 1] = 9, IMAGE
    counts = Counters()
    with open_kv(load("gemma3"), store_url, observer=counts) as kv:
        for prompt in (first, second):
            inputs = {**prompt.inputs, "token_type_ids": (ids == IMAGE).int()}
            for _ in range(2):
                assert_right(kv, load, "gemma3", ImagePrompt(ids, inputs))
            assert kv.num_loaded >= ids.shape[1] - 2 - CHUNK
    assert counts["generated_without_store"] == 0


EVERY = 256
"""Tokens between two states of the tiny model."""

EDGES = {
    "an image first": (Picture(8, 6, 6), 3),
    "an image last": (40, Picture(8, 6, 6)),
    "images alone": (Picture(8, 6, 6), Picture(9, 2, 3)),
    "two images in a row": (20, A, B, 30),
    "a short prompt": (1, Picture(8, 1, 2), 1),
}


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_vl"])
@pytest.mark.parametrize("case", EDGES)
def test_images_anywhere_in_a_prompt(load, store_url, case, model_type, is_whole):
    prompt = image_prompt(model_type, *EDGES[case])
    if not is_whole:  # it ends in its last token of an image
        last = int(torch.nonzero(prompt.input_ids[0] == IMAGE)[-1]) + 1
        types = prompt.inputs["mm_token_type_ids"][:, :last]
        prompt = ImagePrompt(
            prompt.input_ids[:, :last], {**prompt.inputs, "mm_token_type_ids": types}
        )
    counts = Counters()
    with open_kv(load(model_type), store_url, observer=counts) as kv:
        for _ in range(2):
            assert_right(kv, load, model_type, prompt)
        if not is_whole:
            with pytest.raises(ConfigError, match="the prompt ends in an image"):
                kv.prefill(prompt.input_ids, **prompt.inputs)
    assert counts["generated_without_store"] == counts["cache_law_broken"] == 0


@pytest.mark.parametrize(
    ("model_type", "text", "hits"),
    # The last chunk ends in the image; or the place does where every prompt leaves a state.
    [("qwen3_5", (40, 1), {32}), ("qwen3_vl", (40, 1), {41}), ("qwen3_5", (EVERY - 9, 30), {304})],
)
def test_a_prefill_stops_in_no_image(load, store_url, model_type, text, hits):
    prompt = image_prompt(model_type, text[0], Picture(8, 6, 6), text[1])
    with open_kv(load(model_type), store_url) as kv:
        if model_type == "qwen3_5":
            assert kv._form.tree.snapshot_tokens == EVERY
        for _ in range(2):
            cache = kv.prefill(prompt.input_ids, **prompt.inputs)
            assert cache.get_seq_length() == prompt.input_ids.shape[1] - 1
        assert_right(kv, load, model_type, prompt)
        assert kv.num_loaded in hits


VIDEOS = {
    # Frames are apart, with text between them, or in one run; and how tensors are divided.
    "qwen3_5": ([[VIDEO] * 6, [VIDEO] * 6], "by video_grid_thw"),
    "qwen2_5_vl": ([[VIDEO] * 12], "by video_grid_thw"),
}


@pytest.mark.parametrize("with_image", [False, True])
@pytest.mark.parametrize("model_type", VIDEOS)
def test_videos_are_served(load, store_url, model_type, with_image, caplog):
    frames, law = VIDEOS[model_type]
    ids, inputs = image_prompt(model_type, 40, *([A] if with_image else []), 9)
    row = [*ids[0].tolist(), *(each for frame in frames for each in [START, *frame, END, 9])]
    ids = torch.tensor([row + image_prompt(model_type, 50, seed=3).input_ids[0].tolist()])
    pixels = Picture(5).pixels(48, 1536)
    inputs |= {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[2, 4, 6]])}
    inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    prompt = ImagePrompt(ids, inputs)
    other = ImagePrompt(ids, {**inputs, "pixel_values_videos": -pixels})
    with caplog.at_level("INFO"), open_kv(load(model_type), store_url) as kv:
        assert_right(kv, load, model_type, prompt)
        assert_right(kv, load, model_type, prompt)
        assert kv.num_loaded == (ids.shape[1] - 2) // CHUNK * CHUNK
        assert_right(kv, load, model_type, other)
        assert kv.num_loaded <= 48
    assert f"({'all' if with_image else law}) are proven," in caplog.text


@pytest.mark.parametrize(
    "model_type",
    [
        "qwen3_vl",
        *(pytest.param(each, marks=pytest.mark.slow) for each in MODELS if each != "qwen3_vl"),
    ],
)
def test_images_of_other_sizes_are_no_change_of_the_model(load, store_url, model_type):
    counts = Counters()
    with open_kv(load(model_type), store_url, observer=counts) as kv:
        for picture in (A, Picture(5, 3, 4), Picture(6, 1, 2), Picture(7, 2, 6)):
            prompt = image_prompt(model_type, 20, picture, 30)
            assert_right(kv, load, model_type, prompt)
            assert_right(kv, load, model_type, prompt)
            assert kv.num_loaded >= prompt.input_ids.shape[1] - 2 - CHUNK
    assert counts["model_changed"] == counts["generated_without_store"] == 0


def test_pixels_go_to_the_model_for_images_that_are_computed(load, store_url, monkeypatch):
    kind, rows = type(load("qwen3_vl").model), []
    original = kind.get_image_features

    def counted(model, pixel_values, *rest, **given):
        rows.append(len(pixel_values))
        return original(model, pixel_values, *rest, **given)

    first, both = image_prompt("qwen3_vl", 40, A, 50), image_prompt("qwen3_vl", 40, A, 50, B, 9)
    of_a, of_b = 4 * A.height * A.width, 4 * B.height * B.width
    with open_kv(load("qwen3_vl"), store_url, audit="off") as kv:
        generate(kv, first.input_ids, **first.inputs)  # and proves it
        monkeypatch.setattr(kind, "get_image_features", counted)
        for prompt, computed in (
            (first, []),
            (image_prompt("qwen3_vl", 40, C, 50), [4 * C.height * C.width]),
            (both, [of_b]),
            (both, []),
            (image_prompt("qwen3_vl", 9, A, 50, B, 9), [of_a + of_b]),
        ):
            rows.clear()
            generate(kv, prompt.input_ids, **prompt.inputs)
            assert rows == computed


def test_a_class_that_cannot_go_on_behind_an_image_runs_without_the_store(
    load, store_url, monkeypatch, caplog
):
    counts, prompt = Counters(), image_prompt("qwen3_5", 40, A, 50)
    # As if nobody could know the positions behind an image.
    monkeypatch.setattr(HostModel, "placed", lambda _, __, found: found)
    with caplog.at_level("INFO"), open_kv(load("qwen3_5"), store_url, observer=counts) as kv:
        for _ in range(2):
            assert_right(kv, load, "qwen3_5", prompt)
            assert kv.num_loaded == 0
        assert_right(kv, load, "qwen3_5", image_prompt("qwen3_5", 90))
    assert counts["generated_without_store"] == 2
    refused = "pixel_values (by image_grid_thw) cannot be served: "
    assert caplog.text.count(refused) == 2
    assert caplog.text.count("are proven first") == 1


@pytest.mark.parametrize("model_type", ["gemma3", "qwen3_vl"])
def test_chunks_of_images_are_audited_with_their_pixels(load, store_url, model_type):
    picture = Picture(8, 6, 6)
    prompt = image_prompt(model_type, 5, picture, *([3, C] if model_type == "gemma3" else []), 50)
    hit = (prompt.input_ids.shape[1] - 1) // CHUNK * CHUNK
    with open_kv(load(model_type), store_url) as kv:
        generate(kv, prompt.input_ids, **prompt.inputs)
    counts, num_others = Counters(), hit // CHUNK - 1
    with open_kv(load(model_type), store_url, observer=counts, audit=1.0) as kv:
        for number in range(num_others):
            kv._auditor.draw = lambda number=number: number / num_others
            generate(kv, prompt.input_ids, **prompt.inputs)
            assert kv.num_loaded == hit
    assert counts["audits"] == num_others
    assert counts["audit_mismatch"] == counts["audit_doubtful"] == 0


def _leave_state(model) -> None:
    def leave(module, _, given):
        if given.get("pixel_values") is not None or given.get("mm_encoder_outputs"):
            module.num_images = getattr(module, "num_images", 0) + 1

    model.model.register_forward_pre_hook(leave, with_kwargs=True)


def _shift(model, is_shifted) -> None:
    """Add to the embeddings of all tokens of some forwards."""
    by = [0.0]

    def see(_, __, given):
        by[0] = 0.3 if is_shifted(given) else 0.0

    model.model.register_forward_pre_hook(see, with_kwargs=True)
    model.get_input_embeddings().register_forward_hook(lambda _, __, rows: rows + by[0])


def _has_image(given) -> bool:
    return given.get("pixel_values") is not None or bool(given.get("mm_encoder_outputs"))


REFUSED = {
    # What a class might do, and of what the refusal speaks.
    "it keeps state of images": (_leave_state, "keeps state of a prompt in model.num_images"),
    "text before an image depends on it": (
        lambda model: _shift(model, lambda given: _has_image(given) and not given["cache"]),
        "otherwise in pieces than in one",
    ),
    "text behind an image looks at it": (
        lambda model: _shift(model, _has_image),
        "otherwise in pieces than in one",
    ),
    "an image behind a cache is another": (
        lambda model: _shift(model, lambda given: _has_image(given) and bool(given["cache"])),
        "otherwise in pieces than in one",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_class_that_computes_images_otherwise_behind_a_cache_is_refused(
    load, store_url, case, caplog
):
    change, why = REFUSED[case]
    model, counts = load("qwen3_vl"), Counters()
    change(model)
    prompt = image_prompt("qwen3_vl", 40, A, 50)
    with (
        caplog.at_level("INFO"),
        open_kv(model, store_url, observer=counts, weights_version="mine") as kv,
    ):
        for _ in range(2):
            generate(kv, prompt.input_ids, **prompt.inputs)
            assert kv.num_loaded == 0
        text = image_prompt("qwen3_vl", 90)
        for hit in (0, 80):
            kv.prefill(text.input_ids)
            # Where an image leaves state, whatever follows may depend on it.
            assert kv.num_loaded == (0 if case == "it keeps state of images" else hit)
    assert counts["generated_without_store"] == 2
    assert "(by image_grid_thw) cannot be served: " in caplog.text
    assert why in caplog.text


def test_wrong_images_of_some_calls_do_not_decide_for_a_class(load, store_url, caplog):
    ids, inputs = image_prompt("qwen3_vl", 40, A, 50)
    wrong = {**inputs, "pixel_values": inputs["pixel_values"][:, :-1]}
    for num_wrong, hit in ((2, 96), (3, 0)):
        caplog.clear()
        with caplog.at_level("INFO"), open_kv(load("qwen3_vl"), f"{store_url}-{hit}") as kv:
            for _ in range(num_wrong):
                with pytest.raises(RuntimeError):
                    generate(kv, ids, **wrong)
            for _ in range(2):
                generate(kv, ids, **inputs)
            assert kv.num_loaded == hit
        assert caplog.text.count("are proven first") == 3


def test_a_set_of_arguments_is_proven_once(load, store_url, caplog):
    text = [image_prompt("gemma3", 40, each, 50) for each in (A, B)]
    with caplog.at_level("INFO"):
        for prompt in text:
            with open_kv(load("gemma3"), store_url) as kv:
                for _ in range(2):
                    assert_right(kv, load, "gemma3", prompt)
        assert caplog.text.count("are proven first") == 1
        with open_kv(load("gemma3"), store_url) as kv:
            ids, inputs = text[0]
            expected, logits = generate(load("gemma3"), ids, pixel_values=inputs["pixel_values"])
            found, others = generate(kv, ids, pixel_values=inputs["pixel_values"])
            assert kv.num_loaded == 32
        assert difference(logits, others) <= WITHIN
        assert torch.equal(expected, found)
        assert caplog.text.count("are proven first") == 2


OTHERS = {
    # Calls that the store does not serve, and why.
    "a batch": (
        lambda ids, inputs: (ids.repeat(2, 1), {n: torch.cat([v, v]) for n, v in inputs.items()}),
        "image_grid_thw, mm_token_type_ids, pixel_values in a batch",
    ),
    "several answers": (
        lambda ids, inputs: (ids, {**inputs, "num_beams": 2}),
        "pixel_values with several answers to a prompt",
    ),
    "a hidden token": (
        lambda ids, inputs: (
            ids,
            {**inputs, "attention_mask": (torch.arange(98) > 2)[None].long()},
        ),
        "pixel_values beside hidden tokens",
    ),
    "no pixels": (
        lambda ids, inputs: (ids, {"mm_token_type_ids": inputs["mm_token_type_ids"]}),
        "it uses mm_token_type_ids",
    ),
    "an argument that is not known": (
        lambda ids, inputs: (ids, {**inputs, "logits_to_keep": 2}),
        "it uses logits_to_keep",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_calls_with_images_run_without_the_store(load, store_url, case, caplog):
    change, why = OTHERS[case]
    ids, inputs = change(*image_prompt("qwen3_vl", 40, A, 50))
    counts = Counters()
    expected, logits = generate(load("qwen3_vl"), ids, **inputs)
    with caplog.at_level("INFO"), open_kv(load("qwen3_vl"), store_url, observer=counts) as kv:
        for _ in range(2):
            found, others = generate(kv, ids, **inputs)
            assert kv.num_loaded == 0
            assert torch.equal(found, expected)
            assert torch.equal(others, logits)
    assert counts["generated_without_store"] == 2
    assert counts["put_stored"] == 0
    assert why in caplog.text


def _pixels(change):
    return lambda ids, inputs: (ids, {**inputs, "pixel_values": change(inputs["pixel_values"])})


WRONG = {
    "more images than tokens": lambda ids, inputs: (
        torch.where(torch.arange(98) == 41, 5, ids),
        inputs,
    ),
    "fewer rows than the grid says": _pixels(lambda pixels: pixels[:-4]),
    "no rows": _pixels(lambda pixels: pixels[:0]),
    "one axis": _pixels(lambda pixels: pixels.flatten()),
    "on another device": _pixels(lambda pixels: pixels.to("meta")),
    "whole numbers": _pixels(lambda pixels: pixels.long()),
    "no tensor": _pixels(lambda pixels: pixels.tolist()),
    "sparse": _pixels(lambda pixels: pixels.to_sparse()),
    "a grid too few": lambda ids, inputs: (
        torch.cat([ids, ids], 1),
        {
            **inputs,
            "pixel_values": torch.cat([inputs["pixel_values"]] * 2),
            "mm_token_type_ids": torch.cat([inputs["mm_token_type_ids"]] * 2, 1),
        },
    ),
    "no number": _pixels(lambda pixels: pixels * float("nan")),
    "a grid of floats": lambda ids, inputs: (
        ids,
        {**inputs, "image_grid_thw": inputs["image_grid_thw"].float()},
    ),
    "types of another length": lambda ids, inputs: (
        ids,
        {**inputs, "mm_token_type_ids": inputs["mm_token_type_ids"][:, :-1]},
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_end_as_without_a_store(load, store_url, case):
    """Whether or not the model was proven with right ones before."""
    ids, inputs = WRONG[case](*image_prompt("qwen3_vl", 40, A, 50))
    try:
        expected = generate(load("qwen3_vl"), ids, **inputs)
    except Exception as error:
        expected = error
    proven = image_prompt("qwen3_vl", 40, A, 50)
    right = generate(load("qwen3_vl"), proven.input_ids, **proven.inputs)
    for is_proven in (True, False):
        with open_kv(load("qwen3_vl"), f"{store_url}/{is_proven}") as kv:
            if is_proven:
                assert_same(right, generate(kv, proven.input_ids, **proven.inputs))
            if isinstance(expected, Exception):
                with pytest.raises(type(expected)) as raised:
                    generate(kv, ids, **inputs)
                assert str(raised.value) == str(expected)
            else:
                found = generate(kv, ids, **inputs)[1]
                assert bool(found.isnan().all()) or difference(expected[1], found) <= WITHIN
            for _ in range(2):
                assert_same(right, generate(kv, proven.input_ids, **proven.inputs))
            assert kv.num_loaded == 96
