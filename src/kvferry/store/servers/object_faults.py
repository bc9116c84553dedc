"""What errors of obstore, the library of buckets, mean to their operator. It gives them as texts,
which can quote a request and its key id: so only a code or a cause out of a text is shown.
"""

from __future__ import annotations

import re

from kvferry.errors import Fault, FaultKind

CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
OF_SETUP = (FaultKind.LOGIN, FaultKind.UNUSABLE)
"""What stays wrong until someone corrects it."""

_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_DENIED = re.compile(
    r"status code: 40[13]|PermissionDenied|Unauthenticated|169\.254\.169\.254|metadata\.google"
)
_KINDS = {
    FaultKind.UNUSABLE: re.compile(f"BadScheme|{_NO_BUCKET.pattern}"),
    FaultKind.LOGIN: _DENIED,
    FaultKind.PROTOCOL: re.compile(r"InvalidMessage|peer certificate|connection closed"),
    FaultKind.AWAY: re.compile(r"connection refused|connection reset|dns error", re.IGNORECASE),
    FaultKind.LATE: re.compile(r"timed ?out", re.IGNORECASE),
}
"""What is looked for in a text, in this order."""

# The parts of a text that may be shown.
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_CONNECTION = re.compile(
    r"connection refused|connection reset|connection closed|dns error|timed ?out", re.IGNORECASE
)


def fault_of(error: BaseException, scheme: str) -> Fault:
    """Return what an error says, and what to do about it. Only a panic of the library is a bug."""
    text = str(error)
    found = _CODE.search(text) or _STATUS.search(text) or _CONNECTION.search(text)
    reason = found.group(found.lastindex or 0) if found else type(error).__name__
    if not isinstance(error, Exception):
        return Fault(FaultKind.BUG, reason)
    kind = next((kind for kind, said in _KINDS.items() if said.search(text)), FaultKind.REFUSED)
    hint = ""
    if "BadScheme" in text:
        hint = "; an http:// endpoint belongs into the URL: ?endpoint=http://..."
    elif kind is FaultKind.UNUSABLE:
        hint = "; create it or correct its name"
    elif kind is FaultKind.LOGIN:
        hint = f"; check {CREDENTIALS[scheme]} and the rights to list, get and put"
    return Fault(kind, f"{reason}{hint}")


def is_without_bucket(error: BaseException) -> bool:
    """Whether the bucket is absent, and not an object alone."""
    return _NO_BUCKET.search(str(error)) is not None


def is_denied(error: BaseException) -> bool:
    """Whether this user may not do what was asked."""
    return _DENIED.search(f"{type(error).__name__} {error}") is not None
