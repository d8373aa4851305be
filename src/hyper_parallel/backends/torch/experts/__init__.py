"""Expert parallelism: token dispatch, routing statistics and load balancing."""
