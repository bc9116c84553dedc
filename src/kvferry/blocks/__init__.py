"""Where a chunk lies in this rank's engine blocks, and the copies between blocks and slots.

`tables` is arithmetic over block tables, the same in both roles; `rows` knows which bytes of a
record one rank holds and where they lie in a slot; `paged` binds tables to the engine's tensors;
`copies` moves chunks between slots and blocks. Every connector that moves KV uses these.
"""
