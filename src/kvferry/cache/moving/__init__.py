"""Every rank's half: carries out the plan, and moves KV between store, slots and blocks."""
