"""A server that answers S3 requests wrongly. The name of the bucket chooses the way."""

from __future__ import annotations

import contextlib
import random
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import NamedTuple

from tests.servers.paced import paced
from tests.servers.process import LOCALHOST

SIZE = 1000
"""Bytes of every value."""

_FLOOD = b"x" * (1 << 20)
_DATE = "Mon, 02 Nov 2026 10:00:00 GMT"


class Request(NamedTuple):
    kind: str
    """check (a list that starts after all names), list, get, head, put or delete."""
    number: int
    """How many requests of its kind came to the bucket before."""
    first_byte: int = 0
    """First byte of the range that a get asks for."""


def whole(status: str, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    """Make a whole answer; `length` is the length that it claims for its body."""
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Length: {len(body) if length is None else length}",
        f"Last-Modified: {_DATE}",
        'ETag: "e"',
        "Connection: close",  # otherwise a client may send its next request as this end closes
        *headers,
        "",
        "",
    ]
    return "\r\n".join(lines).encode() + body


def listing(names: list[str], token: str = "", size: str = str(SIZE)) -> bytes:
    """Make the body of a list. With a token, it says that another page follows."""
    rows = "".join(
        f"<Contents><Key>{name}</Key><LastModified>2026-11-02T10:00:00.000Z</LastModified>"
        f'<ETag>"e"</ETag><Size>{size}</Size></Contents>'
        for name in names
    )
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult><Name>b</Name><Prefix/>'
        f"<IsTruncated>{str(bool(token)).lower()}</IsTruncated>{more}{rows}</ListBucketResult>"
    ).encode()


def honest(request: Request) -> bytes:
    """Answer as a server with one value under every name."""
    if request.kind == "get":
        return whole("206 Partial Content", b"v" * 16, f"Content-Range: bytes 0-15/{SIZE}")
    if request.kind == "head":
        return whole("200 OK", length=SIZE)
    if request.kind == "delete":
        return whole("204 No Content")
    bodies = {"check": listing([]), "list": listing(["kv/a"])}
    return whole("200 OK", bodies.get(request.kind, b""))


Answer = Callable[[Request], Iterator[bytes]]
"""Makes the bytes of an answer to a request. After them the connection is closed."""


def endless(start: bytes, piece: bytes = _FLOOD) -> Iterator[bytes]:
    yield start
    while True:
        yield piece


def in_chunks(head: str, *headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {head}",
        "Transfer-Encoding: chunked",
        f"Last-Modified: {_DATE}",
        'ETag: "e"',
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode()


_CHUNK = b"100000\r\n" + _FLOOD + b"\r\n"
_RANGE = f"Content-Range: bytes 0-15/{SIZE}"
_ROW = listing(["kv/a"]).partition(b"<Contents>")[2].partition(b"</ListBucketResult>")[0]
_ROWS = (b"<Contents>" + _ROW) * 5000
_ENTITIES = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 12))
_LAUGHS = f'<?xml version="1.0"?><!DOCTYPE b [<!ENTITY l0 "lol">{_ENTITIES}]>'.encode()


_NAMES = b"".join(b"kv/%d\n" % number for number in range(1000))


def endless_slowly(start: bytes, piece: bytes) -> Iterator[bytes]:
    yield start
    yield from paced(repeat(piece), 0.02)


def slowly(answer: bytes) -> Iterator[bytes]:
    yield from paced((bytes([each]) for each in answer), 0.05)


def _error(status: str) -> Answer:
    """Answer with an endless error to all but a check, whose failure would hide other faults."""
    return lambda request: (
        iter([honest(request)]) if request.kind == "check" else endless(in_chunks(status), _CHUNK)
    )


def _only(kind: str, answer: Answer) -> Answer:
    """Give `answer` to one kind of request, and honest answers to all others."""
    return lambda request: answer(request) if request.kind == kind else iter([honest(request)])


def _get(*headers: str, status: str = "206 Partial Content", body: bytes = b"v" * 16) -> Answer:
    return _only("get", lambda _request: iter([whole(status, body, *headers)]))


def _list(*bodies: bytes) -> Answer:
    return _only(
        "list", lambda request: iter([whole("200 OK", bodies[request.number % len(bodies)])])
    )


HONEST: dict[str, Answer] = {"honest": lambda request: iter([honest(request)])}

