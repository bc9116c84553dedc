"""A client and a server, and all that either may meet at the other end."""

from __future__ import annotations

import errno
import random
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from functools import partial

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.errors import ConfigError, StoreError
from kvferry.network import addresses_of
from kvferry.testing.stores.hooks import run_together, wait_until
from kvferry.transfer import server as server_module
from kvferry.transfer.auth import SharedKey, user_key
from kvferry.transfer.base import Bounds, KeyState
from kvferry.transfer.client import PeerClient
from kvferry.transfer.messages import (
    GREETINGS,
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    MAX_KEYS,
    MAX_RANGES,
    QUESTIONS,
    VERSION,
    AskKeys,
    Challenge,
    Frames,
    Hello,
    KeyStates,
    Lent,
    Read,
    Refused,
    Welcome,
    encode,
)
from kvferry.transfer.server import Listen, PeerServer
from tests.transfer.lending import KEY, PATIENCE_SECONDS, SPACE, DictLender, Raw, soon

A, B, C = (letter * 32 for letter in (b"a", b"b", b"c"))
LATE = "no answer in time"
RECORD_BYTES = 300_007
RECORD = random.Random(1).randbytes(RECORD_BYTES)
LARGE = bytes(48 << 20)
"""More than the buffers of a connection take."""


def read(client, key=A, num_bytes=RECORD_BYTES, deadline=None):
    buffer = memoryview(bytearray(num_bytes))
    state, size = client.read(key, [(0, buffer)], deadline or soon())
    return state, size, bytes(buffer)


@pytest.fixture
def lender():
    return DictLender({A: RECORD})


@pytest.fixture
def server(serve):
    return serve()


# -- what is asked, and answered ----------------------------------------------------------------


def test_what_is_held_pending_and_absent(server, connect, lender):
    lender.records[B] = KeyState.PENDING
    client = connect(server)
    held = [KeyState.HELD, KeyState.PENDING, KeyState.ABSENT]
    assert client.states_of([A, B, C], soon()) == held
    assert client.states_of([A, B, C] * MAX_KEYS, soon()) == held * MAX_KEYS
    assert client.states_of([], soon()) == []
    assert read(client) == (KeyState.HELD, len(RECORD), RECORD)
    for key, state in ((B, KeyState.PENDING), (C, KeyState.ABSENT)):
        assert read(client, key, 9) == (state, 0, bytes(9))


def test_ranges_go_into_the_buffers_that_are_given(server, connect):
    client = connect(server)
    chance = random.Random(2)
    places = [(chance.randrange(len(RECORD)), chance.randrange(900)) for _ in range(MAX_RANGES - 2)]
    places += [(len(RECORD) - 3, 10), (2**40, 5)]
    buffers = [bytearray(b"?" * length) for _, length in places]
    ranges = [
        (offset, memoryview(buffer)) for (offset, _), buffer in zip(places, buffers, strict=True)
    ]
    assert client.read(A, ranges, soon()) == (KeyState.HELD, len(RECORD))
    for (offset, length), buffer in zip(places, buffers, strict=True):
        part = RECORD[offset : offset + length]
        assert buffer == part + b"?" * (length - len(part))
    with pytest.raises(StoreError, match="ranges"):
        client.read(A, ranges[:1] * (MAX_RANGES + 1), soon())


def test_several_threads_have_a_connection_each(server, connect, lender):
    client = connect(server)
    lender.gate.clear()
    found = []
    threads = [threading.Thread(target=lambda: found.append(read(client))) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: lender.num_lent == 4, "all four read")
    assert server.num_connections == 4
    lender.gate.set()
    for thread in threads:
        thread.join()
    assert found == [(KeyState.HELD, len(RECORD), RECORD)] * 4
    read(client)
    assert server.num_connections == 4


def test_a_server_that_starts_again_is_another_one(serve, connect):
    first = serve()
    client = connect(first)
    read(client)
    assert client.incarnation == first.incarnation
    first.close()
    with pytest.raises(StoreError):
        read(client)
    again = serve(first.address[1])
    assert read(client) == (KeyState.HELD, len(RECORD), RECORD)
    assert client.incarnation == again.incarnation != first.incarnation


# -- who is refused -----------------------------------------------------------------------------

ASKED = encode(AskKeys(1, (A,)))
NO_PROTOCOL = "it does not speak the protocol of peers"


