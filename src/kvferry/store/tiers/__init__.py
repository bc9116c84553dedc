"""Several stores as one, each with a circuit breaker."""
