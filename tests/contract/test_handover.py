"""The parameters of proxies: what they say, and that nothing a client writes does any harm."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.contract.handover import read_handover, write_handover
from kvferry.types import Handover, KVSource, ProducerStamp

STAMP = ProducerStamp(version=1, namespace="0123456789abcdef", num_chunks=3, last_key=b"k" * 32)


def answer(stamp: ProducerStamp = STAMP, *, is_prefill: bool = True, address=None):
    return write_handover(
        stamp, is_prefill=is_prefill, engine_id="e", request_id="r", num_tokens=40, num_groups=2,
        tp_size=2, address=address,
    )  # fmt: skip


TOY_PROXY = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""What vLLM's toy_proxy_server.py sends to the engine that prefills."""


def test_a_prefill_is_asked_for():
    assert read_handover(TOY_PROXY) == Handover(gives=True, answers=True)


def test_an_answer_is_read_by_the_next_engine():
    expected = KVSource(waits=True, num_tokens=40, stamp=STAMP)
    assert read_handover(answer()) == Handover(source=expected)
    at_peer = KVSource(waits=True, num_tokens=40, stamp=STAMP, host="::1", port=7)
    assert read_handover(answer(address=("::1", 7))) == Handover(source=at_peer)
    turn = read_handover(answer(is_prefill=False))
    assert turn == Handover(gives=True, answers=True, source=expected)


def test_an_answer_without_chunks_is_read():
    empty = ProducerStamp(version=1, namespace=STAMP.namespace)
    assert read_handover(answer(empty)).source.stamp == empty


def test_a_proxy_may_replace_the_address():
    edited = {**answer(), "remote_host": "10.0.0.7", "remote_port": 8100}
    source = read_handover(edited).source
    assert (source.host, source.port, source.stamp) == ("10.0.0.7", 8100, STAMP)


def test_the_dialect_of_offloading_tiers():
    peer = {"kv_request_id": "r", "remote_host": "p", "remote_port": 7777}
    assert read_handover({"remote_decoder": {"kv_request_id": "r"}}) == Handover(gives=True)
    waits = Handover(source=KVSource(waits=True, host="p", port=7777))
    assert read_handover({"remote_prefiller": peer}) == waits
    takes = read_handover({"remote_kv_source": peer})
    assert takes.source == KVSource(waits=False, host="p", port=7777)
    assert read_handover({"remote_prefiller": peer, "remote_kv_source": peer}) == waits


@pytest.mark.parametrize(
    ("block_ids", "has_blocks"),
    [(None, False), ([], False), ([[], []], False), ([[1]], True), ([1], True), ("abc", True)],
)
def test_blocks_are_of_another_kind_of_engine(block_ids, has_blocks):
    params = {"do_remote_prefill": True, "remote_block_ids": block_ids}
    assert read_handover(params).source.has_blocks is has_blocks


WRONG_STAMPS = [
    None, "stamp", [], {}, {"v": "1"}, {"v": True}, {"v": 1.0}, {"v": 1},
    *({**answer()["kvferry"], **wrong} for wrong in (
        {"namespace": "0123456789ABCDEF"}, {"namespace": "0123456789abcdef\n"}, {"namespace": 1},
        {"chunks": -1}, {"chunks": "3"}, {"chunks": True}, {"chunks": 1 << 40}, {"chunks": 0},
        {"key": None}, {"key": "ab"}, {"key": "x" * 64}, {"key": ["a"] * 64},
        {"key": "a" * 64 + "\n"},
    )),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_STAMPS)
def test_a_wrong_stamp_is_of_no_version(wrong):
    source = read_handover({**answer(), "kvferry": wrong}).source
    assert source.stamp == ProducerStamp(version=0)


def test_of_another_version_nothing_else_is_read():
    source = read_handover({**answer(), "kvferry": {"v": 2, "anything": []}}).source
    assert source.stamp == ProducerStamp(version=2)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
FIELDS = [*answer(), "remote_prefiller", "remote_decoder", "remote_kv_source", "transfer_id"]
STAMPS = st.dictionaries(st.sampled_from(["v", "namespace", "chunks", "key"]), ANYTHING)
ANY_PARAMS = st.dictionaries(st.sampled_from(FIELDS), ANYTHING) | st.builds(
    lambda changed, stamp: {**answer(), **changed, "kvferry": stamp},
    st.dictionaries(st.sampled_from(FIELDS), ANYTHING | st.just(True)),
    STAMPS,
)


@given(params=ANY_PARAMS | ANYTHING)
def test_whatever_a_client_writes_is_read_and_left_as_it_is(params):
    before = copy.deepcopy(params)
    found = read_handover(params)
    assert found is None or isinstance(found, Handover)
    assert repr(params) == repr(before)
