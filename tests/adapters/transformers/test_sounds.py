"""Prompts with sounds are stored and read as those with images are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from kvferry.adapters.transformers import StoredKV
from kvferry.engine.model import quiet_transformers
from kvferry.observe import Counters
from kvferry.testing.models import write_random_model
from tests.adapters.transformers.generating import CHUNK, generate

SOUND = 250
"""Token id."""

_WITHIN = 1e-5
"""Allowed difference of logits, relative to the largest."""

_MELS, _FRAMES = 16, 96
_TEXT = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048},
}
_ENCODER = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 256, "num_mel_bins": _MELS, "max_source_positions": _FRAMES // 2},
}
_QWEN_ENCODER = {
    **{"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 128},
    **{"num_mel_bins": _MELS, "max_source_positions": _FRAMES // 2},
}
_CONFORMER = {
    **{"input_dim": _MELS, "num_layers": 2, "hidden_dim": 64, "feedforward_mult": 2},
    **{"num_heads": 4, "dim_head": 16, "output_dim": 42, "context_size": 20, "max_pos_emb": 64},
}
_QFORMER = {
    **{"model_type": "blip_2_qformer", "hidden_size": 64, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "intermediate_size": 64, "encoder_hidden_size": 64},
}


def _log_mels(sounds: Sequence[torch.Tensor], mask: str | None = None) -> dict[str, torch.Tensor]:
    """Return log-mels, and a mask under a name."""
    inputs = {"input_features": torch.stack([each.T for each in sounds])}
    if mask is not None:
        inputs[mask] = torch.ones(len(sounds), _FRAMES, dtype=torch.int32)
    return inputs


def _windows(sounds: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return frames first, and a mask by the tokens that windows of frames become."""
    mask = torch.ones(len(sounds), 21, dtype=torch.bool)
    return {"input_features": torch.stack(list(sounds)), "input_features_mask": mask}


class SoundModel(NamedTuple):
    """How a tiny model is made, and what its processor makes of sounds."""

    class_name: str
    config: dict[str, Any]
    num_tokens: int
    """Of each sound."""
    process: Callable[[Sequence[torch.Tensor]], dict[str, torch.Tensor]]


MODELS = {
    "qwen2_audio": SoundModel(
        "Qwen2AudioForConditionalGeneration",
        {
            "audio_config": {"model_type": "qwen2_audio_encoder", **_QWEN_ENCODER},
            "text_config": {"model_type": "qwen2", **_TEXT},
            "audio_token_index": SOUND,
        },
        24,
        partial(_log_mels, mask="feature_attention_mask"),
    ),
    "voxtral": SoundModel(
        "VoxtralForConditionalGeneration",
        {
            "audio_config": {"model_type": "voxtral_encoder", **_ENCODER},
            "text_config": {"model_type": "llama", **_TEXT},
            "audio_token_id": SOUND,
        },
        12,
        _log_mels,
    ),
    "audioflamingo3": SoundModel(
        "AudioFlamingo3ForConditionalGeneration",
        {
            "audio_config": {"model_type": "audioflamingo3_encoder", **_ENCODER},
            "text_config": {"model_type": "qwen2", **_TEXT},
            "audio_token_id": SOUND,
        },
        24,
        partial(_log_mels, mask="input_features_mask"),
    ),
    "glmasr": SoundModel(
        "GlmAsrForConditionalGeneration",
        {
            "audio_config": {"model_type": "glmasr_encoder", **_ENCODER},
            "text_config": {"model_type": "llama", **_TEXT},
            "audio_token_id": SOUND,
        },
        12,
        partial(_log_mels, mask="input_features_mask"),
    ),
    "granite_speech": SoundModel(
        "GraniteSpeechForConditionalGeneration",
        {
            "encoder_config": _CONFORMER,
            "projector_config": _QFORMER,
            "text_config": {"model_type": "granite", **_TEXT},
            "audio_token_index": SOUND,
            "has_lora_adapter": False,
        },
        21,
        _windows,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODELS)
def test_a_prompt_with_sounds_is_read_and_another_sound_is_a_miss(model_type, tmp_path):
    model = MODELS[model_type]
    model_class = getattr(transformers, model.class_name)
    config = CONFIG_MAPPING[model_type](**model.config)
    directory = write_random_model(tmp_path / "model", partial(model_class._from_config, config))
    ids, inputs = _prompt(model, 1, 2)
    expected, logits = generate(_load(model_class, directory), ids, **inputs)
    others = _prompt(model, 1, 3).inputs
    _, other_logits = generate(_load(model_class, directory), ids, **others)
    least = float((logits - other_logits).abs().max() / logits.abs().max())
    assert least > 3 * _WITHIN  # else a check could not tell the sounds apart

    counts, url = Counters(), (tmp_path / "store").as_uri()
    whole = (ids.shape[1] - 2) // CHUNK * CHUNK
    for num_stored in (0, whole):
        made = _load(model_class, directory)
        with StoredKV(made, url, chunk_tokens=CHUNK, observer=counts) as kv:
            token_ids, found = generate(kv, ids, **inputs)
            assert kv.num_loaded == num_stored
            assert torch.equal(token_ids, expected)
            assert (found - logits).abs().max() <= _WITHIN * logits.abs().max()
    with StoredKV(_load(model_class, directory), url, chunk_tokens=CHUNK, observer=counts) as kv:
        generate(kv, ids, **others)
        second = 40 + model.num_tokens + 21
        assert kv.num_loaded == second // CHUNK * CHUNK  # up to the sound that differs
    assert counts["generated_without_store"] == 0


class _Prompt(NamedTuple):
    input_ids: torch.Tensor
    inputs: dict[str, torch.Tensor]


def _prompt(model: SoundModel, *seeds: int) -> _Prompt:
    """Make a prompt of text and sounds."""
    generator = torch.Generator().manual_seed(9)
    row = torch.randint(3, 200, (40,), generator=generator).tolist()
    sounds = []
    for seed in seeds:
        row += [SOUND] * model.num_tokens
        row += torch.randint(3, 200, (21,), generator=generator).tolist()
        sounds.append(torch.randn(_FRAMES, _MELS, generator=torch.Generator().manual_seed(seed)))
    row += torch.randint(3, 200, (30,), generator=generator).tolist()
    return _Prompt(torch.tensor([row]), model.process(sounds))


def _load(model_class: Any, directory) -> Any:
    with quiet_transformers():
        return model_class.from_pretrained(directory, dtype=torch.float32)