def assert_refused(counters, caplog, count, *reasons):
    """So many were refused and counted, with one line in the log for each reason."""
    assert counters["peer_refused"] == count
    assert caplog.messages == [
        f"a peer is refused: {reason}; this is logged once" for reason in reasons
    ]


def test_another_key_namespace_or_version_is_refused_counted_and_logged_once(
    server, connect, raw, caplog, counters
):
    for client in (connect(server, key=SharedKey(b"x" * 32)) for _ in range(2)):
        with pytest.raises(StoreError, match="the keys are different"):
            read(client)
    for client in (connect(server, namespace=b"o" * 32) for _ in range(2)):
        with pytest.raises(StoreError, match="another model, configuration or tenant"):
            read(client)
    assert raw(server).hello(version=VERSION + 1) == Refused(
        "only version 1 is spoken here", "protocol"
    )
    wait_until(lambda: counters["peer_refused"] == 5, "all are counted")
    assert len(caplog.messages) == 3
    assert read(connect(server))[2] == RECORD


def test_a_proof_of_another_connection_proves_nothing(server, raw, caplog, counters):
    first = raw(server)
    assert isinstance(first.hello(), Welcome)
    heard = first.challenge.nonce
    proof = KEY.proof("client", first.challenge.incarnation, heard, b"c" * 32, SPACE)
    for second in (raw(server), raw(server)):
        assert heard != second.challenge.nonce
        second.stream.send(Hello(VERSION, SPACE, b"c" * 32, proof), soon())
        assert second.is_ended()
    assert_refused(counters, caplog, 2, "the keys are different")


def test_nothing_is_answered_before_a_proof(server, raw, caplog, counters):
    for question in (AskKeys(1, (A,)), Read(1, A, ((0, 9),), 1000), Welcome(b"w" * 32)):
        connection = raw(server)
        connection.stream.send(question, soon())
        assert connection.is_ended()
    assert_refused(counters, caplog, 3, NO_PROTOCOL, "it does not say who it is")


def test_a_namespace_that_changes_ends_connections(key_file, lender):
    spaces = [SPACE]
    with PeerServer(lender, lambda: spaces[-1], Listen(key_file=key_file)) as server:
        client = PeerClient(*server.address, SPACE, KEY)
        read(client)
        spaces.append(b"next" * 8)
        with pytest.raises(StoreError, match="another model"):
            read(client)
        client.close()


@pytest.mark.parametrize(
    "sent",
    [
        ASKED,
        b"\xff\xff\xff\x7f" + b"x" * 100,
        b"\0\0\0\0",
        b"\x05\0\0\0nopes",
        b"GET / HTTP/1.1\r\n\r\n",
        (1 << 16).to_bytes(4, "little") + b"\xc1" * (1 << 16),
        encode(Challenge(1, b"i" * 16, b"n" * 32)),
        encode(Lent(1, b"i" * 16, 2, 9)),
    ],
    ids=["replayed", "oversized", "empty", "garbage", "http", "none", "greeting", "answer"],
)
def test_what_is_no_question_ends_the_connection_alone(
    server, connect, raw, caplog, sent, counters
):
    client = connect(server)
    read(client)
    for connection in (raw(server), raw(server)):
        connection.hello()
        assert isinstance(connection.ask(AskKeys(1, (A,))), KeyStates)
        connection.socket.sendall(sent)
        assert connection.is_ended()
    assert read(client)[2] == RECORD
    wait_until(lambda: server.num_connections == 1, "their threads end")
    reason = "a question that was asked before" if sent == ASKED else NO_PROTOCOL
    assert_refused(counters, caplog, 2, reason)


BODIES = st.one_of(
    st.binary(max_size=90),
    st.builds(
        lambda *items: msgspec.msgpack.encode(items),
        st.integers(0, 12),
        st.integers(-1, 2**63),
        st.one_of(st.just(A), st.binary(max_size=33), st.lists(st.just(A), max_size=3)),
        st.lists(st.tuples(st.integers(-1, 2**63), st.integers(-1, 2**63)), max_size=3),
        st.integers(-1, 2**63),
    ),
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bodies=st.lists(BODIES, min_size=1, max_size=4), length=st.integers(-2, 2))
def test_whatever_a_peer_sends_others_are_served(server, connect, lender, bodies, length):
    connection = Raw(server)
    connection.hello()
    with suppress(OSError):  # it is ended before all is sent
        for body in bodies:
            size = max(0, len(body) + length)
            connection.socket.sendall(size.to_bytes(4, "little") + body)
        connection.socket.shutdown(socket.SHUT_WR)
    assert connection.is_ended()
    connection.close()
    client = connect(server)
    assert read(client)[2] == RECORD
    client.close()
    wait_until(lambda: lender.num_lent == 0, "the loans are back")


