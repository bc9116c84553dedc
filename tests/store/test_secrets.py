"""No message, log or output shows a secret of a store URL, wherever in the URL it stands.

Schemes and options come from the tables of the package, so that a new one is tried, too.
"""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from kvferry.cache.config import CacheConfig
from kvferry.cli.main import main
from kvferry.config import build_config
from kvferry.errors import KVError, StoreError
from kvferry.exporters import KVFerryCollector
from kvferry.observe import Counters
from kvferry.store.kind import shown_url
from kvferry.store.kinds import MODULES
from kvferry.store.url import (
    kind_of,
    open_store,
    parse_store_url,
    read_options,
    refuse_small_quota,
)
from kvferry.testing.stores import make_key

pytestmark = pytest.mark.slow

logger = logging.getLogger(__name__)

SECRET = "hunter2-S3cr3t"
PIECES = ("hunter2", "S3cr3t")
"""A special character that was not escaped parts a password; no part is shown either."""


MAX_OPENED = 4


def base_of(scheme: str) -> str:
    if scheme == "file":
        return "file:///nowhere/at/all"
    if scheme == "memory":
        return "memory://name"
    return f"{scheme}://bucket/kv" if scheme in ("s3", "gs", "az") else f"{scheme}://127.0.0.1:1/kv"


def with_options(scheme: str) -> Iterator[str]:
    names = [field.name for field in dataclasses.fields(kind_of(scheme).options)]
    for name in (*names, "token", "pw", "sig", "passwrd", f"{names[0]}s"):
        yield f"{name}={SECRET}"
        yield f"{name}={SECRET}&{name}={SECRET}"
        yield f"{name}=http://user:{SECRET}@127.0.0.1:1/"
        yield f"{name}=http://{SECRET}@127.0.0.1:1"
        yield f"{name}=redis://:{SECRET}@127.0.0.1:1"
        yield f"{name}=http://127.0.0.1:1/?sig={SECRET}"
        yield f"{name}=http://127.0.0.1:99999/?sig={SECRET}"
        yield f"{name}=5{SECRET}"
        yield f"{name}={SECRET}%00"
        yield f"{name}={SECRET}%0A"
        yield f"{name}=%ff{SECRET}"
        yield f"{name}={SECRET}#{SECRET}"
        yield f"{name}={SECRET}\n"
        yield f"{name}&x={SECRET}"
    yield from (
        SECRET,
        f"{SECRET}=1",
        f"={SECRET}",
        f"x=1&{SECRET}",
        f"{SECRET}=",
        f"%ff{SECRET}=1",
    )


def with_logins(scheme: str) -> Iterator[str]:
    """Of servers: the name of a memory store and the path of a directory may be shown."""
    _, _, rest = base_of(scheme).partition("://")
    for special in ("-", "/", "?", "#", "@", ":", "%2F", "%ff", " ", "\n", ","):
        password = SECRET.replace("-", special)
        for login in (f"user:{password}@", f"{password}@", f":{password}@", f"{password}:x@"):
            yield f"{scheme}://{login}{rest}"
            yield f"{scheme}x://{login}{rest}"
            yield f"{scheme}:/{login}{rest}"
            yield f"{login}{rest}"
            yield f"//{login}{rest}"
            yield f"{scheme}://{login}{rest.replace(':1/', ':99999/')}?token={password}"
        if special != "@":
            yield f"{scheme}://user:{password}"  # the host was forgotten


def urls_of(scheme: str) -> Iterator[str]:
    base = base_of(scheme)
    yield from (f"{base}?{options}" for options in with_options(scheme))
    yield f"{base}#{SECRET}"
    if kind_of(scheme).hosts:
        yield from (f"{base}{mark}token={SECRET}" for mark in ("&", ";", "/", "&amp;", "%20;"))
    if scheme == "s3":
        yield f"{base}?endpoint=http://127.0.0.1:1&region={SECRET}"
    if kind_of(scheme).hosts:
        yield from with_logins(scheme)


def uses_of(url: str, number: int) -> Iterator[Callable[[], object]]:
    """Ways in which a URL that is refused comes to be shown."""
    yield lambda: refuse_small_quota(parse_store_url(url), 1 << 40)
    yield lambda: open_store(url)
    yield lambda: open_store([url, url])
    yield lambda: open_store([url, "memory://x"])
    yield lambda: open_store(url, multi_process=True)
    yield lambda: build_config(CacheConfig, {"store": [url, None]}, where="options")
    yield lambda: build_config(CacheConfig, {"store": url, "kind": url}, where="options")
    if number % 31 == 0:  # each takes a tenth of a second
        yield lambda: main(["ls", url])
        yield lambda: main(["ls", url, url])
        yield lambda: main([url])


def open_and_use(url: str) -> None:
    """Use a store whose server is away until its breaker says so, and use it closed."""
    counts = Counters()
    store = open_store(url, observer=counts)
    with store:
        logger.warning("%s %r %s %s", store.url, store, store.stat(), vars(store))
        for tier in getattr(store, "_tiers", ()):
            logger.warning("%r %s %s", tier.store, vars(tier.store), vars(tier))
        for _ in range(4):
            with suppress(StoreError):
                store.read(make_key(), ())
            store.put(make_key(), [b"value"])
    store.read(make_key(), ())
    logger.warning("%r %s", store, list(KVFerryCollector(counts).collect()))
    late = open_store(url, observer=counts, start_seconds=0.0)
    logger.warning("%s %r %s", late.url, late, late.stat())
    late.close()


def show_parsed(url: str) -> None:
    parsed = parse_store_url(url)
    logger.warning("%s %r %r", parsed, parsed, type(read_options(parsed)))


def tried(use: Callable[[], object], shown: list[str]) -> bool:
    """Whether it was not refused; a refusal is shown as a traceback shows it."""
    try:
        use()
    except KVError:
        shown.append(traceback.format_exc())
        return False
    return True


@pytest.fixture
def nowhere(monkeypatch):
    """Credentials in the environment, and no way to a server."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, SECRET)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")


OPTION_NAMES = [field.name for field in dataclasses.fields(CacheConfig)]


@pytest.mark.parametrize("name", [*OPTION_NAMES, "stores", f"valkey://:{SECRET}@h/kv"])
@pytest.mark.parametrize(
    "url", [f"valkey://:{SECRET}@h/kv", f"user:{SECRET}@h", f"s3://b?{SECRET}"]
)
def test_a_url_under_a_wrong_option_is_not_shown(name, url):
    shown: list[str] = []
    options = {"store": "memory://x", name: url}
    tried(lambda: build_config(CacheConfig, options, where="options"), shown)
    assert not [text for text in shown if any(piece in text for piece in PIECES)]


@pytest.mark.parametrize("scheme", MODULES)
def test_no_secret_is_shown(scheme, nowhere, caplog, capfd):
    caplog.set_level(logging.INFO)
    num_refused = num_opened = 0
    for number, url in enumerate(urls_of(scheme)):
        shown = [shown_url(url)]
        if tried(lambda url=url: show_parsed(url), shown):
            # Each takes about half a second.
            if (num_opened := num_opened + 1) <= MAX_OPENED:
                tried(lambda url=url: open_and_use(url), shown)
                tried(lambda url=url: open_store([url, url]).close(), shown)
        else:
            num_refused += 1
            for use in uses_of(url, number):
                tried(use, shown)
        shown += [caplog.text, *capfd.readouterr()]
        caplog.clear()
        for piece in PIECES:
            lines = [line for text in shown for line in text.splitlines() if piece in line]
            assert not lines, f"{url!r} is shown: {lines[:3]}"
    assert num_refused > 50
