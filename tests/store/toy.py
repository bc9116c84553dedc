"""A new kind of store in one file, as a user may add it. `test_url` opens it by a URL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.store.base import Buffer, PutResult
from kvferry.store.kind import Opening, StoreKind, StoreUrl
from kvferry.store.servers.remote import RemoteStore, open_remote
from tests.store.servers.remote_client import DictClient


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyOptions:
    refuses: bool = False


class ToyClient(DictClient):
    def __init__(self, address: str, *, refuses: bool) -> None:
        super().__init__()
        self.address = address
        self.refuses = refuses

    def put(
        self, name: str, buffers: Sequence[Buffer], deadline: float, *, replaces: bool = False
    ) -> PutResult:
        if self.refuses:
            return PutResult.NO_SPACE
        return super().put(name, buffers, deadline, replaces=replaces)


def _open_url(url: StoreUrl, options: ToyOptions, opening: Opening) -> RemoteStore:
    (host, port), *_ = url.hosts
    return open_remote(url, ToyClient(f"{host}:{port}", refuses=options.refuses), opening)


KIND = StoreKind(options=ToyOptions, open=_open_url, hosts="toy; write {scheme}://host/prefix")