def test_two_refusals_at_once_are_logged_once(server, caplog, counters):
    class Slow(set):
        """While one thread looks, another may look, too."""

        def __contains__(self, reason):
            found = super().__contains__(reason)
            with suppress(threading.BrokenBarrierError):
                together.wait(0.2)
            return found

    together = threading.Barrier(2)
    server._said = Slow()
    run_together(*[lambda: server._say("a reason")] * 2)
    assert_refused(counters, caplog, 0, "a reason")


def test_versions_without_end_leave_room_for_other_reasons_in_the_log(server, connect, raw, caplog):
    for version in range(2, 40):
        raw(server).hello(version=version)
    with pytest.raises(StoreError):
        read(connect(server, key=SharedKey(b"x" * 32)))
    wait_until(lambda: server.num_connections == 0, "all are refused")
    assert len(caplog.messages) == 2


def test_a_truncated_question_ends_with_its_time(serve, raw):
    server = serve(bounds=Bounds(idle_seconds=0.2, handshake_seconds=0.2))
    silent, half, idle = raw(server), raw(server), raw(server)
    half.socket.sendall(encode(Hello(1, SPACE, A, A))[:50])
    for connection in (silent, half):
        assert connection.is_ended()
    assert idle.is_ended()


def test_more_than_a_read_may_have_is_refused(server, raw, lender, caplog, counters):
    lender.records[A] = LARGE
    reason = "a read of more than 2147483648 bytes"
    for connection in (raw(server), raw(server)):
        connection.hello()
        assert connection.ask(Read(1, A, ((0, len(LARGE)),) * 50, 60_000)) == Refused(
            reason, "unusable"
        )
        assert connection.is_ended()
    assert_refused(counters, caplog, 2, reason)


