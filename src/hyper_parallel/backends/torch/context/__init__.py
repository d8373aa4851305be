"""Context parallelism: sequences cut over ranks, and attention over all of them."""
