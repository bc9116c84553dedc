"""Computes for `kvferry simulate` how much a cache of any size would have hit on recorded requests.

Read in this order: `trace`, `reuse` (exact figures for LRU and Belady's optimum), `simulator`.
"""
