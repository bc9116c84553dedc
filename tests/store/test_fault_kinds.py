"""The kind of each fault: told where the error is met, and the same at every door behind that."""

from __future__ import annotations

import errno
import pickle
import socket
import ssl
import threading
import time

import pytest

from kvferry.cache.build import _tier_gauges
from kvferry.errors import ConfigError, Fault, FaultKind, StoreError
from kvferry.network import Endpoint, Stream, fault_kind
from kvferry.observe import Counters, labelled
from kvferry.store.base import Put, PutResult
from kvferry.store.file.store import FileStore
from kvferry.store.kind import Opening
from kvferry.store.memory import MemoryStore
from kvferry.store.servers.remote import RemoteStore
from kvferry.store.tiers.health import Patience
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.clock import FakeClock
from kvferry.testing.faults import Gate
from kvferry.testing.stores import make_key
from kvferry.testing.stores.hooks import wait_until
from tests.store.errors import OF_FILES, OF_WRITES, UNFORESEEN, Odd, io
from tests.store.tiers.states import rest

__all__ = ["io"]

QUICK = Patience(look_seconds=0.01)


@pytest.fixture
def directory(tmp_path, io):
    with FileStore(tmp_path / "kv", background=False) as made:
        made.put(make_key(), [b"value"])
        yield made


def read(store):
    with pytest.raises(StoreError) as error:
        store.read(make_key(), [(0, memoryview(bytearray(5)))])
    return error.value.fault


def put(store):
    answer = store.put(make_key(1), [b"other"])
    assert not answer.is_there
    return answer.fault


CASES = {
    **{f"read {name}": ("preadv", read, *UNFORESEEN[name]) for name in UNFORESEEN},
    **{f"put {name}": ("pwritev", put, *UNFORESEEN[name]) for name in UNFORESEEN},
    **{f"open {name}": ("open", read, getattr(errno, name), OF_FILES[name]) for name in OF_FILES},
    **{f"put {name}": ("link", put, getattr(errno, name), OF_WRITES[name]) for name in OF_WRITES},
}


@pytest.mark.parametrize("case", CASES)
def test_an_error_that_a_directory_meets_has_its_kind(directory, io, case):
    call, operate, error, kind = CASES[case]
    io.fail[call] = error
    assert operate(directory).kind is kind


@pytest.mark.parametrize("name", UNFORESEEN)
@pytest.mark.parametrize(("call", "operate"), [("read", read), ("put", put)])
def test_whatever_a_client_raises_besides_its_own_error_is_a_bug(name, call, operate):
    odd = Odd()
    store = RemoteStore("odd://h", odd, Opening())
    store.put(make_key(), [b"value"])
    odd.method, odd.error = call, UNFORESEEN[name][0]
    assert operate(store).kind is FaultKind.BUG


@pytest.mark.parametrize("kind", FaultKind)
def test_what_a_client_says_goes_through_tiers_unchanged(kind):
    """Into the error of a read, the answer to a put, the tier's state and its metric."""

    class Saying(Odd):
        def read(self, name, ranges, deadline):
            raise StoreError(kind, "it says why")

        def put(self, name, buffers, deadline, *, replaces=False):
            raise StoreError(kind, "it says why")

    counts, clock = Counters(), FakeClock()
    remote = RemoteStore("odd://h", Saying(), Opening())
    with TieredStore([remote], counts, clock=clock, patience=QUICK) as store:
        assert read(store) == (kind, "it says why")
        (tier,) = store.tiers()
        assert tier.fault == (kind, "it says why")
        assert put(store) == (kind, "odd: it says why")
        wait_until(lambda: store.tiers()[0].state != "up", "the tier heard of it")
        rest(store)
        (tier,) = store.tiers()
        assert tier.because is not None
        assert tier.because.kind is kind
        assert put(store).kind is kind  # also of a put that is not tried
        assert store.accepts().kind is kind
        (since,) = [each for each in _tier_gauges(store, "worker") if each.startswith("tier_since")]
        assert labelled(since)[1][3] == kind


@pytest.mark.parametrize("kind", [each for each in FaultKind if each is not FaultKind.FULL])
def test_a_tier_that_is_read_and_not_written_to_says_why(kind):
    class Refusing(MemoryStore):
        def put(self, *args):
            return Put.failed(Fault(kind, "it says why"))

    with TieredStore([Refusing()], clock=FakeClock(), patience=QUICK) as store:
        assert put(store) == (kind, "memory: it says why")
        said = (kind, "a value could not be stored: it says why")
        wait_until(lambda: store.tiers()[0].because == said, "it was tried")
        assert store.tiers()[0].state == "refuses writes"
        assert store.accepts() == (kind, f"memory: refuses writes: {said[1]}")


