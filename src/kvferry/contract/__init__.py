"""What a host engine and a connector promise each other: two roles, a plan down, an output up."""
