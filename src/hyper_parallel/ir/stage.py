"""Stages: which layers a virtual pipeline stage holds, and what one microbatch costs on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one microbatch costs on one stage. A full backward takes both gradient times.

    Attributes:
        forward_s: Seconds of F.
        input_grad_s: Seconds of I.
        weight_grad_s: Seconds of W.
        send_forward_s: Seconds on the link to carry the output to the next stage, when that is on another rank.
        send_backward_s: Seconds on the link to carry the gradient to the previous stage.
        activation_bytes: Held on the device from the start of F to the end of B or I.
        weight_grad_input_bytes: The part of it that stays from the end of I to the end of W.
        unshard_s: Seconds to gather the parameters.
        reduce_grad_s: Seconds to reduce the gradients.
        offload_s: Seconds to copy the activations to the host, and as many back.
        parameter_bytes: Gathered parameters, held from UNSHARD to RESHARD.
        exposed_forward_s: Seconds of collectives inside the forward that no computation hides.
        exposed_backward_s: The same inside B, or I.
        update_s: Seconds of the optimizer on the parameters of the stage, once per step.
    """

    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    send_forward_s: float = 0.0
    send_backward_s: float = 0.0
    activation_bytes: int = 0
    weight_grad_input_bytes: int = 0
    unshard_s: float = 0.0
    reduce_grad_s: float = 0.0
    offload_s: float = 0.0
    parameter_bytes: int = 0
    exposed_forward_s: float = 0.0
    exposed_backward_s: float = 0.0
    update_s: float = 0.0

    @property
    def microbatch_s(self) -> float:
        """Seconds of one microbatch, forward and backward, exposed collectives included."""
        return (
            self.forward_s
            + self.input_grad_s
            + self.weight_grad_s
            + self.exposed_forward_s
            + self.exposed_backward_s
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """One virtual stage of a plan.

    Attributes:
        first_layer: Index of its first decoder layer.
        layers: How many layers it holds; embedding and head lie on the first and the last stage besides.
        recomputed: How many of them drop their activations and make them again in backward.
        cost: What one microbatch costs on it.
    """

    first_layer: int
    layers: int
    recomputed: int
    cost: StageCost
