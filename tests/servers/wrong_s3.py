"""A server that answers S3 requests wrongly. The name of the bucket chooses the way."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from tests.servers.process import LOCALHOST

SIZE = 9 << 20
"""Bytes of every value."""

NAME = "kv/a"
_ROW = (
    "<Contents><Key>{}</Key><LastModified>2026-11-02T10:00:00.000Z</LastModified>"
    '<ETag>"e"</ETag><Size>{}</Size></Contents>'
)


class Answer(NamedTuple):
    """An answer; `length` is the length that it claims for its body, if another one."""

    status: int = 200
    body: bytes = b""
    span: str = ""
    length: int | None = None


def listing(row: str) -> Answer:
    text = f"<ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>{row}"
    return Answer(body=f"{text}</ListBucketResult>".encode())


def honest(kind: str, start: int, end: int) -> Answer:
    """Answer as a server with one value under every name."""
    if kind == "get":
        return Answer(206, b"v" * (end - start), f"{start}-{end - 1}/{SIZE}")
    if kind == "list":
        return listing(_ROW.format(NAME, SIZE))
    return listing("") if kind == "check" else Answer(length=SIZE if kind == "head" else None)


FAULTS: dict[str, dict[str, Answer]] = {
    "other-range": {"get": Answer(206, b"v" * 16, f"5-20/{SIZE}")},
    "no-range": {"get": Answer(200, b"v" * 16)},
    "strange-range": {"get": Answer(206, b"v" * 16, "0-15/-1")},
    "short-body": {"get": Answer(206, b"v", f"0-15/{SIZE}", length=16)},
    "short-range": {"get": Answer(206, b"vvvv", f"0-3/{SIZE}")},
    "long-body": {"get": Answer(206, b"v" * 32, f"0-15/{SIZE}")},
    "reads-fail": {"get": Answer(500)},
    "slow-down": {"get": Answer(503)},
    "full": {"put": Answer(507)},
    "no-delete": {"delete": Answer(403)},
    "no-heads": {"head": Answer(403)},
    "wrong-size": {"list": listing(_ROW.format(NAME, -1))},
    "strange-names": {"list": listing(_ROW.format("kv/..", 1))},
    "no-xml": {"list": Answer(body=b"\xff\xfe not xml at all")},
    "empty-list": {"list": Answer()},
    "lists-fail": {"check": Answer(500)},
}
"""Wrong answers by bucket and kind of request: check (a list that starts after all names), list,
get, head, put or delete. All other answers are honest. In the bucket `replaced`, another value
stands behind the name at each request for a part of it."""

REFUSED = "ab" * 32
"""Key to which a bucket `one-403` answers with status 403; `all-403` does so to every key."""


class _Handler(BaseHTTPRequestHandler):
    def _serve(self) -> None:
        bucket, kind = self.path.split("/")[1].partition("?")[0], self.command.lower()
        if "list-type" in self.path:
            kind = "check" if "start-after" in self.path else "list"
        if kind == "put":
            self.rfile.read(int(self.headers["Content-Length"]))
        first, _, last = self.headers.get("Range", "bytes=0-0")[6:].partition("-")
        start, end = int(first), int(last) + 1
        answer = FAULTS.get(bucket, {}).get(kind) or honest(kind, start, end)
        scope, _, status = bucket.partition("-")
        is_refused = scope == "all" or self.path.partition("?")[0].endswith(REFUSED)
        if scope in ("one", "all") and kind in ("get", "head", "put") and is_refused:
            answer = Answer(int(status))
        if bucket == "replaced" and kind == "get":
            answer = answer._replace(span=f"{start}-{end - 1}/{SIZE + start}")
        self.send_response(answer.status)
        length = len(answer.body) if answer.length is None else answer.length
        self.send_header("Content-Length", str(length))
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Mon, 02 Nov 2026 10:00:00 GMT")
        if answer.span:
            self.send_header("Content-Range", f"bytes {answer.span}")
        self.end_headers()
        self.wfile.write(answer.body)

    do_GET = do_HEAD = do_PUT = do_DELETE = _serve  # the names of the base class

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def running_wrong_s3() -> Iterator[str]:
    """Run a server for the block; yield its URL."""
    with ThreadingHTTPServer((LOCALHOST, 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        try:
            yield f"http://{LOCALHOST}:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
