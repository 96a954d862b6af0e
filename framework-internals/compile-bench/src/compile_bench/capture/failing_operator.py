"""Finds the user's line of an operator that a backend cannot compile.

An error of AOTAutograd names no line. An example is ``nonzero``, which the backward pass of ``x[mask] = value`` needs.
Dynamo reports such an error at the beginning of the graph. To find the line, this module runs the graph again, node by
node, on tensors without data. The node that fails, or the node with the backward pass that fails, has the line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from compile_bench.capture.collector import backend_of, compile_id, without_data
from compile_bench.capture.frames import Frame, UserCodeFilter, frames_in


class FailingOperatorBackend:
    """A backend of ``torch.compile`` that notes the line of the operator that another backend fails on."""

    def __init__(self, backend: str, user_code: UserCodeFilter) -> None:
        self._compile = backend_of(backend)
        self._user_code = user_code
        self.lines: dict[str, Frame] = {}  # line of the operator that failed, by compile id
        self.__name__ = backend  # Dynamo's messages show this name

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Compile a graph."""
        try:
            return self._compile(graph, inputs)
        except Exception:
            node = _failing_node(graph, inputs)
            line = self._user_code.innermost(frames_in(node.stack_trace or "")) if node is not None else None
            if line is not None:
                self.lines[compile_id()] = line
            raise


class _NodeTracker(fx.Interpreter):
    """Runs a graph and knows which node runs, in the forward pass and in the backward pass."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.node: fx.Node | None = None  # the node that runs, or the last one that ran
        self._known: list[torch.autograd.graph.Node] = []  # kept alive, because they are compared by identity

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        result = super().run_node(n)
        if n.op != "output":
            # An in-place operator gives earlier values a new grad_fn, so this looks at all values.
            values = pytree.tree_leaves([*self.env.values(), result])
            self._assign([value.grad_fn for value in values if isinstance(value, Tensor)], n)
        return result

    def _assign(self, waiting: list[torch.autograd.graph.Node | None], node: fx.Node) -> None:
        """Assign the new autograd nodes to the graph node that just ran."""
        while waiting:
            new = waiting.pop()
            if new is None or any(new is known for known in self._known):
                continue
            self._known.append(new)
            new.register_prehook(lambda gradients: setattr(self, "node", node))
            waiting += [function for function, _ in new.next_functions]


def _failing_node(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> fx.Node | None:
    """The node at which a graph fails without data, forward or backward; None if the graph does not fail."""
    tracker = _NodeTracker(graph)
    mode, inputs = without_data(inputs)
    with mode, torch.enable_grad():
        try:
            outputs = [leaf for leaf in pytree.tree_leaves(tracker.run(*inputs)) if isinstance(leaf, Tensor)]
            outputs = [output for output in outputs if output.requires_grad]
            wanted = [given for given in inputs if isinstance(given, Tensor) and given.requires_grad]
            if outputs and wanted:
                torch.autograd.grad(outputs, wanted, [torch.ones_like(output) for output in outputs], allow_unused=True)
        except Exception:  # the backend's error, or the error that it leads to here
            return tracker.node
    return None
