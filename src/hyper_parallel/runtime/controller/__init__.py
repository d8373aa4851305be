"""Single-controller programs: the controller process calls methods of roles, which run on separate ranks.

A role is a class with an object on each of its ranks, for example a learner or a sampler.
"""

from hyper_parallel.runtime.controller._controller import Controller, ahead
from hyper_parallel.runtime.controller._role import Role, RoleCall

__all__ = ["Controller", "Role", "RoleCall", "ahead"]
