"""Keys and proofs: each with what must not pass."""

from __future__ import annotations

import os
import pwd
import threading

import pytest

from kvferry.errors import ConfigError
from kvferry.transfer.auth import SharedKey, read_key, user_key

KEY, OTHER = SharedKey(b"k" * 32), SharedKey(b"o" * 32)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where the key of the user is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvferry"


def is_same(one, other):
    return one.proof("client", b"x") == other.proof("client", b"x")


def test_a_proof_is_of_its_side_key_and_parts():
    proof = KEY.proof("client", b"one", b"two")
    assert KEY.is_proof(proof, "client", b"one", b"two")
    assert not KEY.is_proof(proof, "server", b"one", b"two")
    assert not KEY.is_proof(proof, "client", b"onet", b"wo")
    assert not KEY.is_proof(proof, "client", b"two", b"one")
    assert not OTHER.is_proof(proof, "client", b"one", b"two")


def test_nothing_shows_a_key():
    assert "kkk" not in f"{KEY!r}{KEY}"


@pytest.mark.parametrize("size", [0, 31, 4097])
def test_a_key_that_can_be_guessed_or_is_none_is_refused(size):
    with pytest.raises(ConfigError, match="32 to 4096 bytes"):
        SharedKey(b"k" * size)


def test_every_byte_of_a_random_key_counts_but_not_the_newline_of_a_text(tmp_path):
    def read(content):
        path = tmp_path / "some.key"
        path.touch(0o600)
        path.write_bytes(content)
        return read_key(path)

    assert is_same(read(b"a" * 44 + b"\n"), read(b"a" * 44))
    for space in b" \t\n\r\v\f":
        key = bytes([space]) + b"\xff" * 30 + bytes([space])
        assert is_same(read(key), SharedKey(key))


def test_one_of_racing_processes_makes_the_key_of_the_user(home):
    keys = []
    barrier = threading.Barrier(8)

    def make():
        barrier.wait()
        keys.append(user_key())

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert all(is_same(key, keys[0]) for key in keys)
    assert os.listdir(home) == ["peer.key"]
    status = os.stat(home / "peer.key")
    assert status.st_mode & 0o777 == 0o600
    assert status.st_size == 32


def test_without_a_home_the_key_is_in_no_directory_of_that_name(tmp_path, monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match="no home directory was found"):
        user_key()
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_can_read_is_refused(home, mode):
    user_key()
    os.chown(home / "peer.key", -1, 12345)
    (home / "peer.key").chmod(mode)
    with pytest.raises(ConfigError, match="this user alone"):
        user_key()


def test_a_link_or_a_pipe_in_place_of_the_key_is_refused(home):
    user_key()
    (home / "peer.key").rename(home / "real.key")
    (home / "peer.key").symlink_to(home / "real.key")
    with pytest.raises(ConfigError, match=r"peer\.key"):
        user_key()
    (home / "peer.key").unlink()
    os.mkfifo(home / "peer.key", 0o600)
    with pytest.raises(ConfigError, match="this user alone"):
        user_key()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_key_of_another_user_is_refused(home):
    user_key()
    os.chown(home / "peer.key", 12345, 12345)
    with pytest.raises(ConfigError, match="this user alone"):
        user_key()
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        read_key(home / "peer.key")


def test_a_directory_that_others_can_change_holds_no_key(home):
    home.mkdir()
    home.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        user_key()
    assert os.listdir(home) == []


def test_a_key_that_an_operator_names(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(b"k" * 32 + b"\n")
    path.chmod(0o440)  # as an orchestrator mounts secrets for a group
    assert is_same(read_key(path), KEY)
    for mode in (0o444, 0o460, 0o442):
        if os.getuid() == 0:
            os.chown(path, -1, 12345)
        path.chmod(mode)
        if mode == 0o460 and os.getuid() != 0:
            continue  # the group may be this user's own
        with pytest.raises(ConfigError, match="others must not read or change it"):
            read_key(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_key(tmp_path / "absent")
