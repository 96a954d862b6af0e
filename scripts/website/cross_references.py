"""Sphinx's roles in docstrings (``:func:`forward```) as links: an extension of griffe, which reads the sources."""

from __future__ import annotations

import re
from html import escape
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([\w.]+)`")


class RolesToLinks(griffe.Extension):
    """Each role becomes a link to the object's entry, and its name in code where the site has no entry for it."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite every docstring of a package that has been read."""
        _rewrite(pkg)


def _rewrite(scope: griffe.Object) -> None:
    if scope.docstring is not None:
        scope.docstring.value = _ROLE.sub(lambda role: _link(scope, role[1]), scope.docstring.value)
    for member in scope.members.values():
        if isinstance(member, griffe.Object):
            _rewrite(member)


def _link(scope: griffe.Object, name: str) -> str:
    first, _, rest = name.partition(".")
    try:
        target = scope.resolve(first) + (f".{rest}" if rest else "")
    except griffe.NameResolutionError:
        target = name
    return f'<autoref optional identifier="{escape(target)}"><code>{escape(name)}</code></autoref>'
