"""Where a token's KV lies: named layouts, shards of ranks, runs of blocks, and the copies between
blocks and record rows."""

from kvferry.moved import moved_names

__getattr__ = moved_names(__name__)
