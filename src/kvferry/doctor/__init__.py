"""Looks for what is wrong in a set-up: the machine, the stores, vLLM and its configuration.

It changes nothing but for a few records of its own, which it removes again.
"""
