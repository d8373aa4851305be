"""Runtime: join a world of ranks, start local ranks, apply a Plan to a model."""

from hyper_parallel.runtime._launch import launch, preload

__all__ = ["launch", "preload"]
