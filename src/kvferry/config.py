"""From text to typed options: sizes, store URLs, frozen dataclasses. Pure; reads no file.

Every refusal is a `ConfigError` of one line: where, what was given, what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import ipaddress
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import quote, unquote

from kvferry.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
# At most two digits of exponent: a longer one would make int() work for minutes.
_SIZE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?(?:e\d{1,2})?)\s*([a-z]*)", re.ASCII)
_MAX_SIZE = 2**63 - 1
_SIZES = "write a number of bytes such as 4096, 500MB or 10GiB"
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.ASCII | re.DOTALL)

OBJECT_SCHEMES = ("s3", "gs", "az")
"""Schemes whose URLs name buckets."""
SERVER_SCHEMES = ("valkey", "valkeys", "redis", "rediss", "mooncake", *OBJECT_SCHEMES)
"""Schemes whose URLs name servers; valkeys and rediss speak TLS."""
STORE_SCHEMES = ("file", "memory", *SERVER_SCHEMES)
# A path, in which an @ separates nothing.
_LOCAL = re.compile(r"/(?!/)|file:(?:///|/(?!/))|(?:file|memory):(?!/)[^@:]*$", re.IGNORECASE)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", re.ASCII)
# A name, before the = of a URL's option, that may be shown.
_OPTION = re.compile(r"(?=.{1,24}$)[a-z]+(?:_[a-z]+)*", re.ASCII)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}", re.ASCII)
"""Of a region or a device: no header and no file system takes others."""
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", re.ASCII)
_ENDPOINT = re.compile(
    r"([a-z]+)://([^/?#@]*@)?([^/?#@]+)(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:/-]|%[0-9A-Fa-f]{2})*)?",
    re.ASCII,
)


def parse_size(text: str | int) -> int:
    """Bytes meant by `text`: a whole number, or one with B, KB, MB, GB, TB (powers of 1000) or
    KiB, MiB, GiB, TiB (powers of 1024), in any case. Fractions of a byte are dropped.

    Raises:
        ConfigError: negative, too large for a file size, or not a size.

    >>> parse_size("1.5GiB"), parse_size("500 MB"), parse_size(4096)
    (1610612736, 500000000, 4096)
    """
    match = _SIZE.fullmatch(str(text).strip().lower())
    if match is None:
        fault = "is negative" if str(text).strip().startswith("-") else "is not a size"
        raise ConfigError(f"{text!r} {fault}; {_SIZES}")
    number, unit = match.groups()
    if unit not in _UNITS:
        # A lone G is refused: half of all tools read it as 1000^3, the other half as 1024^3.
        hint = f"; write {unit}ib (1024) or {unit}b (1000)" if f"{unit}ib" in _UNITS else ""
        raise ConfigError(f"{text!r} has the unknown unit {unit!r}{hint or '; ' + _SIZES}")
    size = Decimal(number) * _UNITS[unit]
    if size > _MAX_SIZE:
        raise ConfigError(f"{text!r} is more than the largest size, {_MAX_SIZE} bytes")
    return int(size)


def format_size(num_bytes: int) -> str:
    """`num_bytes` for people, in a form that `parse_size` reads: exact up to 1023 bytes and for
    round numbers, else one decimal.

    >>> format_size(4096), format_size(1_610_612_736), format_size(5000)
    ('4KiB', '1.5GiB', '4.9KiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    size = float(num_bytes)
    # 1023.95 and more would print as 1024.0 of the smaller unit.
    while size >= 1023.95 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.1f}".removesuffix(".0") + units[0]


def printable(text: str) -> str:
    r"""`text` as one line that no terminal acts on: what cannot be printed, as Python escapes it.

    >>> print(printable(chr(27) + "[31m"), printable("[31m"))
    \x1b[31m [31m
    """
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def unknown(what: str, name: object, known: Iterable[str], *, hides: bool = False) -> str:
    """One sentence for a name that is not in `known`: the nearest one that is, or all of them. With
    `hides`, the name itself is shown only where it looks like one."""
    by_lower = {entry.lower(): entry for entry in sorted(known)}
    shown = "" if hides and _OPTION.fullmatch(str(name)) is None else f" {name!r}"
    if not by_lower:
        return f"unknown {what}{shown}; there are none"
    hint = f"known: {', '.join(by_lower.values())}"
    for near in difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6):
        hint = f"did you mean {by_lower[near]!r}?"
    return f"unknown {what}{shown}; {hint}"