NETWORK = {
    "no answer": (TimeoutError(), FaultKind.LATE),
    "ETIMEDOUT": (OSError(errno.ETIMEDOUT, "Connection timed out"), FaultKind.LATE),
    "refused": (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), FaultKind.AWAY),
    "reset": (ConnectionResetError("it closed the connection"), FaultKind.AWAY),
    "no name": (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), FaultKind.AWAY),
    "no route": (OSError(errno.EHOSTUNREACH, "No route to host"), FaultKind.AWAY),
    "TLS": (ssl.SSLError(1, "wrong version number"), FaultKind.PROTOCOL),
    "certificate": (ssl.SSLCertVerificationError("unknown"), FaultKind.PROTOCOL),
    "no more files": (OSError(errno.EMFILE, "Too many open files"), FaultKind.REFUSED),
    "a bug": (IndexError("a bug"), FaultKind.BUG),
    "ours": (StoreError(FaultKind.FULL, "full"), FaultKind.FULL),
    "a URL": (ConfigError("wrong"), FaultKind.UNUSABLE),
}


@pytest.mark.parametrize("case", NETWORK)
def test_an_error_of_a_connection_has_its_kind(case):
    error, kind = NETWORK[case]
    assert fault_kind(error) is kind


def test_a_server_that_hangs_up_before_a_word_speaks_another_protocol():
    """As one of TLS does at a client in clear. Later, it has gone away."""

    class Client(Endpoint):
        what = "server"

        def _log_in(self, connection, deadline):
            connection.read(1, deadline)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = Client("127.0.0.1", listener.getsockname()[1], None, Stream)
        for words, kind in ((b"", FaultKind.PROTOCOL), (b"x", FaultKind.AWAY)):

            def serve(words=words):
                accepted, _ = listener.accept()
                with accepted:
                    accepted.sendall(words)

            thread = threading.Thread(target=serve)
            thread.start()
            until = time.monotonic() + 30.0
            with pytest.raises(StoreError) as error, client.connection(until) as connection:
                connection.read(1, until)
            thread.join()
            assert error.value.fault.kind is kind
        client.close()


def test_of_several_tiers_each_says_why_and_the_nearest_has_the_kind():
    class Full(MemoryStore):
        def put(self, *args):
            return Put.failed(Fault(FaultKind.FULL, "it is full"))

    closed = MemoryStore("far")
    with TieredStore([Full(), closed], clock=FakeClock()) as store:
        closed.close()
        result, fault = store.put(make_key(), [b"value"])
    assert result is PutResult.NO_SPACE
    assert fault == (FaultKind.FULL, "memory: it is full; memory1: it is closed")


def test_every_put_has_the_reason_of_its_own_failure(directory, monkeypatch):
    """Two threads put at once, and each value fails for another reason."""
    kinds = {1: ("ENOSPC", FaultKind.FULL), 2: ("EACCES", FaultKind.RIGHTS)}
    gates = {number: Gate() for number in kinds}

    def fail(key, views):
        (number,) = (each for each in kinds if key == make_key(each))
        gates[number].pass_through()
        raise OSError(getattr(errno, kinds[number][0]), f"error {number}")

    monkeypatch.setattr(directory, "_write", fail)
    answers = {}
    threads = [
        threading.Thread(target=lambda n=n: answers.update({n: directory.put(make_key(n), [b"x"])}))
        for n in kinds
    ]
    for thread in threads:
        thread.start()
    for number in (2, 1):
        gates[number].release()
    for thread in threads:
        thread.join()
    for number, (_, kind) in kinds.items():
        fault = answers[number].fault
        assert fault.kind is kind
        assert fault.text.endswith(f"error {number}")


def test_a_fault_is_made_with_a_kind_and_crosses_processes():
    with pytest.raises(TypeError):
        StoreError("a text without a kind")
    error = pickle.loads(pickle.dumps(StoreError(FaultKind.LATE, "why")))
    assert (error.fault, str(error)) == (Fault(FaultKind.LATE, "why"), "why")
    wrong = pickle.loads(pickle.dumps(ConfigError("why", FaultKind.LOGIN)))
    assert (wrong.fault, str(wrong)) == (Fault(FaultKind.LOGIN, "why"), "why")
