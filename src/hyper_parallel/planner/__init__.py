"""Planner: legal strategies of a model on a machine, their cost, and the best Plan."""
