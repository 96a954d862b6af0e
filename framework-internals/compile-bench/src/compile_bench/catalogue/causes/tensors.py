"""Autograd, parameters, special tensors and settings of torch inside a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compile_bench.catalogue.cause import Advice, Repro, Theme
from compile_bench.catalogue.conditions import of_calls, of_constructs, of_places, of_values
from compile_bench.catalogue.use import UsedAs

gradients = Theme("Autograd and parameters")
special = Theme("Special tensors and modules")
state = Theme("Settings of torch")
_VECTOR = (torch.ones(4),)
SKIPPED = r"marked as skipped|Unsupported method call"


@gradients.cause(
    "backward",
    "loss.backward() in the compiled function",
    pattern=r"Tensor\.backward\(\)",
    code=r"\.backward\(",
    equal=False,
    why="AOTAutograd derives the backward graph from a whole forward graph. A forward graph cannot call backward().",
    advice="Compile the forward pass and the loss, and call backward() outside.",
    when=of_calls.UNUSED & of_places.without_calls("grad", "clip_grad_norm_", text="the function reads no gradient"),
)
def _backward() -> Repro:
    layer = nn.Linear(4, 4)

    def broken(x: Tensor) -> Tensor:
        loss = layer(x).sum()
        loss.backward()
        return loss.detach()

    def fixed(x: Tensor) -> Tensor:
        return layer(x).sum()

    return Repro(broken, fixed, [_VECTOR])


@gradients.cause(
    "autograd-grad",
    "torch.autograd.grad()",
    pattern=r"autograd\.grad|leaked|marked as skipped",
    code=r"autograd\.grad\(",
    why="A forward graph cannot call the backward pass.",
    advice="Use torch.func.grad, which Dynamo traces.",
    when=of_constructs.GRAD_OF_LOCAL,
)
def _grad() -> Repro:
    def broken(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x**2).sum(), x)[0]

    def fixed(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: (x**2).sum())(x)

    return Repro(broken, fixed, [_VECTOR])


@gradients.cause(
    "requires-grad-set",
    "requires_grad that is set on a tensor of the graph",
    pattern=r"requires_grad",
    code=r"requires_grad",
    why="It changes the graph's backward pass in the middle of the graph.",
    advice="Set it before the call.",
    when=of_constructs.SET_ON_ARGUMENT,
)
def _requires_grad() -> Repro:
    def broken(x: Tensor) -> Tensor:
        y = x.clone()
        y.requires_grad = True
        return y.detach() * 2

    def fixed(x: Tensor) -> Tensor:
        return x.clone() * 2

    return Repro(broken, fixed, [_VECTOR])


@gradients.cause(
    "parameter-made-inside",
    "an nn.Parameter or a module that is made in forward",
    pattern=r"torch\.nn\.Parameter\(\)|Uninitialized nn\.Module",
    code=r"Parameter\(|nn\.\w+\(",
    equal=False,
    why="A parameter that is new in every call cannot be an input of the graph.",
    advice="Make it in __init__.",
    when=of_calls.INDEPENDENT,
)
def _parameter() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * nn.Parameter(torch.ones(4))

    weight = nn.Parameter(torch.ones(4))

    def fixed(x: Tensor) -> Tensor:
        return x * weight

    return Repro(broken, fixed, [_VECTOR])


@gradients.cause(
    "function-with-side-effect",
    "an autograd.Function that prints, logs or writes",
    pattern=r"Failed to trace builtin operator",
    code=r"apply\(|print\(",
    why="Dynamo traces forward and backward of a Function as one unit, which it cannot split.",
    advice="Keep side effects out of both.",
    when=of_calls.UNUSED & of_places.IN_AUTOGRAD_FUNCTION,
)
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

    def fixed(x: Tensor) -> Tensor:
        return quiet(x) * 2

    return Repro(broken, fixed, [(torch.ones(4, requires_grad=True),)])


@gradients.cause(
    "saved-tensor-hooks",
    "saved_tensors_hooks()",
    pattern=r"marked as skipped|Unsupported context manager",
    code=r"saved_tensors_hooks\(",
    why="The hooks would have to run inside the graph's backward pass.",
    advice="Enter it around the call of the compiled model. Inside, use torch.utils.checkpoint, which Dynamo traces.",
    when=of_places.WHOLE_FUNCTION,
)
def _saved_hooks() -> Repro:
    def kept(x: Tensor) -> Tensor:
        return x

    def broken(x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(kept, kept):
            return x.sin()

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [_VECTOR])


@gradients.cause(
    "anomaly-detection",
    "set_detect_anomaly()",
    pattern="marked as skipped",
    code=r"detect_anomaly\(",
    why="It changes a global flag of the process.",
    advice="Set it around the call. Inside compiled code it has no effect.",
    when=of_calls.UNUSED,
)
def _anomaly() -> Repro:
    def broken(x: Tensor) -> Tensor:
        torch.autograd.set_detect_anomaly(False)
        return x.sin()

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [_VECTOR])


@gradients.cause(
    "gradient-scaler",
    "GradScaler.scale() in the compiled function",
    pattern="marked as skipped",
    code=r"\.scale\(",
    why="The scaler keeps its state in Python.",
    advice="Scale the loss outside.",
    when=of_values.only(UsedAs.RETURNED, of=("scale",)),
)
def _scaler() -> Repro:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def broken(x: Tensor) -> Tensor:
        return scaler.scale(x.sum())

    def fixed(x: Tensor) -> Tensor:
        return x.sum() * 2.0

    return Repro(broken, fixed, [_VECTOR])


@gradients.cause(
    "data-replaced",
    "an assignment to tensor.data",
    pattern=r"tensor data attribute|data",
    code=r"\.data\s*=",
    why="It replaces the memory of a tensor of the graph.",
    advice="Use copy_() of the new values under torch.no_grad().",
    when=of_constructs.DATA_ELEMENTWISE,
)
def _data() -> Repro:
    def broken(x: Tensor) -> Tensor:
        y = x.clone()
        y.data = x * 2
        return y.sin()

    def fixed(x: Tensor) -> Tensor:
        return (x * 2).sin()

    return Repro(broken, fixed, [_VECTOR])


@special.cause(
    "rnn-allowed",
    "nn.LSTM, nn.GRU, nn.RNN",
    pattern=r"RNN, GRU, or LSTM|Unsupported function call \(delayed\)",
    settings={"allow_rnn": True},
    why="Their loop over the sequence runs inside one operator, which needs its weights side by side in memory.",
    advice="Set torch._dynamo.config.allow_rnn = True, which puts the operator into the graph as it is.",
    when=of_places.without_calls("pack", part=True, text="its input is no packed sequence"),
)
def _rnn() -> Repro:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 4)

    def broken(x: Tensor) -> Tensor:
        return layer(x)[0]

    return Repro(broken, broken, [(torch.ones(5, 2, 4),)])


@special.cause(
    "packed-sequence",
    "pack_padded_sequence()",
    pattern="marked as skipped",
    code=r"\b(un)?pack_(padded_)?sequence\(|\bpad_packed_sequence\(",
    equal=False,
    why="A packed sequence holds batch sizes that depend on lengths.",
    advice="Use padded batches and a mask.",
    when=of_places.without_calls("lstm", "gru", "rnn", part=True, text="no recurrent layer takes it"),
)
def _packed() -> Repro:
    def broken(x: Tensor, lengths: Tensor) -> Tensor:
        return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data.sum()

    def fixed(x: Tensor, lengths: Tensor) -> Tensor:
        return (x * (torch.arange(5) < lengths[:, None])[..., None]).sum()

    return Repro(broken, fixed, [(torch.ones(2, 5, 4), torch.tensor([5, 3]))])


@special.cause(
    "sparse",
    "a sparse tensor that is made in the model",
    pattern="sparse",
    code=r"sparse",
    why="Dynamo does not trace sparse tensors.",
    advice="Keep sparse work outside the model, or in a custom operator.",
    when=of_calls.of_argument("to_sparse", "to_sparse_csr", "sparse_coo_tensor"),
)
def _sparse() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x.to_sparse().to_dense() * 2

    def fixed(x: Tensor) -> Tensor:
        return x * 2

    return Repro(broken, fixed, [(torch.eye(4),)])


@special.cause(
    "resized",
    "tensor.resize_()",
    pattern=r"resize_",
    code=r"\.resize_\(",
    why="It changes the memory of a tensor in place.",
    advice="Use a slice, or a new tensor.",
    when=of_constructs.OWN_TENSOR,
)
def _resized() -> Repro:
    def broken(x: Tensor) -> Tensor:
        y = x.clone()
        y.resize_(2)
        return y.sin()

    def fixed(x: Tensor) -> Tensor:
        return x[:2].sin()

    return Repro(broken, fixed, [_VECTOR])


@special.cause(
    "memory-address",
    "data_ptr() or untyped_storage()",
    pattern=r"Unsupported method call|Observed exception|Failed to trace builtin operator",
    code=r"data_ptr\(|storage\(",
    why="Tensors have no memory while Dynamo traces.",
    advice="Read the size from tensor.nbytes.",
    when=of_constructs.SIZE_IN_BYTES,
    others=(Advice("Compare the tensors with `is`.", of_constructs.SAME_MEMORY),),
)
def _storage() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * x.untyped_storage().nbytes()

    def fixed(x: Tensor) -> Tensor:
        return x * x.nbytes

    return Repro(broken, fixed, [_VECTOR])


@special.cause(
    "memory-kind",
    "is_pinned(), share_memory_()",
    pattern=r"returned non-Tensor|Unhandled args",
    code=r"is_pinned\(|share_memory_\(",
    why="Tensors have no memory while Dynamo traces.",
    advice="Prepare memory in the data loader.",
    when=of_calls.of_argument("is_pinned", "share_memory_"),
)
def _pinned() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x.sin() if x.is_pinned() else x.cos()

    def fixed(x: Tensor) -> Tensor:
        return x.cos()

    return Repro(broken, fixed, [_VECTOR])


@special.cause(
    "shallow-copy",
    "copy.copy() of a tensor",
    pattern="returned non-Tensor|marked as skipped",
    code=r"copy\.copy\(",
    why="copy.copy() uses the tensor's pickling protocol.",
    advice="Use clone(). Gradients flow through it, and not through copy.copy().",
    when=of_constructs.COPY_IS_READ,
)
def _copied() -> Repro:
    import copy

    def broken(x: Tensor) -> Tensor:
        return copy.copy(x).sin()

    def fixed(x: Tensor) -> Tensor:
        return x.detach().sin()

    return Repro(broken, fixed, [_VECTOR])


@special.cause(
    "tensor-subclass",
    "as_subclass() inside the model",
    pattern="as_subclass",
    code=r"as_subclass\(",
    why="Dynamo has to be able to rebuild the subclass from its inner tensors.",
    advice="Use a plain tensor, and pass the subclass's extra data beside it.",
    when=of_constructs.PLAIN_SUBCLASS,
)
def _subclass() -> Repro:
    class Marked(torch.Tensor):
        pass

    def broken(x: Tensor) -> Tensor:
        return x.as_subclass(Marked).as_subclass(torch.Tensor) * 2

    def fixed(x: Tensor) -> Tensor:
        return x * 2

    return Repro(broken, fixed, [_VECTOR])


@special.cause(
    "exchanged-memory",
    "torch.from_dlpack(), torch.frombuffer()",
    pattern=r"marked as skipped|Failed to",
    code=r"from_dlpack\(|frombuffer\(",
    why="The memory belongs to another library.",
    advice="Exchange tensors outside and pass them as arguments.",
    when=of_calls.of_argument("from_dlpack", "frombuffer"),
)
def _dlpack() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return torch.utils.dlpack.from_dlpack(x.detach()).sin()

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [_VECTOR])


@special.cause(
    "script-traced",
    "torch.jit.trace() in the model",
    pattern=r"disable|marked as skipped",
    code=r"jit\.(trace|script)\(",
    why="TorchScript and Dynamo cannot trace at the same time.",
    advice="Remove TorchScript from the model.",
    when=of_values.only(UsedAs.CALLED, of=("trace", "script")),
)
def _script() -> Repro:
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    def broken(x: Tensor) -> Tensor:
        return torch.jit.trace(doubled, (x,))(x)

    return Repro(broken, doubled, [_VECTOR])


@state.cause(
    "threads-asked",
    "get_num_threads() and other queries of the machine",
    pattern="returned non-Tensor",
    code=r"get_num_threads\(|is_available\(|initial_seed\(",
    why="No guard watches the result.",
    advice="Query it once, in __init__.",
    when=of_calls.INDEPENDENT,
)
def _threads() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * (torch.get_num_threads() > 0)

    def fixed(x: Tensor) -> Tensor:
        return x * True

    return Repro(broken, fixed, [_VECTOR])


@state.cause(
    "threads-set",
    "set_num_threads() and other settings",
    pattern="marked as skipped",
    code=r"set_num_threads\(",
    why="It changes a setting of the process.",
    advice="Set it at the start.",
    when=of_calls.STATEMENT_INDEPENDENT,
)
def _threads_set() -> Repro:
    def broken(x: Tensor) -> Tensor:
        torch.set_num_threads(torch.get_num_threads())
        return x.sin()

    def fixed(x: Tensor) -> Tensor:
        return x.sin()

    return Repro(broken, fixed, [_VECTOR])


@state.cause(
    "hook-with-side-effect",
    "a forward hook that prints or branches on a value",
    pattern=r"Failed to trace builtin operator",
    code=r"print\(",
    why="Dynamo traces hooks with the module. They break the graph like any other code.",
    advice="Remove the hook before compiling.",
    when=of_places.HOOK_THAT_WRITES,
)
def _hook() -> Repro:
    def layer(hooked: bool) -> nn.Module:
        torch.manual_seed(0)
        made = nn.Linear(4, 4)
        if hooked:
            made.register_forward_hook(lambda module, inputs, output: print(end=""))
        return made

    return Repro(layer(hooked=True), layer(hooked=False), [_VECTOR])
