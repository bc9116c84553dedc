"""Prefix reuse through a store: keys → index → host pool → blocks, and back.

Read in this order: `messages`, `host_pool`, `lookup`, `save_plan`, `audits`, `scheduler`,
`slot_io`, `worker`, `build`.
"""

from kvferry.moved import moved_names

__getattr__ = moved_names(__name__)
