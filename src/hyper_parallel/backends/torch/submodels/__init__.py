"""Towers of multimodal models on separate ranks, connected by features and their gradients.

A tower is an encoder of images, videos or audio with its projector.
"""
