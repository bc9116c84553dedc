"""`make proof-wrong-model` asks kvferry's back end in SGLang: two cases of its table."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.real_sglang.other_models import run

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_rank")]


@pytest.mark.parametrize(("second", "says"), [("plain", "right"), ("other", "miss")])
def test_a_model_gets_its_own_pages_alone(
    tmp_path: Path, models: dict[str, Path], second: str, says: str
) -> None:
    place = tmp_path / "served"
    case = {
        "model": str(place),
        "store": (tmp_path / "store").as_uri(),
        "overrides": {},
        "is_other": second != "plain",
        "has_adapter": False,
        "is_updated": False,
    }
    shutil.copytree(models["plain"], place)
    assert run(case, is_first=True) == ""
    shutil.rmtree(place)
    shutil.copytree(models[second], place)
    assert run(case, is_first=False) == says
