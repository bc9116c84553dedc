"""What the counters say, in the form that others read."""
