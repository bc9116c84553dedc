"""What looks for keys that a producer makes."""

from __future__ import annotations

import threading

from kvferry.errors import StoreError
from kvferry.observe import Observer
from kvferry.store.expected import MAX_PROMPTS, ExpectedKeys
from kvferry.store.servers.server_keys import ServerKeys
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores.hooks import make_key, wait_until


class Medium:
    """Keys appear when the test says so, and are known once they were looked for."""

    def __init__(self) -> None:
        self.there: set[bytes] = set()
        self.known: set[bytes] = set()
        self.looks: list[list[tuple[bytes, ...]]] = []

    def look(self, prompts):
        self.looks.append(list(prompts))
        self.known |= self.there & {key for keys in prompts for key in keys}

    def expected(self, clock) -> ExpectedKeys:
        return ExpectedKeys(lambda key: key in self.known, self.look, clock)


KEYS = [make_key(number) for number in range(3)]
OTHER = (make_key(3),)


def test_only_what_has_not_come_is_looked_for_and_then_nothing():
    medium, clock = Medium(), FakeClock()
    expected = medium.expected(clock)
    expected.add(KEYS, clock() + 60)
    medium.there.update(KEYS[:2])
    wait_until(lambda: [tuple(KEYS[2:])] in medium.looks, "the last key alone is looked for")
    medium.there.update(KEYS)
    wait_until(lambda: medium.known >= set(KEYS), "all are found")
    assert expected.awaits(KEYS[0]), "a key that came is not taken for one that never comes"
    num_looks = len(medium.looks)
    expected.add(KEYS, clock() + 60)
    expected.add(OTHER, clock() + 60)
    wait_until(lambda: len(medium.looks) > num_looks, "the other key is looked for")
    assert medium.looks[num_looks:] == [[OTHER]] * len(medium.looks[num_looks:])
    expected.close()


def test_the_time_of_a_key_is_over():
    medium, clock = Medium(), FakeClock()
    expected = medium.expected(clock)
    expected.add(KEYS, clock() + 60)
    expected.add(KEYS, clock() + 30)  # another request, with less patience
    clock.advance(59)
    assert expected.awaits(KEYS[0])
    clock.advance(2)
    assert not expected.awaits(KEYS[0])
    expected.add(OTHER, clock() + 60)
    wait_until(lambda: [OTHER] in medium.looks, "the other key alone is looked for")
    expected.close()


def test_the_rest_of_a_prompt_may_be_expected_for_longer():
    medium, clock = Medium(), FakeClock()
    expected = medium.expected(clock)
    expected.add(KEYS, clock() + 60)
    clock.advance(50)
    expected.add(KEYS[1:], clock() + 60)
    num_looks = len(medium.looks)
    wait_until(lambda: len(medium.looks) > num_looks + 1, "they are looked for")
    assert medium.looks[-1] == [tuple(KEYS[1:])], "once, although they were expected twice"
    clock.advance(50)
    assert list(map(expected.awaits, KEYS)) == [False, True, True]
    medium.there.update(KEYS)
    wait_until(lambda: medium.known >= set(KEYS[1:]), "they are found")
    expected.close()


def test_what_was_said_to_be_there_and_is_absent_is_not_awaited():
    """But what another request awaits, of a producer that has not begun, is."""
    expected = Medium().expected(clock := FakeClock())
    expected.add(KEYS[:1], clock() + 60)
    expected.add(KEYS, clock() + 60, final=True)
    assert expected.awaits(KEYS[1])
    expected.end(KEYS[:2])
    assert list(map(expected.awaits, KEYS)) == [True, False, True]
    expected.close()


def test_a_key_that_seemed_to_be_there_is_looked_for_again_or_no_more():
    medium, clock = Medium(), FakeClock()
    expected = medium.expected(clock)
    medium.known.update(KEYS[:2])
    expected.add(KEYS, clock() + 60)
    medium.known.clear()
    expected.again(KEYS[0])
    expected.again(OTHER[0])  # nobody awaits it
    wait_until(lambda: any((KEYS[0],) in look for look in medium.looks), "it is looked for")
    assert not any(OTHER in look for look in medium.looks)
    expected.gone(KEYS[0])
    expected.again(KEYS[0])
    assert list(map(expected.awaits, KEYS)) == [False, True, True]
    expected.close()


def test_a_server_that_does_not_answer_once_is_asked_again():
    clock, asked = FakeClock(), []

    def find(keys):
        asked.append(keys)
        if len(asked) < 3:
            raise StoreError("no answer in time")
        return [True] * len(keys)

    keys = ServerKeys(find, Observer(), learns=True, clock=clock)
    expected = ExpectedKeys(keys.contains, keys.ask, clock)
    expected.add(KEYS, clock() + 60)
    wait_until(lambda: len(asked) == 2, "it was asked twice")
    assert expected.awaits(KEYS[0])
    wait_until(lambda: all(map(keys.contains, KEYS)), "they have come")
    expected.close()
    keys.close()


def test_a_look_that_fails_unexpectedly_ends_no_later_ones():
    medium, clock, failed = Medium(), FakeClock(), threading.Event()

    def look(prompts):
        if not failed.is_set():
            failed.set()
            raise RuntimeError("nobody expected this")
        medium.look(prompts)

    expected = ExpectedKeys(lambda key: key in medium.known, look, clock)
    expected.add(KEYS, clock() + 60)
    assert failed.wait(20)
    medium.there.update(KEYS)

    def has_come() -> bool:
        expected.add(OTHER, clock() + 60)  # as the next request would
        return medium.known >= set(KEYS)

    wait_until(has_come, "they are looked for again")
    expected.close()


def test_a_flood_of_prompts_has_a_bound():
    medium, clock = Medium(), FakeClock()
    expected = medium.expected(clock)
    for number in range(MAX_PROMPTS + 10):
        expected.add([make_key(number)], clock() + 60)
    assert expected.awaits(make_key(0))
    assert not expected.awaits(make_key(MAX_PROMPTS + 5))
    expected.close()


def test_closing_ends_the_thread():
    medium, clock = Medium(), FakeClock()
    expected = medium.expected(clock)
    expected.add(KEYS, clock() + 60)
    expected.close()
    expected.close()
    expected.add([make_key(9)], clock() + 60)
    assert not any(t.name.startswith("kvferry-expect") for t in threading.enumerate())
