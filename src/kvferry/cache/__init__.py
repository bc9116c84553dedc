"""Prefix reuse through a store: keys → index → host pool → blocks, and back.

`deciding` is the half in the scheduler's process, in memory; `moving` is the half on every rank,
which moves bytes. They do not import each other: `messages` is all that crosses. `build` makes
both. docs/architecture.md says in which order to read.
"""
