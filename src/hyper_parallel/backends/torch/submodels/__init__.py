"""Towers of multimodal models on ranks of their own or of the language part, connected by features and gradients.

A tower is an encoder of images, videos or audio with its projector. The language part is the rest of the model.
"""
