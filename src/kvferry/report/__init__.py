"""The page of `kvferry report`: what a store holds, and what was removed or missed."""
