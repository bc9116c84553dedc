"""The half of every rank: carries out the plan, between store, slots and blocks."""
