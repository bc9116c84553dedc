"""`ObjectClient` against a real S3 server: SeaweedFS."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import pytest
from obstore.exceptions import GenericError

from kvferry.errors import ConfigError, FaultKind, StoreError
from kvferry.store.base import PutResult
from kvferry.store.kind import Opening
from kvferry.store.servers import objects
from kvferry.store.servers.objects import ObjectClient, ObjectOptions, spans_of
from kvferry.store.url import open_one
from kvferry.testing.stores import make_key
from tests.servers.process import LOCALHOST, free_ports
from tests.servers.proxy import running_proxy
from tests.servers.seaweed import ACCESS_KEY, BUCKET, SECRET_KEY
from tests.servers.wrong_s3 import FAULTS, NAME, SIZE, running_wrong_s3
from tests.store.servers.real_clients import (
    NUM_BYTES,
    ClientTests,
    ServerStoreTests,
    calls_of,
    ends_within,
    fail_in_time,
    read_whole,
    soon,
    value_of,
)

pytestmark = pytest.mark.usefixtures("patient_calls")


@pytest.fixture(autouse=True)
def server(seaweed, monkeypatch):
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    return seaweed


@pytest.fixture
def make_client(server, closing):
    def make(bucket=BUCKET, endpoint=None):
        options = ObjectOptions(endpoint=endpoint or server.endpoint, region="us-east-1")
        return closing(ObjectClient("s3", bucket, options))

    return make


@pytest.fixture
def client(make_client):
    return make_client()


@pytest.fixture
def url_of(server):
    return lambda path: f"s3://{BUCKET}/{path}?endpoint={server.endpoint}&region=us-east-1"


class TestObjectStore(ServerStoreTests):
    pass


class TestObjectClient(ClientTests):
    def test_a_server_that_died_fails_and_comes_back_empty(self, server, client, name):
        client.put(name, [value_of()], soon())
        server.stop()
        try:
            for call in calls_of(client, name, 1.0):
                fail_in_time(call, 1.0)
        finally:
            server.start(empty=True)
        assert client.read(name, [], soon()) is None
        assert client.exists([name], soon()) == [False]
        assert client.put(name, [b"again"], soon()) is PutResult.STORED
        assert read_whole(client, name) == b"again"


def test_ranges_near_each_other_are_one_request():
    def buffer(length):
        return memoryview(bytearray(length))

    assert spans_of([(100, buffer(10)), (0, buffer(10))]) == [(0, 110)]
    assert spans_of([(0, buffer(10)), (2 << 20, buffer(10))]) == [
        (0, 10),
        (2 << 20, (2 << 20) + 10),
    ]
    assert spans_of([(0, buffer(100)), (10, buffer(5))]) == [(0, 100)]
    assert spans_of([(5, buffer(0))]) == []


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"AWS_SECRET_ACCESS_KEY": "wrong-secret-0123456789"}, "SignatureDoesNotMatch"),
        ({"AWS_ACCESS_KEY_ID": "unknown-key-0123456789"}, "InvalidAccessKeyId"),
        ({}, "NoSuchBucket"),
    ],
)
def test_a_wrong_bucket_or_secret_is_one_line(wrong, hint, make_client, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    for variable, text in wrong.items():
        monkeypatch.setenv(variable, text)
    client = make_client(bucket=BUCKET if wrong else "nowhere")
    calls = [
        lambda: client.check(soon()),
        lambda: client.read("a/b", [], soon()),
        lambda: client.put("a/b", [b"x"], soon()),
        lambda: client.exists(["a/b"], soon()),
        lambda: client.delete("a/b", soon()),
        lambda: next(client.scan("a/", soon())),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(StoreError if number else ConfigError, match=hint) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message
        assert len(message) < 250
        assert caught.value.__cause__ is None
        for secret in (ACCESS_KEY, SECRET_KEY, *wrong.values()):
            assert secret not in message + caplog.text + repr(client)


def test_an_endpoint_holds_no_credentials():
    with pytest.raises(ConfigError, match="without user") as caught:
        ObjectOptions(endpoint="http://user:hidden@127.0.0.1:1")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("scheme", "options", "match"),
    [
        ("gs", {"endpoint": "http://127.0.0.1:1"}, "gs has no option 'endpoint'"),
        ("az", {"region": "x"}, "az has no option 'region'"),
        ("az", {}, "check AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_options_that_a_cloud_lacks_are_refused(scheme, options, match):
    with pytest.raises(ConfigError, match=match):
        ObjectClient(scheme, "bucket", ObjectOptions(**options))


def test_a_server_that_is_not_there_fails_at_once(make_client):
    client = make_client(endpoint=f"http://{LOCALHOST}:{free_ports(1)[0]}")
    with ends_within(1.0), pytest.raises(StoreError, match="Connection refused"):
        client.read("a/b", [], soon())


@pytest.fixture
def proxy(server):
    with running_proxy(int(server.endpoint.rpartition(":")[2])) as proxy:
        yield proxy


def test_a_value_that_comes_too_slowly_costs_the_deadline(proxy, make_client, name):
    client = make_client(endpoint=f"http://{LOCALHOST}:{proxy.port}")
    client.put(name, [value_of()], soon())
    proxy.limit(NUM_BYTES / 3)
    buffer = bytearray(b"\xee" * NUM_BYTES)
    with ends_within(1.0), pytest.raises(StoreError, match="did not end within"):
        client.read(name, [(0, memoryview(buffer))], soon(1.0))
    proxy.black_hole()
    fail_in_time(lambda: client.exists([name], soon(0.5)), 0.5)
    proxy.pass_all()
    assert read_whole(client, name) == value_of()
    assert buffer == b"\xee" * NUM_BYTES


def test_a_connection_that_is_cut_is_tried_again_or_fails(proxy, make_client, name):
    client = make_client(endpoint=f"http://{LOCALHOST}:{proxy.port}")
    client.put(name, [value_of()], soon())
    proxy.cut_after(NUM_BYTES // 2)
    with ends_within(3.0), suppress(StoreError):
        assert read_whole(client, name) == value_of()
    proxy.refuse()
    fail_in_time(lambda: client.read(name, [], soon(2.0)), 2.0)
    proxy.pass_all()
    assert read_whole(client, name) == value_of()


def test_a_url_opens_a_store(url_of, name):
    url = url_of(f"{name}/")
    with open_one(url) as store:
        assert store.url == f"s3://{BUCKET}/{name}"
        assert store.put(make_key(), [b"value"]).result is PutResult.STORED
        assert store.read(make_key(), ()) == 5
    with open_one(url, Opening(index=False)) as store:
        assert [entry.key for entry in store.catalogue().scan()] == [make_key()]


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("s3://nowhere/kv", "NoSuchBucket; create it"),
        (f"s3://{BUCKET}:80/kv", "more than a bucket"),
        (f"s3://key:hidden@{BUCKET}/kv", "credentials into the environment"),
        ("s3:///kv", "names no bucket; write s3://bucket/prefix"),
        (f"s3://{BUCKET}/a//b", "made of names"),
        (f"s3://{BUCKET}/../b", "made of names"),
        (f"s3://{BUCKET}/a%0Ab", "made of names"),
        (f"s3://{BUCKET}/kv?secret=hidden", "unknown option 'secret'"),
    ],
)
def test_a_wrong_url_is_one_line(server, url, match):
    mark = "&" if "?" in url else "?"
    with pytest.raises(ConfigError, match=match) as caught:
        open_one(f"{url}{mark}endpoint={server.endpoint}&region=us-east-1")
    assert "hidden" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_store_whose_server_is_down_opens(name):
    endpoint = f"http://{LOCALHOST}:{free_ports(1)[0]}"
    with open_one(f"s3://{BUCKET}/{name}?endpoint={endpoint}&region=us-east-1") as store:
        assert store.put(make_key(), [b"value"]).result is PutResult.FAILED
        with pytest.raises(StoreError, match="Connection refused"):
            store.read(make_key(), ())


@pytest.fixture(scope="module")
def wrong():
    with running_wrong_s3() as endpoint:
        yield endpoint


def outcomes_of(client):
    """What every call brings, or the line of its error."""
    buffers = [memoryview(bytearray(16)), memoryview(bytearray(16))]
    ranges = list(zip((0, 4 << 20), buffers, strict=True))
    calls = {
        "read": lambda: (client.read(NAME, ranges, soon()), *map(bytes, buffers)),
        "size": lambda: client.read(NAME, (), soon()),
        "put": lambda: client.put("kv/b", [bytes(9)], soon()),
        "exists": lambda: client.exists([NAME], soon()),
        "delete": lambda: client.delete(NAME, soon()),
        "scan": lambda: [each[:2] for each in client.scan("kv/", soon())],
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except StoreError as error:
            found[name] = str(error)
    return found


HONEST = {
    "read": (SIZE, b"v" * 16, b"v" * 16),
    "size": SIZE,
    "put": PutResult.STORED,
    "exists": [True],
    "delete": True,
    "scan": [(NAME, SIZE)],
}
CALLS_WITH = {
    "get": ["read"],
    "head": ["size", "exists", "delete"],
    "put": ["put"],
    "delete": ["delete"],
    "list": ["scan"],
    "check": list(HONEST),
}


@pytest.mark.parametrize("bucket", ["honest", *FAULTS])
def test_a_wrong_answer_is_one_line_and_the_calls_after_it_are_right(bucket, wrong, make_client):
    found = outcomes_of(make_client(bucket, wrong))
    failing = [call for kind in FAULTS.get(bucket, ()) for call in CALLS_WITH[kind]]
    for call, outcome in found.items():
        if call in failing:
            assert outcome.startswith(f"s3://{bucket}: "), (call, outcome)
            assert outcome.isprintable()
            assert len(outcome) < 200
        else:
            assert outcome == HONEST[call], call


def test_a_value_replaced_between_two_requests_is_absent(wrong, make_client):
    assert outcomes_of(make_client("replaced", wrong))["read"] == (None, bytes(16), bytes(16))


SAID = {
    "status code: 403, no <Code>AccessDenied</Code>": FaultKind.LOGIN,
    "Unauthenticated": FaultKind.LOGIN,
    "<Code>NoSuchBucket</Code>": FaultKind.UNUSABLE,
    "BadScheme": FaultKind.UNUSABLE,
    "error sending request: connection refused": FaultKind.AWAY,
    "dns error: no such host": FaultKind.AWAY,
    "operation timed out": FaultKind.LATE,
    "received corrupt message of type InvalidMessage": FaultKind.PROTOCOL,
    "invalid peer certificate: UnknownIssuer": FaultKind.PROTOCOL,
    "status code: 500, <Code>InternalError</Code>": FaultKind.REFUSED,
    "status code: 507": FaultKind.REFUSED,
    "anything else": FaultKind.REFUSED,
}


@pytest.mark.parametrize("is_checked", [False, True], ids=["at the opening", "later"])
@pytest.mark.parametrize("said", SAID)
def test_what_the_library_says_has_a_kind(said, is_checked, make_client):
    client = make_client()
    client._is_checked = is_checked
    error = client._translate("read", GenericError(said))
    assert error.fault.kind is SAID[said]
    assert str(error).count("\n") == 0
    is_set_up = SAID[said] in (FaultKind.LOGIN, FaultKind.UNUSABLE)
    assert isinstance(error, ConfigError) is (is_set_up and not is_checked)


def test_a_panic_of_obstore_is_one_line(make_client, monkeypatch, capfd):
    monkeypatch.setattr(objects, "_check_environment", lambda *_: None)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "one\ntwo")
    with pytest.raises(StoreError, match=r"first request failed: \w*Panic\w*$"):
        make_client().check(soon())
    assert "panicked" in capfd.readouterr().err  # else it tests nothing


def test_a_fork_of_a_process_that_used_obstore_says_so_at_once(client, make_client, name):
    client.put(name, [b"x"], soon())
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        for call in (lambda: client.read(name, [], soon()), make_client):
            try:
                call()
            except (StoreError, ConfigError) as error:
                os.write(theirs, f"{error}\n".encode())
        os._exit(0)
    os.close(theirs)
    with open(ours) as lines:
        said = lines.read().splitlines()
    os.waitpid(child, 0)
    assert [line.partition("; ")[2] for line in said] == [
        "open it after",
        "start processes by spawn (vLLM: VLLM_WORKER_MULTIPROCESSING_METHOD=spawn)",
    ]
    assert read_whole(client, name) == b"x"


def test_processes_end_in_silence_though_requests_are_under_way(server):
    code = """
        import sys, threading, time
        from kvferry.errors import StoreError
        from kvferry.store.servers.objects import ObjectClient, ObjectOptions
        options = ObjectOptions(endpoint=sys.argv[1], region="us-east-1")
        begun = threading.Semaphore(0)
        def ask(client):
            begun.release()
            try:
                client.check(time.monotonic() + 60)
            except StoreError:
                pass
        for _ in range(3):
            client = ObjectClient("s3", "records", options)
            threading.Thread(target=ask, args=[client], daemon=True).start()
            begun.acquire()
    """
    # Several at once: while they compete for the processor, threads of obstore are late.
    words = [sys.executable, "-c", textwrap.dedent(code), server.endpoint]
    root = Path(__file__).parents[3]
    server.process.pause()
    try:
        running = [
            subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            for _ in range(16)
        ]
        said = [process.communicate(timeout=120)[0] for process in running]
    finally:
        server.process.resume()
    assert [process.returncode for process in running] == [0] * 16
    assert b"".join(said) == b""
