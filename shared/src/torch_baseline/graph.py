"""A whole optimizer step as one CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

from benchkit import UserError
from torch_baseline.train import TrainStep

# The first calls run as they are: torch.compile compiles in them, and libraries choose their algorithms.
_WARMUP = 3


class GraphedStep:
    """A :class:`TrainStep` that is captured once as a CUDA graph and then replayed.

    A replay launches forward, backward, clipping and update at once, so the GPU does not wait for Python between
    kernels. Every call is one step: the first three run normally, the fourth captures and replays.

    Use :func:`torch_baseline.optim.make_optimizer` with ``graph=True``; the learning rate can then change between
    calls. The step must not wait for the device, so it has no ``before_update`` and no float16 scaler.

    Args:
        step: The step on one GPU.

    Raises:
        UserError: If the step runs on a CPU.
        ValueError: If it waits for the device, or a parameter group's learning rate is not on the device.
    """

    def __init__(self, step: TrainStep) -> None:
        if step.device_type != "cuda":
            raise UserError("a CUDA graph needs an NVIDIA GPU; on a CPU take the step without one")
        if step.before_update is not None or step.scaler.is_enabled():
            raise ValueError("a step in a CUDA graph cannot wait for the device; got before_update or a float16 scaler")
        if not all(isinstance(group["lr"], Tensor) for group in step.optimizer.param_groups):
            raise ValueError("the learning rate of a step in a CUDA graph must be a tensor: make_optimizer(graph=True)")
        self.step = step
        self._stream = torch.cuda.Stream()
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._operands: tuple[Tensor, Tensor] | None = None
        self._loss = torch.zeros(())

    def __call__(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Take one step.

        Args:
            x_BT: Inputs on the GPU, int64, of the same shape in every call.
            y_BT: Targets of the same shape.

        Returns:
            The mean loss before the update, as from :class:`TrainStep`.

        Raises:
            ValueError: If the shape is not that of the captured step.
        """
        self._calls += 1
        if self._calls <= _WARMUP:
            return self._run_normally(x_BT, y_BT)
        if self._operands is None:
            self._operands = x_BT.clone(), y_BT.clone()
        for static, given in zip(self._operands, (x_BT, y_BT), strict=True):
            if given.shape != static.shape:
                raise ValueError(f"the captured step takes shape {list(static.shape)}, got {list(given.shape)}")
            static.copy_(given)
        if self._graph is None:
            self.step.optimizer.zero_grad(set_to_none=True)  # gradients of the graph live in the graph's memory
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self._stream):
                self._loss = self.step(*self._operands)
            self._graph = graph
        self._graph.replay()
        return self._loss.clone()

    def _run_normally(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        # On the stream of the capture: autograd remembers the stream of a parameter's first gradient.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            loss = self.step(x_BT, y_BT)
        torch.cuda.current_stream().wait_stream(self._stream)
        return loss
