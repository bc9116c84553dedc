"""Images that attend to themselves in both directions: what this vLLM does with them."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvferry.adapters.vllm.host import has_whole_items
from tests.real_vllm.host import RELEASE

pytestmark = [
    pytest.mark.skipif(RELEASE < (0, 32), reason="other signatures"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM's, at its import
]

OFFSET, LENGTH, BUDGET = 20, 100, 40


def tokens_of_step(num_computed: int) -> int:
    """How many of `BUDGET` tokens vLLM's scheduler lets a step compute of a prompt with an image,
    of which no part may be computed alone."""
    from vllm.multimodal.inputs import PlaceholderRange
    from vllm.v1.core.sched.scheduler import Scheduler

    image = SimpleNamespace(
        mm_position=PlaceholderRange(offset=OFFSET, length=LENGTH), identifier="image"
    )
    request = SimpleNamespace(has_encoder_inputs=True, mm_features=[image], request_id="r")
    cache = SimpleNamespace(
        get_cached_num_encoder_embeds=lambda *_: None,
        check_and_update_cache=lambda *_: False,
        can_allocate=lambda *_: True,
    )
    scheduler: Any = SimpleNamespace(
        is_encoder_decoder=False,
        ec_connector=None,
        encoder_cache_manager=cache,
        scheduler_config=SimpleNamespace(disable_chunked_mm_input=True),
    )
    found = Scheduler._try_schedule_encoder_inputs(scheduler, request, num_computed, BUDGET, 1000)
    return int(found[1])


def test_a_step_may_end_in_an_image_after_a_hit_that_ended_there() -> None:
    """Why no hit of ours does, and why nothing is stored behind one of vLLM's own."""
    assert tokens_of_step(0) == OFFSET  # computed whole, in the next step
    start = OFFSET + 12
    assert start + tokens_of_step(start) < OFFSET + LENGTH


@pytest.mark.parametrize(("name", "is_whole"), [("gemma3", True), ("qwen3", False)])
def test_models_say_whether_images_attend_both_ways(
    vllm_config: Any, name: str, is_whole: bool
) -> None:
    import transformers
    from vllm.transformers_utils import model_arch_config_convertor as convertor

    made = transformers.AutoConfig.for_model(name)
    found = convertor.ModelArchConfigConvertorBase(made, made.get_text_config()).is_mm_prefix_lm()
    assert found is is_whole
    config = copy(vllm_config.model_config)
    vars(config).pop("is_mm_prefix_lm", None)  # as vLLM said it of another model, and kept it
    arch = replace(config.model_arch_config, is_mm_prefix_lm=found)
    object.__setattr__(config, "model_arch_config", arch)
    assert has_whole_items(SimpleNamespace(model_config=config)) is is_whole
