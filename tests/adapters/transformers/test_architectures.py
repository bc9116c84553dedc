"""Every architecture that Transformers has a causal LM of: served rightly or refused, as the page
says."""

from __future__ import annotations

import pytest
import transformers

from tests.adapters.transformers.sweep import answers_of_page, sweep, version_of_page
from tests.adapters.transformers.tiny_configs import MODEL_TYPES


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore")  # they are of Transformers' models
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_architecture_hits_rightly_or_is_refused_as_the_page_says(model_type, tmp_path):
    row = sweep(model_type, tmp_path)
    if version_of_page() == transformers.__version__:
        assert row.answer == answers_of_page()[model_type]


def test_the_page_has_every_architecture():
    if version_of_page() == transformers.__version__:
        assert sorted(answers_of_page()) == sorted(MODEL_TYPES)
