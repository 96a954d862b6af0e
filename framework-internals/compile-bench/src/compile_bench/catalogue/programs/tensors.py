"""Autograd, parameters, special tensors and settings of torch inside a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compile_bench.catalogue.programs import Repro, broken, program
from compile_bench.catalogue.programs.shared import VECTOR, doubled, sine


@program("backward")
def _backward() -> Repro:
    layer = nn.Linear(4, 4)

    def broken(x: Tensor) -> Tensor:
        loss = layer(x).sum()
        loss.backward()
        return loss.detach()

    return Repro(broken, lambda x: layer(x).sum(), [VECTOR])


@broken("autograd-grad", fixed=lambda x: torch.func.grad(lambda x: (x**2).sum())(x))
def _grad(x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad((x**2).sum(), x)[0]


@broken("requires-grad-set", fixed=lambda x: x.clone() * 2)
def _requires_grad(x: Tensor) -> Tensor:
    y = x.clone()
    y.requires_grad = True
    return y.detach() * 2


@program("parameter-made-inside")
def _parameter() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * nn.Parameter(torch.ones(4))

    weight = nn.Parameter(torch.ones(4))

    return Repro(broken, lambda x: x * weight, [VECTOR])


@program("function-with-side-effect")
def _function() -> Repro:
    class Cubed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            print(end="")
            return x**3

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 3 * x**2 * gradient

    class Quiet(Cubed):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**3

    # torch's annotations leave apply out.
    cubed: Any = Cubed.apply
    quiet: Any = Quiet.apply

    def broken(x: Tensor) -> Tensor:
        return cubed(x) * 2

    return Repro(broken, lambda x: quiet(x) * 2, [(torch.ones(4, requires_grad=True),)])


@program("saved-tensor-hooks")
def _saved_hooks() -> Repro:
    def kept(x: Tensor) -> Tensor:
        return x

    def broken(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(kept, kept):
            return x.sin()

    return Repro(broken, sine, [VECTOR])


@broken("anomaly-detection", fixed=sine)
def _anomaly(x: Tensor) -> Tensor:
    torch.autograd.set_detect_anomaly(False)
    return x.sin()


@program("gradient-scaler")
def _scaler() -> Repro:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def broken(x: Tensor) -> Tensor:
        return scaler.scale(x.sum())

    return Repro(broken, lambda x: x.sum() * 2.0, [VECTOR])


@broken("data-replaced", fixed=lambda x: (x * 2).sin())
def _data(x: Tensor) -> Tensor:
    y = x.clone()
    y.data = x * 2
    return y.sin()


@program("rnn-allowed")
def _rnn() -> Repro:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 4)

    def broken(x: Tensor) -> Tensor:
        return layer(x)[0]

    return Repro(broken, broken, [(torch.ones(5, 2, 4),)])


@program("packed-sequence")
def _packed() -> Repro:
    def broken(x: Tensor, lengths: Tensor) -> Tensor:
        return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data.sum()

    def fixed(x: Tensor, lengths: Tensor) -> Tensor:
        return (x * (torch.arange(5) < lengths[:, None])[..., None]).sum()

    return Repro(broken, fixed, [(torch.ones(2, 5, 4), torch.tensor([5, 3]))])


@broken("sparse", fixed=doubled, calls=[(torch.eye(4),)])
def _sparse(x: Tensor) -> Tensor:
    return x.to_sparse().to_dense() * 2


@broken("resized", fixed=lambda x: x[:2].sin())
def _resized(x: Tensor) -> Tensor:
    y = x.clone()
    y.resize_(2)
    return y.sin()


@broken("memory-address", fixed=lambda x: x * x.nbytes)
def _storage(x: Tensor) -> Tensor:
    return x * x.untyped_storage().nbytes()


@broken("memory-kind", fixed=lambda x: x.cos())
def _pinned(x: Tensor) -> Tensor:
    return x.sin() if x.is_pinned() else x.cos()


@program("shallow-copy")
def _copied() -> Repro:
    import copy

    def broken(x: Tensor) -> Tensor:
        return copy.copy(x).sin()

    return Repro(broken, lambda x: x.detach().sin(), [VECTOR])


@program("tensor-subclass")
def _subclass() -> Repro:
    class Marked(torch.Tensor):
        pass

    def broken(x: Tensor) -> Tensor:
        return x.as_subclass(Marked).as_subclass(torch.Tensor) * 2

    return Repro(broken, doubled, [VECTOR])


@broken("exchanged-memory", fixed=sine)
def _dlpack(x: Tensor) -> Tensor:
    return torch.utils.dlpack.from_dlpack(x.detach()).sin()


@program("script-traced")
def _script() -> Repro:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    def broken(x: Tensor) -> Tensor:
        return torch.jit.trace(doubled, (x,))(x)

    return Repro(broken, doubled, [VECTOR])


@broken("threads-asked", fixed=lambda x: x * True)
def _threads(x: Tensor) -> Tensor:
    return x * (torch.get_num_threads() > 0)


@broken("threads-set", fixed=sine)
def _threads_set(x: Tensor) -> Tensor:
    torch.set_num_threads(torch.get_num_threads())
    return x.sin()


@program("hook-with-side-effect")
def _hook() -> Repro:
    def layer(hooked: bool) -> nn.Module:
        torch.manual_seed(0)
        made = nn.Linear(4, 4)
        if hooked:
            made.register_forward_hook(lambda module, inputs, output: print(end=""))
        return made

    return Repro(layer(hooked=True), layer(hooked=False), [VECTOR])
