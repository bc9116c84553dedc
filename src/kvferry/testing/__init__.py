"""Aids for testing stores, connectors and engines, for this package and for others.

`stores`: the conformance suite of stores (needs pytest and hypothesis) · `faults`: stores that
stall, fail or damage · `clock`: time that a test moves · `models`: tiny real models. Import what
you need: some of it loads torch.
"""
