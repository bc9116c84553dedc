"""A directory that several users share: it works where the modes allow it, and where they do not,
one line has user, mode and umask."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.errors import StorePlaceError
from kvferry.observe import Counters
from kvferry.store.base import PutResult
from kvferry.store.file import FileSettings, FileStore
from kvferry.store.tiers.tiered import TieredStore
from kvferry.testing.stores import make_key, make_value, read_value
from tests.cli.test_doctor import faults

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")

ANN, BEN, GROUP = 100_001, 100_002, 100_100


@pytest.fixture
def place():
    """A directory that any user can reach, of the group of all."""
    home = Path(tempfile.mkdtemp(prefix="kvferry-users-"))
    home.chmod(0o755)
    root = home / "kv"
    root.mkdir()
    os.chown(root, ANN, GROUP)
    root.chmod(0o2770)
    yield root
    shutil.rmtree(home)


def as_user(user: int, work: Callable[[], object]) -> str:
    """Do `work` in a process of this user, and return what it returns or raises, as text."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([GROUP])
            os.setgid(user)
            os.umask(0o077)
            os.setuid(user)
            said = str(work())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        finally:
            os.write(write_end, said.encode())
            os._exit(0)
    os.close(write_end)
    with open(read_end, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def opened(root: Path, mode: str = "0770", **options: object) -> FileStore:
    settings = FileSettings(mode=mode)
    return FileStore(root, background=False, settings=settings, **options)


def put(root: Path, *numbers: int, mode: str = "0770") -> list[PutResult]:
    with opened(root, mode, max_bytes=10_000) as store:
        return [store.put(make_key(number), [make_value(1000)]).result for number in numbers]


def test_users_of_a_group_share_a_directory_with_the_mode_0770(place):
    assert as_user(ANN, lambda: put(place, 0, 1)) == str([PutResult.STORED] * 2)

    def use():
        with opened(place, max_bytes=10_000) as store:
            store.maintain()
            assert read_value(store, make_key(0)) == make_value(1000)
            assert store.put(make_key(0), [make_value(1000)]).result is PutResult.EXISTS
            for number in range(2, 14):  # which evicts those of the other user, too
                assert store.put(make_key(number), [make_value(1000)]).result is PutResult.STORED
            store.discard(make_key(13), "test")
            assert store.delete(make_key(12))
            store.describe(bytes(32), "a model")
            assert store.catalogue().description(bytes(32)) == "a model"
            return store.stat().num_records

    assert as_user(BEN, use) == "8"
    assert as_user(ANN, lambda: put(place, 20)) == str([PutResult.STORED])
    for path in [place, *place.rglob("*")]:
        found = path.stat()
        assert found.st_gid == GROUP, path
        wanted = 0o770 if path.is_dir() else 0o660
        assert stat.S_IMODE(found.st_mode) & 0o777 == wanted, path


def test_a_new_directory_has_the_mode_too(place):
    root = place / "new"
    assert as_user(ANN, lambda: put(root, 0)) == str([PutResult.STORED])
    assert stat.S_IMODE(root.stat().st_mode) == 0o2770
    private = place / "private"
    as_user(ANN, lambda: put(private, 0, mode="0700"))
    assert stat.S_IMODE(private.stat().st_mode) & 0o777 == 0o700
    kinds = {stat.S_IMODE(path.stat().st_mode) & 0o777 for path in private.rglob("*")}
    assert kinds == {0o700, 0o600}


@pytest.mark.parametrize("mode", ["0700", "0770"])
@pytest.mark.parametrize("user", [0, BEN])
@pytest.mark.parametrize("passes_on_its_group", [True, False])
def test_engines_read_the_notice_that_a_command_of_another_user_wrote(
    place, mode, user, passes_on_its_group
):
    """The command need not know the mode of the engines. Others of the group, if they may use the
    records at all."""
    place.chmod(0o2770 if passes_on_its_group else 0o770)
    as_user(ANN, lambda: put(place, 0, mode=mode))

    def write():
        with FileStore(place, background=False, settings=FileSettings(create=False)) as store:
            return store.catalogue().notice("erased")

    def read():
        with opened(place, mode) as store:
            return store.catalogue().notice()

    if (user, mode) != (BEN, "0700"):
        assert as_user(user, write) == as_user(ANN, read) == "erased"
    private = mode == "0700"
    for path in place.rglob("*.json"):
        found = path.stat()
        assert stat.S_IMODE(found.st_mode) == (0o600 if private else 0o660), path


def test_a_directory_of_another_user_is_refused_with_user_mode_and_umask(place):
    as_user(ANN, lambda: put(place, 0, mode="0700"))
    said = as_user(BEN, lambda: put(place, 1))
    assert said.startswith(f"{StorePlaceError.__name__}: the store directory {place} cannot be ")
    assert f"{place}/kvferry.json belongs to user {ANN} and group {GROUP}, mode 0600" in said
    groups = ", ".join(map(str, sorted((GROUP, BEN))))
    assert f"this process is user {BEN} in groups {groups}, umask 0077" in said
    assert "?mode=0770" in said


def test_records_that_this_user_may_not_read_cost_no_others(place, caplog):
    as_user(ANN, lambda: put(place, *range(8)))
    bad = [path for path in place.rglob("*.safetensors") if path.name[:64] != make_key(7).hex()]
    for path in bad:
        path.chmod(0o600)

    def use():
        lines = []
        with closing(TieredStore([opened(place)], Counters())) as store:
            for number in range(7):
                try:
                    store.read(make_key(number), ())
                except Exception as error:
                    lines.append(str(error))
            assert read_value(store, make_key(7)) == make_value(1000)
            assert store.put(make_key(30), [make_value(1000)]).result is PutResult.STORED
            assert store.tiers()[0].state == "up"
        assert len(lines) == 7
        return lines[0]

    said = as_user(BEN, use)
    assert f"belongs to user {ANN} and group {GROUP}, mode 0600; this process is user {BEN}" in said


def test_a_group_that_the_operator_trusts_is_no_finding(place):
    place.chmod(0o770)
    os.chown(place, 0, 0)
    opened(place).close()
    assert faults(f"{place.as_uri()}?mode=0770&max_bytes=1GiB") == []
    place.chmod(0o777)
    assert [each.code for each in faults(f"{place.as_uri()}?mode=0770&max_bytes=1GiB")] == [
        "untrusted"
    ]