def build_config(cls: type[T], mapping: Mapping[str, Any], *, where: str, hides: bool = False) -> T:
    """Make the frozen dataclass `cls` from options as a URL, command line or file gives them.

    Text is converted to the type of the field: int, float, bool (true/false, yes/no, on/off, 1/0),
    str, a Literal of strings or ints, several of these and None (the text "none"), or a tuple of
    one of them from a list. A field whose metadata is `{"unit": "bytes"}` takes what `parse_size`
    takes. Values that already have the type pass; a float where an int belongs is refused unless it
    is whole.

    Args:
        cls: a dataclass; its `__post_init__` may raise ConfigError for what types cannot say.
        mapping: option name to value.
        where: what the options belong to, the start of every message.
        hides: messages do not show what was given. For the options of a URL: one that is wrong can
            hold a secret anywhere. Of other options, they do not show what may be a URL.

    Raises:
        ConfigError: an unknown, missing or unusable option.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        if name not in fields:
            fault = unknown("option", name, fields, hides=hides or _may_be_url(name))
            raise ConfigError(f"{where}: {fault}")
        is_size = fields[name].metadata.get("unit") == "bytes"
        try:
            values[name] = _convert(hints[name], value, is_size=is_size)
        except ValueError as error:  # a ConfigError of parse_size is one too
            is_hidden = hides or _may_be_url(value)
            fault = _refusal(hints[name], is_size=is_size) if is_hidden else f": {error}"
            raise ConfigError(f"{where}: option {name!r}{fault}") from None
    for name, field in fields.items():
        is_required = (
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        )
        if is_required and name not in values:
            raise ConfigError(f"{where}: option {name!r} is missing")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def check_audit(option: object) -> None:
    """Check the option `audit` of a config.

    Raises:
        ConfigError: neither "first" nor "off" nor a number from 0 to 1.
    """
    if isinstance(option, int | float) and not isinstance(option, bool):
        is_known = 0 <= option <= 1
    else:
        is_known = option in ("first", "off")
    if not is_known:
        raise ConfigError(f'audit must be "first", "off" or a number from 0 to 1, not {option!r}')


def _convert(hint: object, value: object, *, is_size: bool) -> object:
    """`value` as the type `hint`; ValueError saying what is allowed."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = typing.get_args(hint)
        is_none = value is None or (isinstance(value, str) and value.strip().lower() == "none")
        if is_none and type(None) in members:
            return None
        faults = []
        for member in members:
            if member is not type(None):
                try:
                    return _convert(member, value, is_size=is_size)
                except ValueError as error:
                    faults.append(str(error))
        raise ValueError(", and ".join(faults))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"a value of type {type(value).__name__} is not a list")
        member = typing.get_args(hint)[0]
        return tuple(_convert(member, each, is_size=is_size) for each in value)
    if typing.get_origin(hint) is Literal:
        members = typing.get_args(hint)
        text = value.strip().lower() if isinstance(value, str) else None
        for choice in members:
            if (type(choice) is type(value) and choice == value) or str(choice).lower() == text:
                return choice
        raise ValueError(f"{value!r} is none of {', '.join(map(str, members))}")
    if is_size:
        return parse_size(value if isinstance(value, str) else _to_int(value))
    return _CONVERTERS[hint](value)


def _may_be_url(given: object) -> bool:
    """Whether it may hold a password, as a store's URL under a wrong option does."""
    return isinstance(given, str) and ("@" in given or "://" in given)


def _refusal(hint: object, *, is_size: bool) -> str:
    """What is wrong with a value that is no `hint`, without the value."""
    members = [each for each in typing.get_args(hint) if each is not type(None)]
    if typing.get_origin(hint) is Literal:
        return f" is none of {', '.join(map(str, members))}"
    if hint is bool:
        return " is neither true nor false"
    if is_size:
        return f" is not a size; {_SIZES}"
    kinds = {int: "a whole number", float: "a finite number"}
    return f" is not {' or '.join(kinds.get(each, 'text') for each in members or [hint])}"


def _to_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    text = value.strip().lower() if isinstance(value, str) else None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _to_int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value.strip(), re.ASCII):
        return int(value)
    raise ValueError(f"{value!r} is not a whole number")


def _to_float(value: object) -> float:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
            if math.isfinite(number):
                return number
    raise ValueError(f"{value!r} is not a finite number")


def _to_str(value: object) -> str:
    if isinstance(value, str):
        return value
    # Without the value: it may hold a URL with a password.
    raise ValueError(f"a value of type {type(value).__name__} is not text")


