"""What a host engine and a connector promise each other: two roles, a plan down, an output up."""

from kvferry.layout.host import yield_req_data

__all__ = ["yield_req_data"]
