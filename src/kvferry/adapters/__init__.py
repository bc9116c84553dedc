"""Adapters, one package per host: they translate between the host's types and kvferry's."""
