"""Of several peers, a request's line and the journal name the one that was read."""

from __future__ import annotations

import logging
import re

import msgspec

from kvferry.journal import JournalLine

from .keeping import PROMPT
from .test_peers import HIT, decode, peers, prefill  # noqa: F401  # a fixture

OTHER_PROMPT = list(range(200, 241))


def test_the_peer_that_was_read_is_named(peers, tmp_path, caplog):  # noqa: F811
    caplog.set_level(logging.INFO)
    prefillers = [peers(), peers()]
    ports = [each.server.address[1] for each in prefillers]
    path = tmp_path / "requests.jsonl"
    decoder = peers(None, ports, tiers=True, load_timeout_seconds=30.0, record=str(path))
    for prefiller, prompt, port in zip(prefillers, (PROMPT, OTHER_PROMPT), ports, strict=True):
        answer = prefill(prefiller, prompt)
        # A client can write any address. The engine reads only those of its configuration.
        written = {**answer, "remote_host": "10.9.9.9"}
        caplog.clear()
        assert decode(decoder, written, prompt, f"of {port}") == HIT
        (line,) = [each for each in caplog.messages if "by another engine" in each]
        assert re.search(rf"{HIT} from peer 127\.0\.0\.1:{port} at \d+\.\d{{3}} GB/s", line)
    assert decoder.observer["hit_tokens/peer"] == 2 * HIT
    named = [each for each in decoder.observer.sums() if "127.0.0.1" in each]
    assert {each.partition("/")[0] for each in named} == {"tier_reads", "tier_read_bytes"}
    decoder.scheduler.close()
    lines = [msgspec.json.decode(each, type=JournalLine) for each in path.read_bytes().splitlines()]
    assert [each.hits for each in lines] == [{f"peer 127.0.0.1:{port}": HIT} for port in ports]
