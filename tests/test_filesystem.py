"""Who else may change or read a file: other users, and groups with other accounts; not a pod's own
group, to which the kubelet gives each file of a volume at each mount (`fsGroup`)."""

from __future__ import annotations

import grp
import logging
import os
import pwd
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.engine import LLM, SamplingParams
from kvferry.filesystem import why_refused, why_shared
from kvferry.identity import weights
from kvferry.testing.models import make_tiny_model
from kvferry.transfer.auth import read_key, user_key
from tests.cli.test_doctor import faults

ME = 1000
APP = SimpleNamespace(pw_name="app", pw_uid=ME, pw_gid=ME)
ROOT = SimpleNamespace(pw_name="root", pw_uid=0, pw_gid=0)
ANN = SimpleNamespace(pw_name="ann", pw_uid=1001, pw_gid=100)


def status(mode: int, *, user: int = ME, group: int = 2000) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 0, user, group, 0, 0, 0, 0))


@pytest.fixture
def be(monkeypatch):
    """Be user 1000 in these groups, on a machine with these accounts and named groups."""

    def be(groups, accounts=(ROOT, APP), named=None, *, is_known=True):
        def get_group(group_id):
            return SimpleNamespace(gr_mem=(named or {})[group_id])

        def get_account(user):
            if not is_known:
                raise KeyError(user)
            return APP

        monkeypatch.setattr(os, "getuid", lambda: ME)
        monkeypatch.setattr(os, "getegid", lambda: groups[0])
        monkeypatch.setattr(os, "getgroups", lambda: list(groups))
        monkeypatch.setattr(grp, "getgrgid", get_group)
        monkeypatch.setattr(pwd, "getpwall", lambda: list(accounts))
        monkeypatch.setattr(pwd, "getpwuid", get_account)

    return be


@pytest.mark.parametrize(
    ("here", "file", "is_shared"),
    [
        # A pod: the group of the volume has no name, and whoever runs may have no account.
        (([2000],), status(0o2775), False),
        (([ME, 2000], (ROOT,)), status(0o2775), False),
        (([0, 2000], (ROOT,)), status(0o2770, user=0), False),
        # OpenShift: any user, in root's group.
        (([0], (ROOT,)), status(0o2775, group=0), False),
        # A group of the user's own, as most distributions make one.
        (([ME], (ROOT, APP), {ME: []}), status(0o775, group=ME), False),
        (([ME], (ROOT, APP), {ME: ["app", "root"]}), status(0o775, group=ME), False),
        # jovyan, in `users`, which has no other account.
        (([100], (ROOT, APP), {100: []}), status(0o775, group=100), False),
        # Others.
        (([100], (ROOT, APP, ANN), {100: []}), status(0o775, group=100), True),
        (([50], (ROOT, APP, ANN), {50: ["ann"]}), status(0o775, group=50), True),
        (([50], (ROOT, APP), {50: ["unknown"]}), status(0o775, group=50), True),
        (([2000],), status(0o2775, group=3000), True),
        (([2000],), status(0o2777), True),
        (([2000],), status(0o2775, user=65534), True),
        (([2000],), status(0o755, user=65534), True),
        (([2000],), status(0o755), False),
    ],
)
def test_who_is_one_of_the_others(be, here, file, is_shared):
    be(*here)
    assert (why_shared(file, 0o022) is not None) is is_shared


def test_a_directory_service_that_lists_no_accounts_may_have_others_in_the_group(be):
    be([100], (ROOT,), {100: []})
    assert why_shared(status(0o775, group=100), 0o022) is not None
    be([100], (ROOT,), {100: []}, is_known=False)  # a container: nobody has an account
    assert why_shared(status(0o775, group=100), 0o022) is None


@pytest.mark.parametrize(
    ("mode", "rights", "said"),
    [
        (0o640, 0o077, "can be read by others (mode 640, group 3000)"),
        (0o640, 0o027, None),
        (0o644, 0o077, "can be read by others (mode 644)"),
        (0o660, 0o027, "can be written by others (mode 660, group 3000)"),
        (0o600, 0o077, None),
    ],
)
def test_it_is_said_who_may_do_what(be, mode, rights, said):
    be([2000])
    assert why_shared(status(mode, group=3000), rights) == said


def mount(volume: Path, group: int) -> None:
    """Do what the kubelet does at each mount."""
    for path in [volume, *volume.rglob("*")]:
        os.chown(path, -1, group)
        path.chmod(stat.S_IMODE(path.stat().st_mode) | (0o2070 if path.is_dir() else 0o060))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to any group")
def test_every_start_of_a_pod_is_like_its_first(tmp_path, monkeypatch, caplog):
    group = 23456
    monkeypatch.setattr(os, "getgroups", lambda: [group])
    volume, model = tmp_path / "volume", make_tiny_model(tmp_path / "model")
    volume.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(volume / "cache"))
    hashed: list[str] = []
    hash_file = weights._hash

    def count(file, before, path, stopped):
        hashed.append(path.name)
        return hash_file(file, before, path, stopped)

    monkeypatch.setattr(weights, "_hash", count)
    monkeypatch.setattr(weights, "RACY_NS", 0)  # the file is as old as those of a real model
    url, keys = f"{(volume / 'kv').as_uri()}?max_bytes=1GiB", []
    prompt = list(range(5, 205))
    options = {"serve": "127.0.0.1:0", "audit": "off", "chunk_tokens": 16}
    with caplog.at_level(logging.WARNING):
        for start in range(3):
            hashed.clear()
            with LLM(str(model), store=url, connector_options=options) as llm:
                (done,) = llm.generate([prompt], SamplingParams(max_tokens=2))
                assert llm.drain(60)
            keys.append(user_key().proof("client"))
            assert done.num_external_tokens == (0 if start == 0 else 192)
            assert hashed == (["model.safetensors"] if start == 0 else [])
            assert faults(url) == []
            mount(volume, group)
        assert len(set(keys)) == 1
        read_key(volume / "cache" / "kvferry" / "peer.key")
    assert caplog.messages == []


def test_what_is_refused_is_said_with_user_group_mode_and_umask(tmp_path):
    file = tmp_path / "file"
    file.touch(0o640)
    mask = os.umask(0)
    os.umask(mask)
    said = why_refused(str(file / "below" / "it"))
    assert said.startswith(f"{file} belongs to user {os.getuid()} and group ")
    assert f"mode 0640; this process is user {os.geteuid()} in groups " in said
    assert said.endswith(f"umask {mask:04o}")
