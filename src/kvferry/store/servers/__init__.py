"""Stores on other machines: what they share, and one client for each kind of server."""
