"""Frames: what is said comes back, and anything else is one kind of error, at no cost."""

from __future__ import annotations

import resource

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import FaultKind, StoreError
from kvferry.transfer.messages import (
    GREETINGS,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    MAX_KEYS,
    MAX_RANGES,
    QUESTIONS,
    REPLIES,
    AskKeys,
    Challenge,
    Hello,
    KeyStates,
    Lent,
    Read,
    Refused,
    Welcome,
    decode,
    encode,
    part_lengths,
)
from kvferry.transfer.server import cut

DIGEST, INCARNATION = b"d" * 32, b"i" * 16
LARGEST = 2**62
MESSAGES = [
    (GREETINGS, Challenge(1, INCARNATION, DIGEST)),
    (GREETINGS, Hello(LARGEST, DIGEST, DIGEST, DIGEST)),
    (GREETINGS, Welcome(DIGEST)),
    (GREETINGS, Refused("x" * 200)),
    (QUESTIONS, AskKeys(LARGEST, (DIGEST,) * MAX_KEYS)),
    (QUESTIONS, Read(LARGEST, DIGEST, ((LARGEST, LARGEST),) * MAX_RANGES, LARGEST)),
    (REPLIES, KeyStates(LARGEST, INCARNATION, bytes(MAX_KEYS))),
    (REPLIES, Lent(LARGEST, INCARNATION, 255, LARGEST)),
]
DECODERS = [GREETINGS, QUESTIONS, REPLIES]


@pytest.mark.parametrize(("decoder", "message"), MESSAGES)
def test_the_largest_message_fits_its_frame_and_comes_back(decoder, message):
    frame = encode(message)
    limit = MAX_GREETING_BYTES if decoder is GREETINGS else MAX_FRAME_BYTES
    if not isinstance(message, Refused):
        assert len(frame) - 4 <= limit
    assert int.from_bytes(frame[:4], "little") == len(frame) - 4
    assert decode(decoder, frame[4:]) == message


@pytest.mark.parametrize(("decoder", "message"), MESSAGES)
def test_items_of_a_later_version_are_ignored(decoder, message):
    items = [*msgspec.msgpack.decode(encode(message)[4:]), "later"]
    assert decode(decoder, msgspec.msgpack.encode(items)) == message


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        ([3, "why"], FaultKind.REFUSED),  # of an earlier release
        ([3, "why", "login"], FaultKind.LOGIN),
        ([3, "why", "of a later release"], FaultKind.REFUSED),
    ],
)
@pytest.mark.parametrize("decoder", [GREETINGS, REPLIES])
def test_a_refusal_of_any_release_has_a_kind(decoder, sent, kind):
    message = decode(decoder, msgspec.msgpack.encode(sent))
    assert message.fault == (kind, "it refuses: why")


@pytest.mark.parametrize(
    ("decoder", "wrong"),
    [
        (GREETINGS, [1, 1, b"n" * 31, DIGEST, DIGEST]),
        (GREETINGS, [1, 1, b"n" * 33, DIGEST, DIGEST]),
        (GREETINGS, [1, -1, DIGEST, DIGEST, DIGEST]),
        (GREETINGS, [0, 1, b"i" * 15, DIGEST]),
        (GREETINGS, [3, "x" * 201]),
        (GREETINGS, [4, 1, [DIGEST]]),
        (QUESTIONS, [1, 1, DIGEST, DIGEST, DIGEST]),
        (QUESTIONS, [4, 1, [DIGEST] * (MAX_KEYS + 1)]),
        (QUESTIONS, [4, 1, [DIGEST[:-1]]]),
        (QUESTIONS, [4, 1.0, [DIGEST]]),
        (QUESTIONS, [6, 1, DIGEST, [[-1, 5]], 1]),
        (QUESTIONS, [6, 1, DIGEST, [[1, 2**62 + 1]], 1]),
        (QUESTIONS, [6, 1, DIGEST, [[1, 2, 3]], 1]),
        (QUESTIONS, [6, 1, DIGEST, [[1, 2]] * (MAX_RANGES + 1), 1]),
        (REPLIES, [7, 1, INCARNATION, bytes(MAX_KEYS + 1)]),
        (REPLIES, [9, 1, INCARNATION, 2, float("nan")]),
        (REPLIES, [9, 1, INCARNATION, 256, 1]),
        (REPLIES, [9, 1, INCARNATION, 2, -1]),
        (REPLIES, {"type": 9}),
        (REPLIES, None),
    ],
)
def test_a_field_out_of_bounds_is_refused(decoder, wrong):
    with pytest.raises(StoreError):
        decode(decoder, msgspec.msgpack.encode(wrong))


@pytest.mark.parametrize("decoder", DECODERS)
@given(body=st.binary(max_size=600))
def test_any_bytes_are_a_message_or_one_error(decoder, body):
    try:
        decode(decoder, body)
    except StoreError:
        return
    assert body


@given(data=st.data())
def test_a_changed_message_is_a_message_or_one_error(data):
    decoder, message = data.draw(st.sampled_from(MESSAGES))
    body = bytearray(encode(message)[4:])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 5))] = data.draw(st.binary(max_size=6))
    try:
        found = decode(decoder, bytes(body))
    except StoreError:
        return
    assert decode(decoder, encode(found)[4:]) == found


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff",
        b"\x93\x04\x01\xdd\xff\xff\xff\xff",
        b"\x95\x06\x01\xc4\x20" + DIGEST + b"\xdd\x7f\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 60_000,
        b"\x95\x06\x01\xc4\x20" + DIGEST + b"\x91" * 60_000,
    ],
)
def test_a_length_that_is_claimed_costs_nothing(decoder, body):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(StoreError):
        decode(decoder, body)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10


@given(
    sizes=st.lists(st.integers(0, 9), max_size=5),
    ranges=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=5),
)
def test_ranges_are_cut_from_pieces_as_from_the_whole(sizes, ranges):
    whole = bytes(range(sum(sizes)))
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    pieces = [
        memoryview(whole)[start : start + size] for start, size in zip(starts, sizes, strict=True)
    ]
    lengths = part_lengths(len(whole), ranges)
    for (offset, length), found in zip(ranges, lengths, strict=True):
        expected = whole[offset : offset + length]
        assert found == len(expected)
        assert b"".join(cut(pieces, offset, found)) == expected
