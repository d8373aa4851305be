"""Context parallelism: sequences sharded over ranks, with attention over entire sequences."""
