"""A conformance kit for V1 KV connectors: `python -m kvferry.testing.connector MODULE:CLASS`.

`rules` says what a rule is; the cases of `life`, `partition` and `faults` are the rules. `runner`
runs each in processes of its own, on a bench (`lab`) with an engine (`vllm_host`, `own_host`) whose
KV is made up (`content`). See docs/conformance.md.
"""

from kvferry.testing.connector import faults, life, partition
from kvferry.testing.connector.rules import rules_of

RULES = [*rules_of(life), *rules_of(partition), *rules_of(faults)]
