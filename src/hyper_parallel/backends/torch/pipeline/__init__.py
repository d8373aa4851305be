"""Pipeline parallelism: a model split into stages, executed by a schedule."""
