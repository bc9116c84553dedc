"""Where records are kept: the contract, stores in directories, in memory and on servers, tiers."""
