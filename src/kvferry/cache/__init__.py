"""Prefix reuse through a store: keys → index → host pool → blocks, and back.

`deciding` is the half in the scheduler's process, which decides what to load and save. `moving` is
the half on every rank, which moves the bytes. Neither imports the other: only `messages` cross.
`build` makes both. docs/architecture.md says in which order to read.
"""
