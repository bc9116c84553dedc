"""The container, the pod and the service of `examples`: their options, and where they write."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from pathlib import Path

import yaml

from kvferry.cache.config import CacheConfig
from kvferry.config import build_config
from kvferry.store.file import FileOptions
from kvferry.store.url import parse_store_url, read_options

EXAMPLES = Path(__file__).parents[2] / "examples"


def place_of(config: str) -> Path:
    """The directory that an engine of this configuration stores in; it has a quota."""
    given = json.loads(config)
    assert (given["kv_connector"], given["kv_role"]) == ("KVFerryConnector", "kv_both")
    options = build_config(CacheConfig, given["kv_connector_extra_config"], where="example")
    url = parse_store_url(options.store)
    settings = read_options(url)
    assert isinstance(settings, FileOptions)
    assert settings.max_bytes
    return Path(url.path)


def test_the_pod_writes_to_its_volumes_only():
    claim, pods = yaml.safe_load_all((EXAMPLES / "kubernetes/vllm.yaml").read_text())
    spec = pods["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    mounts = {Path(each["mountPath"]): each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert set(mounts.values()) == volumes.keys()
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert spec["securityContext"]["runAsNonRoot"]
    environment = {each["name"]: Path(each["value"]) for each in container["env"]}
    assert mounts[environment["HOME"]] == "tmp"
    place = place_of(container["args"][-1])
    assert mounts[environment["XDG_CACHE_HOME"]] == mounts[place.parent] == "kv"
    assert volumes["kv"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def test_the_container_names_the_same_places():
    text = (EXAMPLES / "container/Dockerfile").read_text()
    (config,) = re.findall(r"'(\{.*\})'", text)
    environment = dict(re.findall(r"(\w+)=(/\S+)", re.findall(r"^ENV (.*)", text, re.MULTILINE)[0]))
    volume = re.findall(r"^VOLUME (\S+)", text, re.MULTILINE)
    assert [environment["XDG_CACHE_HOME"]] == volume == [str(place_of(config).parent)]
    assert re.findall(r"^USER (\d+)", text, re.MULTILINE) == ["1000"]
    assert f"--read-only --tmpfs {environment['HOME']}:exec " in text  # kernels are compiled there


def test_the_service_writes_to_its_cache_directory_only():
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(EXAMPLES / "systemd/vllm-kvferry.service")
    service = unit["Service"]
    environment = dict(each.split("=", 1) for each in shlex.split(service["Environment"]))
    directory = Path("/var/cache", service["CacheDirectory"])
    place = place_of(shlex.split(service["ExecStart"])[-1])
    assert Path(environment["XDG_CACHE_HOME"]) == place.parent == directory
    assert (service["ProtectSystem"], service["CacheDirectoryMode"]) == ("strict", "0700")
