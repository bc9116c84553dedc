"""What `kvferry demo` runs."""