WAYS: dict[str, Answer] = {
    "endless-body": _only(
        "get", lambda _request: endless(in_chunks("206 Partial Content", _RANGE), _CHUNK)
    ),
    "huge-length": _only(
        "get",
        lambda _request: endless(whole("206 Partial Content", b"", _RANGE, length=1 << 40)),
    ),
    "endless-list": _only(
        "list", lambda _request: endless(in_chunks("200 OK"), b"%x\r\n%s\r\n" % (len(_ROWS), _ROWS))
    ),
    "endless-check": _only("check", lambda _request: endless(in_chunks("200 OK"), _CHUNK)),
    "huge-list": _only("list", lambda _request: endless(whole("200 OK", length=1 << 40))),
    "error-403": _error("403 Forbidden"),
    "error-404": _error("404 Not Found"),
    "error-500": _error("500 Internal Server Error"),
    "error-503": _error("503 Slow Down"),
    "endless-headers": lambda _request: endless(
        b"HTTP/1.1 200 OK\r\n", b"X-A: " + b"a" * 99 + b"\r\n"
    ),
    "endless-header": lambda _request: endless(b"HTTP/1.1 200 OK\r\nX-A: "),
    "endless-status": lambda _request: endless(b"HTTP/1.1 200 "),
    "endless-interim": lambda _request: endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 1000),
    "no-http": lambda _request: endless(b"", random.Random(1).randbytes(1 << 16)),
    "redirects": lambda _request: iter(
        [whole("307 Temporary Redirect", b"", "Location: /redirects/x")]
    ),
    "other-range": _get(f"Content-Range: bytes 5-20/{SIZE}"),
    "negative-range": _get("Content-Range: bytes 0-15/-1"),
    "unreal-range": _get("Content-Range: bytes 0-15/99999999999999999999999"),
    "no-range": _get(status="200 OK"),
    "refused-range": _get(status="416 Range Not Satisfiable", body=b""),
    "short-body": _only(
        "get",
        lambda _request: iter([whole("206 Partial Content", b"v", _RANGE, length=16)]),
    ),
    "short-range": _get("Content-Range: bytes 0-3/1000", body=b"vvvv"),
    "slow-body": _only(
        "get",
        lambda _request: slowly(whole("206 Partial Content", b"v" * 16, _RANGE)),
    ),
    "slow-list": _only("list", lambda request: slowly(honest(request))),
    "hung": lambda _request: slowly(b"HTTP/1.1"),
    "laughs": _list(_LAUGHS + b"<ListBucketResult><Name>&l11;</Name></ListBucketResult>"),
    "deep-list": _list(b"<a>" * 500_000),
    "wrong-size": _list(listing(["kv/a"], size="-1")),
    "no-xml": _list(b"\xff\xfe not xml at all"),
    "empty-list": _list(b""),
    "same-token": _list(listing(["kv/a"], token="again")),
    "empty-pages": _list(listing([], token="again")),
    "two-tokens": _list(listing(["kv/a"], token="one"), listing(["kv/b"], token="two")),
    "long-name": _list(listing(["kv/" + "a" * 5_000_000])),
    "escapes": _list(listing(["kv/\x9b31m", "kv/&#27;[31m", "kv/..", "kv//", "/", "kv/%00", ""])),
}
"""Wrong answers, by the name of the bucket."""

LISTS: dict[str, Answer] = {
    "endless-names": lambda _request: endless(
        in_chunks("200 OK"), b"%x\r\n%s\r\n" % (len(_NAMES), _NAMES)
    ),
    "endless-name": lambda _request: endless(in_chunks("200 OK"), _CHUNK),
    "slow-names": lambda _request: slowly(whole("200 OK", _NAMES)),
    "slow-chunk": lambda _request: endless_slowly(in_chunks("200 OK"), b"0"),
    "names-503": lambda _request: iter([whole("503 Slow Down", _NAMES)]),
    "short-names": lambda _request: iter([whole("200 OK", _NAMES, length=10 * len(_NAMES))]),
    "wrong-chunks": lambda _request: iter([in_chunks("200 OK") + b"zz\r\nkv/a\r\n"]),
    "bare-names": lambda _request: iter([_NAMES]),
}
"""Wrong lists of names, in the form in which the admin port of Mooncake's master answers."""


