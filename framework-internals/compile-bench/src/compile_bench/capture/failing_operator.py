"""The user's line of an operator that a backend cannot compile.

What AOTAutograd raises, such as the ``nonzero`` that the backward pass of ``x[mask] = value`` needs, names no line, and
Dynamo reports it where the graph happened to begin. Running the graph once more, node by node, on tensors without data,
tells which node it is: the one that fails, or the one whose backward pass does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compile_bench.capture.collector import backend_of, compile_id, without_data
from compile_bench.capture.frames import Frame, UserCodeFilter
from compile_bench.capture.trace import innermost_in


class Blamed:
    """A backend of ``torch.compile`` that finds out which line it fails for.

    Args:
        backend: name of the backend that does the work.
        user_code: whose code a file is.

    Attributes:
        lines: by compilation, where one was found.
    """

    def __init__(self, backend: str, user_code: UserCodeFilter) -> None:
        self._compile = backend_of(backend)
        self._user_code = user_code
        self.lines: dict[str, Frame] = {}
        self.__name__ = backend  # what Dynamo calls it in its messages

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile a graph."""
        try:
            return self._compile(graph, inputs)
        except Exception:
            node = failing_node(graph, inputs)
            line = innermost_in(node.stack_trace or "", self._user_code) if node is not None else None
            if line is not None:
                self.lines[compile_id()] = line
            raise


class _Watched(fx.Interpreter):
    """Runs a graph and knows which node is being run, forward or, in a backward pass behind it, backward."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.node: fx.Node | None = None
        self._known: list[torch.autograd.graph.Node] = []  # kept, since they are told apart by their identity

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        result = super().run_node(n)
        if n.op != "output":
            # All values, since an operator in place gives an earlier one another history.
            self._claim(
                [each.grad_fn for each in pytree.tree_leaves([*self.env.values(), result]) if isinstance(each, Tensor)],
                n,
            )
        return result

    def _claim(self, waiting: list[torch.autograd.graph.Node | None], node: fx.Node) -> None:
        """What is new in the history belongs to the node that was just run."""
        while waiting:
            new = waiting.pop()
            if new is None or any(new is each for each in self._known):
                continue
            self._known.append(new)
            new.register_prehook(lambda gradients: setattr(self, "node", node))
            waiting += [each for each, _ in new.next_functions]


def failing_node(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.Node | None:
    """The node that a graph fails at without data, forward or backward; None if it does not fail."""
    watched = _Watched(graph)
    mode, inputs = without_data(inputs)
    with mode, torch.enable_grad():
        try:
            outputs = [each for each in pytree.tree_leaves(watched.run(*inputs)) if isinstance(each, Tensor)]
            wanted = [each for each in inputs if isinstance(each, Tensor) and each.requires_grad]
            outputs = [each for each in outputs if each.requires_grad]
            if outputs and wanted:
                torch.autograd.grad(outputs, wanted, [torch.ones_like(each) for each in outputs], allow_unused=True)
        except Exception:  # the one that the backend raised, or what comes of it here
            return watched.node
    return None
