"""Aids for testing stores, connectors and engines, for this package and for others.

`stores`: the conformance suite of stores (needs pytest and hypothesis) · `connector`: the kit for
V1 connectors · `own_engine`: drives an engine of your own · `world`: the whole cache under a seed ·
`faults`: stores that stall, fail or damage · `clock`: a clock that a test moves · `models`: tiny
random models. Import only what you need, because some of it
loads torch.
"""

import sys

if (pytest := sys.modules.get("pytest")) is not None:
    # So that a failed assert of the suite shows the values.
    pytest.register_assert_rewrite("kvferry.testing.stores")
