"""What a store holds and what became of the rest, as one page: for `kvferry report`."""
