"""The example of handovers, small: the same code path, processes and all, with a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.pair import Round
from benchmarks.vllm_servers import Server
from examples.cpu.disaggregated import Result, lines, main
from kvferry.testing.models import make_tiny_model
from tests.cli.test_status import says, served
from tests.tokenizers import save_tiny_tokenizer


@pytest.mark.slow
def test_the_handover_demo_moves_every_whole_chunk_and_changes_no_answer(tmp_path, capsys):
    model_dir = make_tiny_model(tmp_path / "tiny", max_position_embeddings=2048)
    save_tiny_tokenizer(model_dir)
    code = main(
        ["--model-dir", str(model_dir), "--document-tokens", "300", "--chunk-tokens", "32",
         "--rounds", "1", "--max-tokens", "5", "--dir", str(tmp_path), "--json"]
    )  # fmt: skip
    out, err = capsys.readouterr()
    assert code == 0, out
    # Each request has a line, so that nobody waits without one.
    assert [line.split(" requests")[0] for line in err.splitlines()[-8:]] == [
        f"{number} of 8" for number in range(1, 9)
    ]
    assert "round 1 of 1, handed over; " in err
    result = json.loads(out)
    assert result["faults"] == []
    assert result["engines"] == ["2 ranks, blocks of 16", "1 rank, blocks of 64"]
    # Whole chunks, cut to the decoder's blocks.
    assert result["moved_tokens"] == result["prompt_tokens"] // 32 * 32 // 64 * 64 > 256
    assert result["moved_bytes"] > 0


def test_the_sums_of_a_server_are_those_of_all_its_engines_and_of_peers_alone():
    text = (
        'vllm:kvferry_hit_tokens_total{engine="0",tier="peer"} 64.0\n'
        'vllm:kvferry_hit_tokens_total{engine="1",tier="peer"} 32.0\n'
        'vllm:kvferry_hit_tokens_total{engine="0",tier="memory"} 7.0\n'
        'vllm:kvferry_tier_read_bytes_total{engine="0",tier="peer"} 4096.0\n'
        'vllm:kvferry_promise_seconds_bucket{engine="0",le="1.0"} 3.0\n'
        'vllm:kvferry_promise_seconds_sum{engine="0"} 0.5\n'
        'vllm:time_to_first_token_seconds_sum{engine="0",model_name="demo"} 1.25\n'
    )
    with served(says(text.encode())) as url:
        found = Server(url.removesuffix("/metrics")).sums()
    assert found == {"moved_tokens": 96.0, "moved_bytes": 4096.0, "moved_s": 0.5, "ttft_s": 1.25}


def test_a_handover_that_moves_too_little_or_changes_an_answer_is_a_fault():
    right = Round(
        figures={"moved_tokens": 64.0}, expected_tokens=64, same_answer=True, logprob_diff=1e-6
    )

    def faults(**changed):
        rounds = [right, replace(right, **changed)]
        engines = ("one", "other")
        return Result(model="m", engines=engines, peer="p", rounds=rounds).faults()

    assert faults() == []
    assert faults(figures={"moved_tokens": 32.0}) == ["32 tokens came over instead of 64"]
    assert faults(same_answer=False) == ["an answer changed"]
    assert faults(logprob_diff=float("nan")) == ["log-probabilities differ by nan"]


def test_the_table_of_a_run_ends_in_its_verdict():
    figures = {"moved_tokens": 64.0, "moved_bytes": 4e6, "moved_s": 2e-3, "prompt_tokens": 70.0}
    figures |= dict.fromkeys(("prefill_s", "ttft_s", "local_ttft_s", "computed_ttft_s"), 0.25)
    right = Round(figures=figures, expected_tokens=64, same_answer=True, logprob_diff=1e-6)

    def shown(*rounds):
        return lines(Result(model="m", engines=("one", "other"), peer="p", rounds=rounds))

    assert "2.00 GB/s from p" in "\n".join(shown(right))
    assert shown(right)[-1].startswith("Right: ")
    assert shown(right, replace(right, same_answer=False))[-1] == "Wrong: an answer changed."


def test_ctrl_c_is_one_line(capsys, monkeypatch):
    def interrupted(_given):
        raise KeyboardInterrupt

    monkeypatch.setattr("examples.cpu.disaggregated.run", interrupted)
    assert main([]) == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model-dir", "/etc"], "/etc is not a model directory"),
        (["--model-dir", "/etc", "--proxy", "/etc/hosts"], "--engine vllm"),
        (["--model-dir", "/etc", "--engine", "vllm"], "no vLLM"),
    ],
)
def test_what_cannot_be_meant_is_one_line(arguments, says, capsys):
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert says in capsys.readouterr().err.splitlines()[-1]
