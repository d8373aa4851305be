"""Context parallelism: sequences are sharded over ranks, and attention covers entire sequences."""
