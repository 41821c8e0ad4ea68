"""The modules whose forwards run inside a region."""

from __future__ import annotations

from ckplan.graph.fqn import is_around, relative_path


class ModulePath:
    """The modules that run, innermost last: by name, and where they are in a layer."""

    __slots__ = ("fqns", "sites", "top")

    def __init__(self, top: str) -> None:
        """Begin with the module that op paths are relative to."""
        self.top = top
        self.fqns = [top]
        self.sites = ["."]

    def enter(self, fqn: str) -> None:
        """Begin a module's forward."""
        self.fqns.append(fqn)
        self.sites.append(site_of(fqn, self.top))

    def leave(self) -> None:
        """End the innermost one."""
        self.fqns.pop()
        self.sites.pop()


def site_of(fqn: str, top: str) -> str:
    """A module, by its path below another if it is there: the same in equal layers.

    >>> site_of("h.0.mlp", "h.0"), site_of("h.0", "h.0"), site_of("wte", "h.0")
    ('.mlp', '.', 'wte')
    """
    return f".{relative_path(fqn, top)}" if is_around(top, fqn) else fqn


def fqn_of(site: str, top: str) -> str:
    """The FQN of a module at a site.

    >>> fqn_of(".mlp", "h.0"), fqn_of(".", "h.0"), fqn_of("wte", "h.0")
    ('h.0.mlp', 'h.0', 'wte')
    """
    return f"{top}{site}".strip(".") if site.startswith(".") else site
