"""Where a token's KV lies: named layouts, shards of ranks, runs of blocks, and the copies between
blocks and record rows."""
