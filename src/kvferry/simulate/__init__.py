"""Replays recorded requests against caches of any size: how much a store or host pool would hit.

Read in this order: `trace`, `reuse` (exact figures for LRU and Belady's optimum), `policies`
(replay of the eviction orders that run), `report`.
"""
