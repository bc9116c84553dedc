"""Checks of `kvferry doctor`: the machine, the stores, vLLM and its configuration.

They change nothing, except that they store a few records of their own and remove them again.
"""
