"""Single controller of many roles: calls, answers, replacement of lost ranks and a journal, on one of three engines."""

from hyper_parallel.runtime.controller._controller import Controller, ahead
from hyper_parallel.runtime.controller._role import Role, RoleCall

__all__ = ["Controller", "Role", "RoleCall", "ahead"]
