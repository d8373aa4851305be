"""Experts on many ranks: dispatch of tokens, routing statistics and the balance of the load."""
