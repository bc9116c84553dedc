"""The demonstration: one long document, several questions, three processes.

`run` is the whole of it; `phase` and `convert` run in processes of their own.
"""
