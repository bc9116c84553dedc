"""Models loaded by Transformers, and prompts for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from kvferry.engine.model import quiet_transformers
from kvferry.testing.models import make_tiny_model, write_random_model
from tests.adapters.transformers.image_configs import build_image_text, image_text_config
from tests.adapters.transformers.image_models import build as build_with_images
from tests.adapters.transformers.tiny_configs import MODEL_TYPES, build_model, tiny_config


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory: `model_dir("llama", seed=1)` is a model directory, made once."""
    made: dict[str, Path] = {}

    def factory(arch: str = "llama", seed: int = 0, **overrides: object) -> Path:
        name = f"{arch}-{seed}-{sorted(overrides.items())}"
        if name not in made:
            # Tiny models generate random tokens, none of which may count as padding.
            made[name] = make_tiny_model(
                tmp_path_factory.mktemp(arch), arch, seed, **{"pad_token_id": None, **overrides}
            )
        return made[name]

    return factory


@pytest.fixture(scope="session")
def tree_dir(tmp_path_factory) -> Callable[[str], Path]:
    """Factory: a directory of a tiny model of any architecture, made once."""
    made: dict[str, Path] = {}

    def factory(model_type: str) -> Path:
        if model_type not in made:
            place = tmp_path_factory.mktemp(model_type) / "model"
            build = partial(build_model, tiny_config(model_type))
            made[model_type] = write_random_model(place, build)
        return made[model_type]

    return factory


@pytest.fixture
def load_model(model_dir):
    """Factory: a model in float32 as `from_pretrained` gives it, new at every call."""

    def factory(path: Path | None = None, **kwargs):
        with quiet_transformers():
            return AutoModelForCausalLM.from_pretrained(
                path or model_dir(), **{"dtype": torch.float32, **kwargs}
            )

    return factory


@pytest.fixture(scope="session")
def image_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Factory: `image_dir("gemma3")` is a directory of a tiny model with images, made once."""
    made: dict[str, Path] = {}

    def factory(model_type: str) -> Path:
        if model_type not in made:
            place = tmp_path_factory.mktemp(model_type) / "model"
            made[model_type] = write_random_model(place, partial(build_with_images, model_type))
        return made[model_type]

    return factory


@pytest.fixture(scope="session")
def any_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Factory: a directory of a tiny model, with images where its type takes some, made once, and
    the class that loads it."""
    made: dict[str, tuple[Path, Any]] = {}

    def factory(model_type: str) -> tuple[Path, Any]:
        if model_type not in made:
            place = tmp_path_factory.mktemp(model_type) / "model"
            if model_type in MODEL_TYPES:
                build, auto_class = (
                    partial(build_model, tiny_config(model_type)),
                    AutoModelForCausalLM,
                )
            else:
                config = image_text_config(model_type)
                build, auto_class = partial(build_image_text, config), AutoModelForImageTextToText
            made[model_type] = write_random_model(place, build), auto_class
        return made[model_type]

    return factory


@pytest.fixture
def store_url(tmp_path) -> str:
    return (tmp_path / "store").as_uri()