def test_one_connection_too_many_is_closed(serve, connect, counters):
    server = serve(bounds=Bounds(max_connections=1))
    first = connect(server)
    read(first)
    with pytest.raises(StoreError):
        read(connect(server))
    wait_until(lambda: counters["peer_refused"] == 1, "it is counted")
    assert read(first)[2] == RECORD


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("can't start new thread"),
        OSError(errno.EMFILE, "Too many open files"),
        ConnectionAbortedError("the client has gone"),
        ValueError("a fault of ours"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize(
    "place",
    [
        (socket.socket, "accept"),
        (server_module, "_Client"),
        (PeerServer, "_has_place"),
        (threading.Thread, "start"),
    ],
    ids=lambda place: place[1],
)
def test_whatever_befalls_one_connection_others_are_heard(
    server, connect, monkeypatch, caplog, place, error
):
    work, befallen = getattr(*place), []

    def fail_once(*args, **options):
        if threading.current_thread() is not server._thread or befallen:
            return work(*args, **options)
        befallen.append(error)
        raise error

    monkeypatch.setattr(*place, fail_once)
    with socket.create_connection(server.address, PATIENCE_SECONDS) as stream:
        with suppress(ConnectionResetError):
            stream.recv(1)  # is heard or closed; one that is not accepted is heard next
        assert befallen == [error]
        assert read(connect(server))[2] == RECORD
    wait_until(lambda: server.num_connections == 1, "those that have gone hold no place")
    assert "a peer is refused" in caplog.text


# -- readers that are slow, or go ---------------------------------------------------------------


def test_a_reader_that_goes_or_does_not_read_gives_its_loan_back(
    server, serve, connect, raw, lender, counters
):
    """What runs out before its reader has all is counted."""
    lender.records[A] = LARGE
    assert connect(server).states_of([A], float("inf"))  # lent for no time, and not read
    gone = raw(server)
    gone.hello()
    gone.ask(Read(1, A, ((0, len(LARGE)),), 60_000))
    assert lender.num_lent == 1
    gone.close()
    wait_until(lambda: lender.num_lent == 0, "the loan is back")
    assert counters["peer_overdue_loans"] == 0

    def is_left(server, milliseconds) -> bool:
        """Whether a loan ran out: on a busy machine, its time may be over before it begins."""
        before, slow = counters["peer_overdue_loans"], raw(server)
        slow.hello()
        with suppress(StoreError, OSError):
            slow.ask(Read(1, A, ((0, len(LARGE)),), milliseconds))
        wait_until(lambda: lender.num_lent == 0, "the loan is back")
        assert slow.is_ended()
        return counters["peer_overdue_loans"] == before + 1

    short = serve(bounds=Bounds(answer_seconds=0.2))
    wait_until(lambda: is_left(server, 200), "it is left at its own deadline")
    wait_until(lambda: is_left(short, 2**62), "it is left at the server's")


def test_bytes_on_their_way_are_bounded(serve, connect, raw, lender):
    lender.records |= {A: LARGE, B: RECORD}
    server = serve(bounds=Bounds(max_bytes=len(LARGE)))
    slow, client = raw(server), connect(server)
    slow.hello()
    slow.ask(Read(1, A, ((0, len(LARGE)),), 60_000))
    with pytest.raises(StoreError):
        read(client, B, deadline=soon(0.3))
    assert client.states_of([B], soon()) == [KeyState.HELD]
    slow.close()
    assert read(client, B) == (KeyState.HELD, len(RECORD), RECORD)


def test_a_close_ends_answers_that_are_under_way(serve, raw, lender):
    lender.records[A] = LARGE
    server = serve(bounds=Bounds(close_seconds=20.0))
    sending, idle, greeting = raw(server), raw(server), raw(server)
    for connection in (sending, idle):
        connection.hello()
    sending.ask(Read(1, A, ((0, len(LARGE)),), 60_000))
    started = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - started < 15
    assert server.num_connections == 0
    for connection in (sending, idle, greeting):
        assert connection.is_ended()


# -- servers that are none, or lie --------------------------------------------------------------


@contextmanager
def lying(*answers, incarnation=b"i" * 16, version=VERSION, key=KEY):
    """A server that greets as one should, and then answers each question with the next of these:
    a message, bytes, or a function of the question."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def serve():
        with suppress(StoreError, OSError):
            accepted, _ = listener.accept()
            with closing(Frames(accepted)) as stream:
                stream.send(Challenge(version, incarnation, b"n" * 32), soon())
                hello = stream.receive(GREETINGS, MAX_GREETING_BYTES, soon())
                said = (incarnation, b"n" * 32, hello.nonce, hello.namespace)
                stream.send(Welcome(key.proof("server", *said)), soon())
                for answer in answers:
                    question = stream.receive(QUESTIONS, MAX_FRAME_BYTES, soon())
                    made = answer(question) if callable(answer) else answer
                    accepted.sendall(made if isinstance(made, bytes) else encode(made))
                ended.wait(60)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    client = PeerClient("127.0.0.1", listener.getsockname()[1], SPACE, KEY)
    try:
        yield client
    finally:
        ended.set()
        client.close()
        listener.shutdown(socket.SHUT_RDWR)  # ends a wait for a client that never came
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


def test_a_server_that_does_not_prove_itself_is_left():
    with lying(key=SharedKey(b"x" * 32)) as client, pytest.raises(StoreError, match="its key is"):
        read(client)
    with lying(version=2) as client, pytest.raises(StoreError, match="it speaks version 2, not 1"):
        read(client)


@pytest.mark.parametrize(
    "answer",
    [
        lambda asked: Lent(asked.number + 1, b"i" * 16, 2, 9),
        lambda asked: Lent(asked.number, b"j" * 16, 2, 9),
        lambda asked: Lent(asked.number, b"i" * 16, 3, 9),
        lambda asked: KeyStates(asked.number, b"i" * 16, b"\2"),
        Refused("\x1b[31m no"),
        AskKeys(1, ()),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\0" * 64,
        b"\x05\0\0\0hello",
    ],
)
def test_an_answer_that_is_none_is_one_error(answer):
    with lying(answer) as client, pytest.raises(StoreError) as caught:
        read(client)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("states", [b"", b"\2\2", b"\3"])
def test_states_of_other_keys_are_none(states):
    def answer(asked):
        return KeyStates(asked.number, b"i" * 16, states)

    with lying(answer) as client, pytest.raises(StoreError, match="makes no sense"):
        client.states_of([A], soon())


@pytest.mark.parametrize("size", [0, 5, 2**62])
def test_no_more_is_read_than_there_is_room_for(size):
    def answer(asked):
        return encode(Lent(asked.number, b"i" * 16, 2, size)) + b"x" * min(size, 9)

    with lying(answer) as client:
        buffer = bytearray(b"?" * 20)
        view = memoryview(buffer)
        assert client.read(A, [(0, view[:9])], soon()) == (KeyState.HELD, size)
    assert bytes(buffer) == (b"x" * min(size, 9)).ljust(20, b"?")


def test_a_flood_behind_the_answer_is_not_the_next_one():
    def flood(asked):
        return encode(Lent(asked.number, b"i" * 16, 2, 9)) + b"x" * 100_000

    with lying(flood) as client:
        assert read(client, num_bytes=9)[2] == b"x" * 9
        with pytest.raises(StoreError):  # by a new connection, which is not accepted
            read(client, num_bytes=9, deadline=soon(0.5))


@pytest.mark.parametrize(
    "answers",
    [[], [b""], [b"\x10"], [encode(Lent(1, b"i" * 16, 2, 1000))]],
    ids=["no answer", "nothing", "a part of a frame", "no bytes of the record"],
)
def test_a_server_that_falls_silent_ends_with_the_deadline(answers):
    with lying(*answers) as client:
        started = time.monotonic()
        with pytest.raises(StoreError, match=LATE):
            read(client, num_bytes=1000, deadline=started + 0.3)
        assert 0.25 < time.monotonic() - started < 20


def test_a_server_that_sends_byte_by_byte_ends_with_the_deadline():
    ended = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def dribble():
        with suppress(OSError), listener.accept()[0] as accepted:
            for byte in encode(Challenge(1, b"i" * 16, b"n" * 32)):
                accepted.send(bytes([byte]))
                if ended.wait(0.05):
                    return

    thread = threading.Thread(target=dribble, daemon=True)
    thread.start()
    client = PeerClient("127.0.0.1", listener.getsockname()[1], SPACE, KEY)
    started = time.monotonic()
    with pytest.raises(StoreError, match=LATE):
        client.states_of([A], started + 0.5)
    assert time.monotonic() - started < 20
    ended.set()
    listener.shutdown(socket.SHUT_RDWR)  # ends a wait for a client that came too late
    thread.join(30)
    assert not thread.is_alive()
    listener.close()


def test_a_server_that_accepts_no_one_ends_with_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = PeerClient("127.0.0.1", listener.getsockname()[1], SPACE, KEY)
        with pytest.raises(StoreError, match=LATE):
            client.states_of([A], soon(0.3))


def test_a_close_ends_calls_that_are_under_way():
    with lying() as client:
        errors = []

        def call():
            try:
                client.states_of([A], soon(60))
            except StoreError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        wait_until(lambda: client.incarnation != b"", "it is connected")
        client.close()
        thread.join(30)
        assert not thread.is_alive()
        assert len(errors) == 1
        with pytest.raises(StoreError, match="closed"):
            client.states_of([A], soon())


def test_a_close_ends_a_call_that_connects_again(server, connect, monkeypatch):
    """Its idle connection was not quiet: the close ended it, and cannot end the next one."""
    client = connect(server)
    client.states_of([A], soon())
    (idle,) = client._idle
    monkeypatch.setattr(idle, "is_quiet", client.close)
    monkeypatch.setattr(client, "_log_in", lambda *_: pytest.fail("it goes on"))
    with pytest.raises(StoreError, match="it is closed"):
        client.states_of([A], soon())


def test_a_close_ends_a_connection_that_has_just_got_its_place(serve, monkeypatch):
    server = serve(bounds=Bounds(handshake_seconds=600))
    closing = threading.Thread(target=server.close)
    has_place = server._has_place

    def closes_then():
        found = has_place()
        closing.start()
        wait_until(lambda: server._closed, "it closes")
        return found

    monkeypatch.setattr(server, "_has_place", closes_then)
    with socket.create_connection(server.address, 30) as stream, suppress(ConnectionResetError):
        while stream.recv(100):
            pass
    closing.join(30)
    assert not closing.is_alive()


def test_an_address_that_cannot_be_reached_is_one_error():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for host in ("127.0.0.1", "no.such.host.invalid", "x" * 70 + ".invalid", "\N{SNOWMAN}" * 70):
        with pytest.raises(StoreError):
            PeerClient(host, port, SPACE, KEY).states_of([A], soon())


def test_a_deadline_that_has_passed_asks_nothing(server, connect):
    with pytest.raises(StoreError, match=LATE):
        connect(server).states_of([A], time.monotonic() - 1)
    assert server.num_connections == 0


# -- where it listens ---------------------------------------------------------------------------


def test_a_port_in_use_is_refused(serve, key_file):
    port = serve().address[1]
    with pytest.raises(ConfigError, match=f"cannot be served at 127.0.0.1:{port}: .*in use"):
        PeerServer(DictLender(), lambda: SPACE, Listen(port=port, key_file=key_file))


@pytest.mark.parametrize(
    "place",
    [
        {"host": "no.such.host.invalid"},
        {"host": "192.0.2.1"},
        {"host": ""},
        {"port": 70_000},
        {"advertise": "host:0"},
        {"advertise": "host:99999"},
        {"advertise": "a b"},
        {"advertise": "fe80::1%1"},
        {"advertise": "[fe80::1%1]:7100"},
    ],
)
def test_an_address_that_is_none_of_this_machine_is_refused(key_file, place):
    with pytest.raises(ConfigError):
        PeerServer(DictLender(), lambda: SPACE, Listen(**place, key_file=key_file))


@pytest.mark.parametrize("scope", ["", *map("%{}".format, socket.if_nameindex()[0])])
def test_the_address_of_a_host_keeps_the_scope_that_it_has_on_this_machine(monkeypatch, scope):
    """A file of hosts may hold one, and a resolver of the link."""
    look_up = partial(socket.getaddrinfo, type=socket.SOCK_STREAM)
    (expected,) = look_up(f"fe80::1{scope}", None)
    with monkeypatch.context() as named:
        named.setattr(socket, "getaddrinfo", lambda *_, **_options: [expected])
        (found,) = addresses_of("node-b.local", PATIENCE_SECONDS)
    assert look_up(found, None) == [expected]


@given(
    st.one_of(
        st.text(max_size=40),
        st.from_regex(r"[a-z0-9.\[\]:%-]{0,20}:[0-9]{0,6}(\?[a-z_]{1,9}=.{0,9}(&|=)?){0,2}"),
    )
)
def test_any_text_is_a_place_to_listen_or_one_error(text):
    try:
        listen = Listen.parse(text)
    except ConfigError:
        return
    assert listen.host
    assert 0 <= listen.port < 1 << 16


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "worker-1", "localhost.evil.org"])
def test_an_address_beyond_this_machine_needs_a_key(host):
    with pytest.raises(ConfigError, match="no key is given"):
        PeerServer(DictLender(), lambda: SPACE, Listen(host=host))


def test_processes_of_one_user_need_no_key(tmp_path, monkeypatch, lender):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with PeerServer(lender, lambda: SPACE) as server:
        client = PeerClient(*server.address, SPACE, user_key())
        assert read(client)[2] == RECORD
        client.close()


@pytest.mark.parametrize(
    ("advertise", "expected"),
    [
        ("", ("127.0.0.1", None)),
        ("pod-7", ("pod-7", None)),
        ("pod-7:9000", ("pod-7", 9000)),
        ("fd00::7", ("fd00::7", None)),
        ("[fd00::7]:9000", ("fd00::7", 9000)),
    ],
)
def test_others_connect_to_what_is_advertised(key_file, advertise, expected):
    listen = Listen(advertise=advertise, key_file=key_file)
    with PeerServer(DictLender(), lambda: SPACE, listen) as server:
        host, port = expected
        assert server.address[0] == host
        assert server.address[1] == port or (port is None and server.address[1] > 0)


@pytest.mark.parametrize(
    ("place", "port", "address"),
    [
        ("127.0.0.1:7100", 7103, ("127.0.0.1", 7103)),
        ("127.0.0.1:65532", 65535, ("127.0.0.1", 65535)),
        ("[::1]:7100?advertise=pod-7", 7103, ("pod-7", 7103)),
        ("127.0.0.1:7100?advertise=[fd00::7]:9000", 7103, ("fd00::7", 9003)),
        ("127.0.0.1:0?advertise=pod-7:9000", 0, ("pod-7", 9003)),
        ("127.0.0.1:0?advertise=pod-7", 0, ("pod-7", 5)),
    ],
)
def test_each_engine_of_one_configuration_has_ports_of_its_own(place, port, address):
    listen = Listen.parse(place)
    assert listen.for_engine(0) == listen
    fourth = listen.for_engine(3)
    assert fourth.port == port
    assert fourth.address_of(port or 5) == address


@pytest.mark.parametrize("place", ["h:65533", "h:7100?advertise=pod-7:65533"])
def test_an_index_that_leads_beyond_the_last_port_is_refused(place):
    expected = "port 65533 and data-parallel index 3 make 65536, and ports end at 65535"
    with pytest.raises(ConfigError, match=expected) as caught:
        Listen.parse(place).for_engine(3)
    assert "\n" not in str(caught.value)
