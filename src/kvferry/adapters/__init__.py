"""Hosts of kvferry, each in a package of its own: they translate, and decide nothing."""
