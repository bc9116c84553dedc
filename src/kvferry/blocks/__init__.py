"""Where a chunk lies in this rank's engine blocks, and the copies between blocks and slots.

A slot is host memory for what one rank holds of one record. `tables` is arithmetic over block
tables, the same in both roles; `rows` knows which bytes of a record a rank holds and where they lie
in a slot; `paged` binds tables to the engine's tensors; `copies` moves chunks between slots and
blocks; `audit` and `tolerance` compare KV that was computed again with its record.
"""
