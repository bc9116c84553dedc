"""Where a token's KV lies: named layouts, runs of blocks, and the copies between them and rows."""
