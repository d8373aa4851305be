"""Single-controller programs: one process calls methods of several roles, each a class that runs on its own ranks."""

from hyper_parallel.runtime.controller._controller import Controller, ahead
from hyper_parallel.runtime.controller._role import Role, RoleCall

__all__ = ["Controller", "Role", "RoleCall", "ahead"]