_RECORDS = listing([f"kv/{0:064x}/{number:064x}" for number in range(1000)], token="again")
CIRCLES: dict[str, Answer] = {"same-records": _list(_RECORDS)}
"""Lists of records that start again at their end."""


def _two_values(request: Request) -> Iterator[bytes]:
    """Answer as if another value had replaced the first between two ranges of a read."""
    size = SIZE << 20 if request.first_byte == 0 else request.first_byte + 8
    count = min(16, size - request.first_byte)
    span = f"{request.first_byte}-{request.first_byte + count - 1}"
    yield whole("206 Partial Content", b"v" * count, f"Content-Range: bytes {span}/{size}")


REPLACED: dict[str, Answer] = {"two-values": _only("get", _two_values)}

_ALL = HONEST | WAYS | LISTS | CIRCLES | REPLACED


def fuzzed(seed: int) -> Answer:
    """Give honest answers with some bytes changed, cut, doubled or inserted."""

    def answer(request: Request) -> Iterator[bytes]:
        draw = random.Random(f"{seed} {request.kind} {request.number}")
        content = bytearray(honest(request))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(content) or 1)
            change = draw.randrange(4)
            if change == 0:
                content[at : at + 1] = draw.randbytes(1)
            elif change == 1:
                del content[at : at + draw.randint(1, 20)]
            elif change == 2:
                content[at:at] = content[at : at + draw.randint(1, 40)]
            else:
                content[at:at] = draw.choice([b"9" * 30, b"\r\n", b"<a>", b"-", b"\0", b"&a;"])
        yield bytes(content)

    return answer


class HostileS3:
    """Listens on a free port. The bucket `fuzz-7` answers with `fuzzed(7)`.

    Attributes:
        endpoint: URL of the server.
    """

    def __init__(self) -> None:
        self._is_closed = False
        self._numbers: dict[str, int] = {}
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((LOCALHOST, 0))
        self._listener.settimeout(0.05)
        self.endpoint = f"http://{LOCALHOST}:{self._listener.getsockname()[1]}"
        self._run(self._accept)

    def close(self) -> None:
        """Close the server, and end all its threads."""
        self._is_closed = True
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()
        self._listener.close()

    def _run(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while not self._is_closed:
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self._run(self._serve, client)

    def _serve(self, client: socket.socket) -> None:
        """Serve one request; a connection has no second one."""
        with client, contextlib.suppress(OSError):
            client.settimeout(0.2)
            bucket, request = self._request(client)
            way = fuzzed(int(bucket[5:])) if bucket.startswith("fuzz-") else _ALL[bucket]
            for piece in way(request):
                if not self._send(client, piece):
                    return

    def _request(self, client: socket.socket) -> tuple[str, Request]:
        """Read a request with its body; return its bucket and what it asks for."""
        received = b""
        while b"\r\n\r\n" not in received:
            part = client.recv(1 << 16)
            if not part:
                raise OSError
            received += part
        head, _, body = received.partition(b"\r\n\r\n")
        method, target, *_ = head.decode().split()
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        missing = int(length[1]) - len(body) if length else 0
        while missing > 0:
            missing -= len(client.recv(1 << 16))
        bucket = target.split("/")[1].partition("?")[0]
        kind = method.lower()
        if "list-type" in target:
            kind = "check" if "start-after" in target else "list"
        number = self._numbers.get(f"{bucket} {kind}", 0)
        self._numbers[f"{bucket} {kind}"] = number + 1
        first_byte = re.search(rb"range: bytes=(\d+)", head, re.IGNORECASE)
        return bucket, Request(kind, number, int(first_byte[1]) if first_byte else 0)

    def _send(self, client: socket.socket, piece: bytes) -> bool:
        """Send a piece. Return False if the client has left or the server is closed."""
        rest = memoryview(piece)
        while rest and not self._is_closed:
            _, writable, _ = select.select([], [client], [], 0.05)
            if writable:
                rest = rest[client.send(rest) :]
        left, _, _ = select.select([client], [], [], 0)
        return not self._is_closed and not left


@contextlib.contextmanager
def running_hostile_s3() -> Iterator[HostileS3]:
    """Run a server for the block."""
    server = HostileS3()
    try:
        yield server
    finally:
        server.close()
