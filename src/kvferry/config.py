"""From text to typed options: sizes, store URLs, frozen dataclasses. Pure; reads no file.

Every refusal is a `ConfigError` of one line: where, what was given, what is allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
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
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.ASCII | re.DOTALL)

OBJECT_SCHEMES = ("s3", "gs", "az")
"""Schemes whose URLs name buckets."""
SERVER_SCHEMES = ("valkey", "valkeys", "redis", "rediss", "mooncake", *OBJECT_SCHEMES)
"""Schemes whose URLs name servers; valkeys and rediss speak TLS."""
STORE_SCHEMES = ("file", "memory", *SERVER_SCHEMES)
_LOCAL = re.compile(r"(?:file|memory)(?::(?!//[^/]*@)|$)|/", re.IGNORECASE)
_SECRET_OPTION = re.compile(
    r"([?&](?![^=&]*_file=)[^=&]*(?:pass|pwd|secret|token|key|sas|sig|auth|cred)[^=&]*=)[^&]*",
    re.IGNORECASE,
)
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+)(?::(\d{1,5}))?", re.ASCII)


def parse_size(text: str | int) -> int:
    """Bytes meant by `text`: a whole number, or one with B, KB, MB, GB, TB (powers of 1000) or
    KiB, MiB, GiB, TiB (powers of 1024), in any case. Fractions of a byte are dropped.

    Raises:
        ConfigError: negative, too large for a file size, or not a size.

    >>> parse_size("1.5GiB"), parse_size("500 MB"), parse_size(4096)
    (1610612736, 500000000, 4096)
    """
    allowed = "write a number of bytes such as 4096, 500MB or 10GiB"
    match = _SIZE.fullmatch(str(text).strip().lower())
    if match is None:
        fault = "is negative" if str(text).strip().startswith("-") else "is not a size"
        raise ConfigError(f"{text!r} {fault}; {allowed}")
    number, unit = match.groups()
    if unit not in _UNITS:
        # A lone G is refused: half of all tools read it as 1000^3, the other half as 1024^3.
        hint = f"; write {unit}ib (1024) or {unit}b (1000)" if f"{unit}ib" in _UNITS else ""
        raise ConfigError(f"{text!r} has the unknown unit {unit!r}{hint or '; ' + allowed}")
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


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """One sentence for a name that is not in `known`: the nearest one that is, or all of them."""
    by_lower = {entry.lower(): entry for entry in sorted(known)}
    if not by_lower:
        return f"unknown {what} {name!r}; there are none"
    hint = f"known: {', '.join(by_lower.values())}"
    for near in difflib.get_close_matches(str(name).lower(), by_lower, n=1, cutoff=0.6):
        hint = f"did you mean {by_lower[near]!r}?"
    return f"unknown {what} {name!r}; {hint}"


def build_config(cls: type[T], mapping: Mapping[str, Any], *, where: str) -> T:
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

    Raises:
        ConfigError: an unknown, missing or unusable option.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for name, value in mapping.items():
        if name not in fields:
            raise ConfigError(f"{where}: {unknown('option', name, fields)}")
        is_size = fields[name].metadata.get("unit") == "bytes"
        try:
            values[name] = _convert(hints[name], value, is_size=is_size)
        except ValueError as error:  # a ConfigError of parse_size is one too
            raise ConfigError(f"{where}: option {name!r}: {error}") from None
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
    """A store URL taken apart. `str` puts it together again, without user and password.

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
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hosts: tuple[tuple[str, int | None], ...] = ()
    username: str = dataclasses.field(default="", repr=False)
    password: str = dataclasses.field(default="", repr=False)

    def __str__(self) -> str:
        query = "&".join(
            f"{quote(name, safe='')}={quote(value, safe='/:')}"
            for name, value in self.options.items()
        )
        # A path that is not UTF-8 is shown as the bytes it is, though no URL leads to it.
        path = quote(self.path, errors="surrogateescape")
        hosts = ",".join(
            (f"[{host}]" if ":" in host else host) + ("" if port is None else f":{port}")
            for host, port in self.hosts
        )
        slash = "/" if self.hosts and path else ""
        return f"{self.scheme}://{hosts}{slash}{path}{'?' + query if query else ''}"


def without_credentials(url: str) -> str:
    """`url` for messages and logs. Hides too much rather than too little: a password whose special
    characters were not escaped moves the bounds of the parts.

    >>> without_credentials("rediss://user:pass/word@host/kv?token=x&cluster=true")
    'rediss://***@host/kv?token=***&cluster=true'
    """
    if _LOCAL.match(url):
        return url
    userinfo, at, rest = url.rpartition("@")
    scheme, separator, _ = userinfo.partition("://")
    shown = f"{scheme if separator else ''}{separator}***@{rest}" if at else url
    return _SECRET_OPTION.sub(r"\1***", shown)


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
    where = f"store URL {without_credentials(url)!r}"
    if not url.isprintable():
        raise ConfigError(f"{where} holds a character that cannot be printed; escape it as %XX")
    match = _SCHEME.fullmatch(url)
    if match is None:
        raise ConfigError(f"{where}: {_without_scheme(without_credentials(url))}")
    scheme, rest = match[1].lower(), match[2]
    if scheme not in STORE_SCHEMES:
        raise ConfigError(f"{where}: {unknown('scheme', match[1], STORE_SCHEMES)}")
    if "#" in rest:
        raise ConfigError(f"{where}: a store URL has no fragment; write # as %23")
    raw_path, _, query = rest.partition("?")
    if scheme in SERVER_SCHEMES:
        return _parse_server_url(where, scheme, raw_path, query)
    path = _unquote(where, raw_path)
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
        if match is None or not 0 < port < 65536 or "@" in raw_path + query:
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
        path=_unquote(where, raw_path).strip("/"),
        options=_parse_options(where, query),
        hosts=tuple(hosts),
        username=unquote(username, errors="replace"),
        password=unquote(password, errors="replace"),
    )


def _unquote(where: str, text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        # Decoded somehow, it would name another directory than the one that was meant.
        raise ConfigError(f"{where}: the escapes in {text!r} are not UTF-8") from None


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
    host = host.rpartition("@")[2]
    raise ConfigError(
        f"{where}: {host!r} stands where a host would; paths are absolute and local: write "
        f"{'file:///' + rest!r}"
        + ("" if host == "localhost" else f" or {'file:///' + host + slash + rest!r}")
    )


def _parse_options(where: str, query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, equals, value = part.partition("=")
        name = _unquote(where, name)
        if not name or not equals or not value:
            shown = without_credentials("?" + part)[1:]
            raise ConfigError(f"{where}: option {shown!r} is not of the form name=value")
        if name in options:
            raise ConfigError(f"{where}: option {name!r} is given twice")
        options[name] = _unquote(where, value)
    return options
