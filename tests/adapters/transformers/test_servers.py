"""What one `StoredKV` stored on servers, another reads."""

from __future__ import annotations

import pytest

from tests.adapters.transformers.generating import assert_same_as_cold, prompt, reuse
from tests.servers.patience import make_patient
from tests.servers.places import AllServers, name_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["valkey", "cluster", "s3", "mooncake", "tiers"])
def test_what_is_stored_on_a_server_is_read_again(
    kind, load_model, valkey_server, valkey_cluster, seaweed, mooncake, tmp_path, monkeypatch,
    request,
):  # fmt: skip
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    make_patient(monkeypatch)
    servers = AllServers(valkey_server, valkey_cluster, seaweed, mooncake, tmp_path)
    store, model, input_ids = (
        servers.urls(name_of(request.node.name))[kind],
        load_model(),
        prompt(101),
    )
    assert reuse(model, store, input_ids).num_loaded == 0
    again = reuse(model, store, input_ids)
    assert again.num_loaded == 96
    assert_same_as_cold(model, input_ids, again)
