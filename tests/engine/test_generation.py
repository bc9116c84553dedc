"""Text of a growing list of tokens."""

from __future__ import annotations

from kvferry.engine.generation import Detokenizer


class ByteTokenizer:
    """One token per byte of UTF-8; 0 is special."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=False):
        assert skip_special_tokens
        return bytes(token_id for token_id in token_ids if token_id).decode(errors="replace")


def pieces(token_ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(ByteTokenizer())
    last = len(token_ids) - 1
    return [detokenizer.add(t, is_last=index == last) for index, t in enumerate(token_ids)]


def test_pieces_join_to_the_text():
    text = "a naïve €5 coffee ☕ is 🦀"
    assert "".join(pieces(list(text.encode()))) == text


def test_an_unfinished_character_waits_for_its_last_byte():
    assert pieces(list("€a".encode())) == ["", "", "€", "a"]


def test_special_tokens_add_nothing_and_lose_nothing():
    assert pieces([97, 0, 0, 98]) == ["a", "", "", "b"]


def test_an_unfinished_character_at_the_end_is_shown_as_such():
    assert pieces(list("a€".encode())[:-1]) == ["a", "", "\ufffd"]
