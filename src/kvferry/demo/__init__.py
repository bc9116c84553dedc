"""The demonstration: one long document, several questions, three processes.

`run` is the whole of it; `phase` is also the program of each process.
"""
