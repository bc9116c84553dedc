"""A conformance kit for V1 KV connectors: `python -m kvferry.testing.connector MODULE:CLASS`.

`rules` says what a rule is; the cases of `life`, `partition` and `faults` are the rules. `runner`
runs each in processes of its own, on a bench (`lab`) with an engine (`vllm_host`, `own_host`) whose
KV is made up (`content`). See docs/conformance.md.
"""

from kvferry.testing.connector import faults, life, partition
from kvferry.testing.connector.rules import rules_of

RULES = [*rules_of(life), *rules_of(partition), *rules_of(faults)]

QUICK = (
    "starts", "reuse", "restart", "chunked-prefill", "preempted", "preempted-in-chunks",
    "local-blocks", "aborts", "quick-look-ups", "salt", "same-end", "truncated", "flipped",
    "gone-after-promise",
)  # fmt: skip
"""Rules for each push: narrow ones, of which each takes a second or two."""
