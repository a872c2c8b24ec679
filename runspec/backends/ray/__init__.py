"""A run on a Ray cluster: `placement: {backend: ray}`.

    caller --> Keeper, an actor on the trunk's node --> runspec apply: the supervisor
    supervisor --> RoleHost, an actor for each role, on any node --> the role's process

The trunk's node has the run directory, and the supervisor of `runspec.local` watches all roles from
there. Ray places the actors, reserves accelerators and tells of nodes that are gone. Ray is
imported by what uses it: the base install has none.
"""

from runspec.backends.ray.client import RayBackend

__all__ = ["RayBackend"]
