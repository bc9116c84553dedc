"""The files that vLLM prepares to read are among those that count as weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvferry.identity import weight_files
from kvferry.v1.running_model import loads_of
from tests.identity.test_weight_files import BESIDE, write_files
from tests.real_vllm.host import RELEASE

FORMATS = ("auto", "hf", "safetensors", "pt", "npcache", "mistral")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, as vLLM imports it
@pytest.mark.parametrize("load_format", FORMATS)
def test_vllm_reads_nothing_that_does_not_count(tmp_path: Path, load_format: str) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    num_read = 0
    for number, (names, beside, _) in enumerate(BESIDE):
        model = write_files(tmp_path / str(number), [*names, *beside])
        config: Any = LoadConfig(load_format=load_format)
        loads = loads_of(config.load_format)
        try:
            of_old = (str(model), None, True, None)
            given = of_old if RELEASE < (0, 28) else (str(model), None, None, True, None)
            found = DefaultModelLoader(config)._prepare_weights(*given)
        except RuntimeError:  # nothing that this format reads
            continue
        read = {Path(path).name for path in found[1]}
        num_read += len(read)
        assert read - {"training_args.bin"} <= set(weight_files(model, loads).counted)
    assert num_read > 0