_CONVERTERS: Mapping[object, Callable[[object], object]] = {
    bool: _to_bool,
    int: _to_int,
    float: _to_float,
    str: _to_str,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """A store URL taken apart. `str` is what messages and logs show of it: scheme, hosts, path.

    Attributes:
        scheme: one of `STORE_SCHEMES`.
        path: for file, the absolute directory; for memory, the name; for servers, what the names of
            all values begin with, without slashes around it. The last two may be empty.
        options: what stood after the `?`, still text.
        hosts: names or addresses of servers, with their ports (None: the usual one).
        username: at the servers.
        password: at the servers.
    """

    scheme: str
    path: str
    options: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    hosts: tuple[tuple[str, int | None], ...] = ()
    username: str = dataclasses.field(default="", repr=False)
    password: str = dataclasses.field(default="", repr=False)

    def __str__(self) -> str:
        # A path that is not UTF-8 is shown as the bytes it is, though no URL leads to it.
        path = quote(self.path, errors="surrogateescape")
        hosts = ",".join(
            (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
            for host, port in self.hosts
        )
        slash = "/" if self.hosts and path else ""
        return f"{self.scheme}://{hosts}{slash}{path}"


def shown_url(url: str) -> str:
    """Of a store URL as it was given, which may be any text, what messages and logs show: scheme,
    hosts and path. Hides too much rather than too little: a password whose special characters were
    not escaped moves the bounds of the parts, and what is no host may be a piece of one.

    >>> shown_url("rediss://user:pass/word@host/kv?token=x&cluster=true")
    'rediss://***@host/kv'
    """
    head = re.split(r"[?#]", url, maxsplit=1)[0]
    if _LOCAL.match(url):
        return head
    userinfo, at, rest = head.rpartition("@")
    scheme, separator, authority = (userinfo if at else head).partition("://")
    if not separator:
        scheme, authority = "", scheme
    hosts = (rest if at else authority).partition("/")[0]
    is_clear = all(_HOST.fullmatch(host) for host in hosts.split(",")) or hosts in ("", "~")
    is_clear = is_clear or not (separator or ":" in head)
    if not is_clear or "@" in url[len(head) :]:
        return f"{scheme}{separator}***"
    return f"{scheme}{separator}***@{rest}" if at else head


def is_host(host: str) -> bool:
    """Whether `host` can be the name or the address of a machine."""
    labels = host.removesuffix(".").split(".")
    if ":" in host or labels[-1].isdigit():
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(host)
            return True
        return False
    return len(host) <= 253 and all(_LABEL.fullmatch(label) for label in labels)


def check_endpoint(
    name: str,
    url: str,
    example: str,
    *,
    schemes: Sequence[str] = ("http", "https"),
    allows_login: bool = False,
) -> None:
    """Check an option or a variable that is the URL of a server: a scheme, a host, and perhaps a
    port and a path. Client libraries panic at others, or show them.

    Args:
        example: a right value, for the message.
        allows_login: a user and a password before the host are not refused.

    Raises:
        ConfigError: it is something else. The message does not show it.
    """
    match = _ENDPOINT.fullmatch(url)
    place = None if match is None else _HOST.fullmatch(match[3])
    if (
        match is None
        or place is None
        or match[1] not in schemes
        or (match[2] and not allows_login)
        or not is_host(place[1].strip("[]"))
        or not 0 < int(place[2] or 1) < 65536
    ):
        raise ConfigError(
            f"{name!r} is not the URL of a server, without user and query; write {name}={example}"
        )


def parse_store_url(url: str) -> StoreUrl:
    """Take `file:///abs/path?max_bytes=10GiB`, `memory://name` or
    `valkey://user:password@host:6379/prefix` apart; percent escapes are decoded (write %3F for ?,
    %23 for #, %40 for @ and %2F for / where they do not separate). Whether the options exist, the
    store says.

    Raises:
        ConfigError: not a string, no or an unknown scheme, a relative path, a host where there can
            be none or none where there must be one, an option given twice or without a value.
    """
    if not isinstance(url, str):
        raise ConfigError(
            "a store URL is text such as file:///var/cache/kvferry, not a value of type "
            f"{type(url).__name__}"
        )
    where = f"store URL {shown_url(url)!r}"
    if not url.isprintable():
        raise ConfigError(f"{where} holds a character that cannot be printed; escape it as %XX")
    match = _SCHEME.fullmatch(url)
    if match is None:
        raise ConfigError(f"{where}: {_without_scheme(shown_url(url))}")
    scheme, rest = match[1].lower(), match[2]
    if scheme not in STORE_SCHEMES:
        raise ConfigError(f"{where}: {unknown('scheme', match[1], STORE_SCHEMES)}")
    if "#" in rest:
        raise ConfigError(f"{where}: a store URL has no fragment; write # as %23")
    raw_path, _, query = rest.partition("?")
    if scheme in SERVER_SCHEMES:
        return _parse_server_url(where, scheme, raw_path, query)
    path = _unquote(where, raw_path, repr(raw_path))
    if "\0" in path:
        raise ConfigError(f"{where}: a path cannot hold a zero byte")
    if scheme == "file":
        _check_file_path(where, raw_path, path)
    elif "/" in path:
        raise ConfigError(f"{where}: the name of a memory store holds no /; write memory://name")
    return StoreUrl(scheme=scheme, path=path, options=_parse_options(where, query))


def _parse_server_url(where: str, scheme: str, raw: str, query: str) -> StoreUrl:
    authority, _, raw_path = raw.partition("/")
    userinfo, _, raw_hosts = authority.rpartition("@")
    username, _, password = userinfo.partition(":")
    hosts = []
    for raw_host in raw_hosts.split(","):
        match = _HOST.fullmatch(raw_host)
        port = 0 if match is None else int(match[2] or 6379)
        is_place = match is not None and (scheme in OBJECT_SCHEMES or is_host(match[1].strip("[]")))
        if match is None or not is_place or not 0 < port < 65536 or "@" in raw_path + query:
            # Without the text: it may be a piece of a password that was not escaped.
            if scheme in OBJECT_SCHEMES:
                raise ConfigError(f"{where}: names no bucket; write {scheme}://bucket/prefix")
            if scheme == "mooncake":
                raise ConfigError(f"{where}: names no master; write mooncake://host:50051/prefix")
            raise ConfigError(
                f"{where}: names no server; write {scheme}://host:6379/prefix, and escape /, ?, @ "
                "and : in a password as %2F, %3F, %40 and %3A"
            )
        hosts.append((match[1].strip("[]"), None if match[2] is None else port))
    # Unlike other parts, user and password are in no message, not even where they are no UTF-8.
    return StoreUrl(
        scheme=scheme,
        path=_unquote(where, raw_path, repr(raw_path)).strip("/"),
        options=_parse_options(where, query),
        hosts=tuple(hosts),
        username=unquote(username, errors="replace"),
        password=unquote(password, errors="replace"),
    )


def _unquote(where: str, text: str, what: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        # Decoded somehow, it would name another directory than the one that was meant.
        raise ConfigError(f"{where}: the escapes in {what} are not UTF-8") from None


def _without_scheme(url: str) -> str:
    if url.startswith("/"):
        return f"no scheme; did you mean {'file://' + url!r}?"
    if url.lower().startswith(("file:", "memory:")):
        scheme, _, rest = url.partition(":")
        slashes = "//" if scheme.lower() == "memory" or rest.startswith("/") else "///"
        return f"// is missing after the scheme; did you mean {f'{scheme}:{slashes}{rest}'!r}?"
    return "no scheme; write file:///absolute/directory, memory://name or valkey://host/prefix"


def _check_file_path(where: str, raw_path: str, path: str) -> None:
    if path.strip("/") == "":
        raise ConfigError(f"{where}: names no directory; write file:///absolute/directory")
    if path.startswith("/"):
        return
    if path.startswith("~"):
        raise ConfigError(f"{where}: ~ is not expanded; write the absolute directory after file://")
    host, slash, rest = raw_path.partition("/")
    if _HOST.fullmatch(host) is None or "@" in rest:
        raise ConfigError(
            f"{where}: paths are absolute and local; write file:///absolute/directory"
        )
    raise ConfigError(
        f"{where}: {host!r} stands where a host would; paths are absolute and local: write "
        f"{'file:///' + rest!r}"
        + ("" if host == "localhost" else f" or {'file:///' + host + slash + rest!r}")
    )


def _parse_options(where: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    # Without what was given: behind the ? a secret may stand by mistake.
    for number, part in enumerate(query.split("&") if query else (), 1):
        name, equals, value = part.partition("=")
        name, value = (_unquote(where, text, f"option {number}") for text in (name, value))
        if not name or not equals or not value:
            raise ConfigError(f"{where}: option {number} is not of the form name=value")
        if "\0" in value:
            raise ConfigError(f"{where}: option {number} holds a zero byte")
        if name in options:
            shown = repr(name) if _OPTION.fullmatch(name) else number
            raise ConfigError(f"{where}: option {shown} is given twice")
        options[name] = value
    return options
