"""A LoRA adapter is known by its content, or not at all."""

from __future__ import annotations

import shutil
import threading

import pytest

from kvferry.adapters.vllm.request_identity import RECHECK_SECONDS, LoraIdentities
from kvferry.testing.clock import FakeClock
from kvferry.testing.stores.hooks import wait_until

from .fakes import write_model


class Lora:
    def __init__(self, path, number=1, *, load_inplace=False):
        self.lora_int_id = number
        self.lora_path = str(path)
        self.load_inplace = load_inplace


def write_adapter(path, fill):
    write_model(path, fill=fill)
    (path / "adapter_config.json").write_text('{"r": 8}')
    return path


def settled(identities, request):
    """Ask until there is an answer, as later requests would."""
    wait_until(lambda: identities(request) is not None, "an answer")
    return identities(request)


def test_adapters_are_distinguished_by_content(tmp_path):
    first, second = (write_adapter(tmp_path / str(fill), fill) for fill in (1.0, 2.0))
    copied = tmp_path / "copy"
    shutil.copytree(first, copied)
    identities = LoraIdentities()
    digests = [settled(identities, Lora(p, n)) for n, p in enumerate((first, second, copied))]
    identities.close()
    assert None not in digests
    assert digests[0] == digests[2] != digests[1]


def test_the_first_request_under_an_adapter_waits_for_nothing(tmp_path):
    identities = LoraIdentities()
    assert identities(Lora(write_adapter(tmp_path / "a", 1.0))) is None
    identities.close()


@pytest.mark.parametrize("lora", [Lora("", 1), Lora("/a", 2, load_inplace=True)])
def test_an_adapter_without_a_content_of_its_own_has_no_identity(lora):
    identities = LoraIdentities()
    assert identities(lora) is None
    assert all(thread.name != "kvferry-lora" for thread in threading.enumerate())
    identities.close()


def test_an_adapter_that_changes_under_a_running_engine_is_not_cached_again(tmp_path, caplog):
    path = write_adapter(tmp_path / "a", 1.0)
    clock = FakeClock()
    identities = LoraIdentities(clock)
    assert settled(identities, Lora(path)) is not None
    clock.advance(RECHECK_SECONDS)
    write_adapter(path, 2.0)

    def is_told() -> bool:
        # Not even the first request behind the change: its files are looked at again first.
        assert identities(Lora(path)) is None
        return "its files are unreliable" in caplog.text

    wait_until(is_told, "the change is seen")
    for _ in range(50):
        assert identities(Lora(path)) is None
    identities.close()


def test_an_adapter_whose_files_stay_has_its_identity_again_after_a_look(tmp_path):
    path = write_adapter(tmp_path / "a", 1.0)
    clock = FakeClock()
    identities = LoraIdentities(clock)
    first = settled(identities, Lora(path))
    assert identities(Lora(path)) == first
    clock.advance(RECHECK_SECONDS)
    assert identities(Lora(path)) is None
    assert settled(identities, Lora(path)) == first
    identities.close()
