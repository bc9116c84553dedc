"""`kvferry bench stores`, and the table of a measurement beside a limit of the machine.

What developers measure stands in `benchmarks/` of the repository.
"""
