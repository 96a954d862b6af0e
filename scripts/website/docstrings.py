"""An extension of griffe that turns the reStructuredText in docstrings (roles, ``::``) into Markdown."""

from __future__ import annotations

import re
from html import escape
from typing import Any

import griffe

_LITERAL = re.compile(r"::\n\n(?= {4})")
_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`~?([\w.]+)`")


class Docstrings(griffe.Extension):
    """Turns a role into a link to the object, or into code if the site lacks the object, and ``::`` into a colon."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite every docstring of a package that has been read."""
        _rewrite(pkg)


def _rewrite(scope: griffe.Object) -> None:
    if scope.docstring is not None:
        text = _LITERAL.sub(":\n\n", scope.docstring.value)
        scope.docstring.value = _ROLE.sub(lambda role: _link(scope, role[1]), text)
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
