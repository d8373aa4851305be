"""Stages whose loss is more than the cross entropy of given tokens: reinforcement learning by group comparison."""
