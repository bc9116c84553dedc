"""The identity of a model as it runs."""

from __future__ import annotations

from kvferry.identity import identify


def make_identity(written, *, dtype="float32", deviations=None, name=None):
    return identify(
        bytes(32),
        written,
        dtype=dtype,
        deviations=deviations or {},
        weights_version=None,
        name=name,
    )


def test_the_dtype_that_runs_replaces_both_names_of_the_written_one():
    either = [{"torch_dtype": "bfloat16", "a": 1}, {"dtype": "bfloat16", "a": 1}, {"a": 1}]
    identities = [make_identity(written) for written in either]
    assert identities[0].config == {"a": 1, "dtype": "float32"}
    assert identities.count(identities[0]) == 3
    assert make_identity({"a": 1}, dtype="bfloat16") != identities[0]


def test_a_deviation_is_another_model_and_a_name_is_not():
    plain = make_identity({"a": 1})
    assert make_identity({"a": 1}, deviations={"overrides": {"a": 2}}) != plain
    assert make_identity({"a": 1}, name="mine") == plain
