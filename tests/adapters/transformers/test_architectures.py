"""Every architecture that Transformers has a causal LM of, and every class that takes images and
text: served rightly or refused, as the page says."""

from __future__ import annotations

import pytest
import transformers

from tests.adapters.transformers.image_configs import IMAGE_TEXT_TYPES
from tests.adapters.transformers.sweep import (
    CAUSAL,
    IMAGE_TEXT,
    PAGE,
    answers_of_page,
    sweep,
    sweep_image_text,
    version_of_page,
)
from tests.adapters.transformers.tiny_configs import MODEL_TYPES

IS_OF_THIS_RELEASE = version_of_page() == transformers.__version__


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # they are of Transformers' models
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_architecture_hits_rightly_or_is_refused_as_the_page_says(model_type, tmp_path):
    row = sweep(model_type, tmp_path)
    if IS_OF_THIS_RELEASE:
        assert row.answer == answers_of_page(CAUSAL)[model_type]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", IMAGE_TEXT_TYPES)
def test_a_class_that_takes_images_hits_with_text_as_the_page_says(model_type, tmp_path):
    row = sweep_image_text(model_type, tmp_path)
    if IS_OF_THIS_RELEASE:
        assert row.answer == answers_of_page(IMAGE_TEXT)[model_type]


def test_the_page_has_every_architecture():
    if IS_OF_THIS_RELEASE:
        assert sorted(answers_of_page(CAUSAL)) == sorted(MODEL_TYPES)
        assert sorted(answers_of_page(IMAGE_TEXT)) == sorted(IMAGE_TEXT_TYPES)


def test_what_other_pages_say_in_numbers_is_what_the_tables_say():
    causal, images = (answers_of_page(each) for each in (CAUSAL, IMAGE_TEXT))
    served, shown = (
        sum(each.startswith(" yes") for each in table.values()) for table in (causal, images)
    )
    # Fewer would be a loss that users notice.
    assert served >= 175
    assert sum(each.startswith(" yes | yes") for each in causal.values()) >= 90
    assert shown >= 40
    for page in ("README.md", "docs/transformers.md"):
        text = " ".join((PAGE.parents[1] / page).read_text(encoding="utf-8").split())
        assert f"{served} of the {len(causal)} causal types" in text
    assert f"{shown} of {len(images)} classes with prompts of text" in text
