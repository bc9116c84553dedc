"""The demonstrations that `kvferry demo` and `kvferry demo-disaggregated` run."""
