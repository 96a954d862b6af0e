"""AdamW's state: parameters that others write, options, exchange with torch, unusual parameters, sharded ones."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

import custom_ops
from custom_ops.operators.calls import calls
from native_build import BuildError

NARROW = (torch.bfloat16, torch.float16)


def layer(dtype: torch.dtype | None, **options: Any) -> tuple[nn.Linear, custom_ops.AdamW]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False)
    return model, custom_ops.AdamW(model.parameters(), lr=0.01, dtype=dtype, **options)


def advance(parameter: nn.Parameter, step: Callable[[], Any], seed: int) -> None:
    drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    parameter.grad = drawn.to(parameter.dtype)
    step()


def in_place(weight: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        weight.zero_().add_(value)


def by_copy(weight: nn.Parameter, value: Tensor) -> None:
    weight.detach().copy_(value)


def in_data(weight: nn.Parameter, value: Tensor) -> None:
    weight.data.copy_(value)  # which moves no version counter


def new_data(weight: nn.Parameter, value: Tensor) -> None:
    weight.data = value.clone()


def in_memory(weight: nn.Parameter, value: Tensor) -> None:
    torch.tensor([], dtype=weight.dtype).set_(weight.untyped_storage()).copy_(value.flatten())


def load(weight: nn.Parameter, value: Tensor) -> None:
    model = nn.Linear(5, 3, bias=False)
    model.weight = weight
    model.load_state_dict({"weight": value.float()})


def compiled(weight: nn.Parameter, value: Tensor) -> None:
    torch.compile(by_copy, backend="aot_eager")(weight, value)


WRITES = {write.__name__: write for write in (in_place, by_copy, in_data, new_data, in_memory, load, compiled)}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_a_parameter_that_somebody_writes_is_its_new_master(write: str, dtype: torch.dtype) -> None:
    model, optimizer = layer(dtype, weight_decay=0.0)
    advance(model.weight, optimizer.step, 0)
    value = torch.linspace(-4, 4, 15).view(3, 5).to(dtype)
    kept = optimizer.state[model.weight]["master"][0].clone()
    value[0] = model.weight[0].detach()  # a row that stays keeps the digits of its master
    WRITES[write](model.weight, value)
    model.weight.grad = torch.zeros_like(model.weight)
    moments = {name: optimizer.state[model.weight][name].clone() for name in ("exp_avg", "exp_avg_sq")}
    optimizer.step()
    master = optimizer.state[model.weight]["master"]
    mean, square = 0.9 * moments["exp_avg"].double(), 0.999 * moments["exp_avg_sq"].double()
    change = 0.01 * (mean / (1 - 0.9**2)) / ((square / (1 - 0.999**2)).sqrt() + 1e-8)
    started = torch.cat([kept[None], value[1:].float()])
    # A rounding of the value, and of each of the eight operations on a change below 0.01.
    bound = torch.finfo(torch.float32).eps * (started.abs() + 8 * 0.01)
    assert ((master.double() - (started.double() - change)).abs() <= bound).all()
    assert torch.equal(model.weight, master.to(dtype))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_an_average_that_is_swapped_in_and_out_costs_the_masters_no_digit(dtype: torch.dtype) -> None:
    model, optimizer = layer(dtype)
    other, undisturbed = layer(dtype)
    for step in range(3):
        own = model.weight.detach().clone()
        model.weight.data.fill_(0.5)
        model.weight.data.copy_(own)
        advance(model.weight, optimizer.step, step)
        advance(other.weight, undisturbed.step, step)
    assert torch.equal(optimizer.state[model.weight]["master"], undisturbed.state[other.weight]["master"])


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_weights_that_are_loaded_stay_whatever_the_optimizer_loads(order: tuple[str, str]) -> None:
    model, optimizer = layer(torch.bfloat16)
    advance(model.weight, optimizer.step, 0)
    saved = copy.deepcopy(optimizer.state_dict())
    advance(model.weight, optimizer.step, 1)
    others = {"weight": torch.full((3, 5), 7.0)}
    for part in order:
        {"model": model, "optimizer": optimizer}[part].load_state_dict({"model": others, "optimizer": saved}[part])
    assert (model.weight == 7).all()
    advance(model.weight, optimizer.step, 2)
    assert ((optimizer.state[model.weight]["master"] - 7).abs() < 0.1).all()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_a_compiled_step_updates_complex_parameters(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    found = []
    for compile_it in (False, True):
        torch.manual_seed(0)
        made = (torch.randn(3, 5, dtype=dtype), torch.randn(5, 3, dtype=dtype).t())
        weights = [nn.Parameter(values) for values in made]
        optimizer = custom_ops.AdamW(weights, lr=0.1 if dtype == torch.complex128 else 0.125, amsgrad=True)
        run = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True) if compile_it else optimizer.step
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            run()
        states = (optimizer.state[weight] for weight in weights)
        found.append([*weights, *(state[name] for state in states for name in sorted(state))])
    for eager, compiled_ in zip(*found, strict=True):
        assert torch.equal(eager, compiled_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_compiled_step_is_one_graph_and_sees_what_is_written(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    found = []
    for compile_it in (False, True):
        model, optimizer = layer(None, amsgrad=True)
        model.to(dtype)

        def step(optimizer: custom_ops.AdamW = optimizer) -> None:
            optimizer.step(norm=optimizer.gradient_norm(), max_norm=1.0)

        run = torch.compile(step, backend="aot_eager", fullgraph=True) if compile_it else step
        for seed in range(4):
            if seed == 2:
                model.weight.data.fill_(2.0)
            advance(model.weight, run, seed)
        found.append(model.weight.detach())
    assert torch.equal(*found)
    assert (found[0] > 1.5).all()


@pytest.mark.parametrize(
    ("dtype", "rate"),
    [
        pytest.param(torch.float32, 0.01, id="float32, number"),
        pytest.param(torch.bfloat16, torch.tensor(0.01), id="bfloat16, tensor"),
        pytest.param(torch.float32, torch.tensor(0.01), id="float32, tensor", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 0.01, id="bfloat16, number", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_under_a_schedule_has_no_graph_for_each_rate(dtype: torch.dtype, rate: float | Tensor) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    weights = [nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2)]
    for weight, compile_it in zip(weights, (True, False), strict=True):
        torch.compiler.reset()
        optimizer = custom_ops.AdamW([weight], lr=copy.deepcopy(rate))
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
        step = torch.compile(optimizer.step, backend=backend) if compile_it else optimizer.step
        for seed in range(6):
            advance(weight, step, seed)
            schedule.step()
    assert 1 <= len(graphs) <= 3  # a number or the state is new in the first, and an input after that
    # In a graph the rate is rounded to float32, so each step may round the weight, which is below 2, to its neighbour.
    assert ((weights[0].double() - weights[1].double()).abs() <= 6 * 2 * torch.finfo(dtype).eps).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_cuda_graph_sees_what_is_written_between_its_replays(amsgrad: bool) -> None:
    weights = [nn.Parameter(torch.ones(70_001, device="cuda", dtype=torch.bfloat16)) for _ in range(2)]
    captured, plain = (custom_ops.AdamW([weight], lr=0.01, amsgrad=amsgrad) for weight in weights)
    for weight in weights:
        weight.grad = torch.linspace(-1, 1, 70_001, device="cuda").bfloat16()
    for optimizer in (captured, plain):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for value in (3.0, 5.0):
        for weight in weights:
            weight.data[::2] = value
        graph.replay()
        plain.step()
        assert torch.equal(*weights)
        assert (weights[0][::2].float() - value).abs().max() < 0.1


def parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(3)
    return {
        "channels last": nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        "transposed": nn.Parameter(torch.randn(3, 4).t()),
        "a slice": nn.Parameter(torch.randn(6, 8).t()[:, ::2]),
        "no dimension": nn.Parameter(torch.randn(())),
        "no elements": nn.Parameter(torch.randn(0, 3)),
        "complex": nn.Parameter(torch.randn(3, dtype=torch.complex64)),
        "complex, wide": nn.Parameter(torch.randn(2, 3, dtype=torch.complex128)),
        "wide": nn.Parameter(torch.randn(3, dtype=torch.float64)),
    }


@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "maximize": True, "betas": (0.0, 0.9)}], ids=str)
def test_parameters_of_every_kind_in_one_group(options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    own, peer = (kind(list(ps.values()), lr=0.1, **options) for kind, ps in
                 ((custom_ops.AdamW, ours), (torch.optim.AdamW, theirs)))  # fmt: skip
    for step in range(4):
        torch.manual_seed(step)
        for index, name in enumerate(ours):
            gradient = torch.randn_like(theirs[name])
            skipped = (index + step) % 4 == 3
            theirs[name].grad = None if skipped else gradient
            # In another order of memory than the parameter.
            ours[name].grad = None if skipped else gradient.mT.contiguous().mT if gradient.dim() > 1 else gradient
        own.step()
        peer.step()
        if step == 1:
            own.load_state_dict(copy.deepcopy(peer.state_dict()))
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-5, atol=1e-6, msg=name)
        assert parameter.stride() == theirs[name].stride()


def test_the_norm_of_gradients_of_every_kind() -> None:
    ours = parameters()
    for parameter in ours.values():
        parameter.grad = torch.randn_like(parameter)
    norm = custom_ops.AdamW(list(ours.values())).gradient_norm()
    squares = [parameter.grad.to(torch.complex128).abs().square().sum() for parameter in ours.values()]
    torch.testing.assert_close(norm, torch.stack(squares).sum().sqrt(), rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("of_parameter", "of_gradient"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float32)],
    ids=str,
)
def test_gradients_of_another_dtype(of_parameter: torch.dtype, of_gradient: torch.dtype) -> None:
    weight = nn.Parameter(torch.linspace(-1, 1, 7).to(of_parameter))
    exact = nn.Parameter(weight.detach().double())
    gradient = torch.linspace(-2, 3, 7).to(of_gradient)
    weight.grad_dtype = of_gradient
    weight.grad, exact.grad = gradient, gradient.double()
    own, peer = custom_ops.AdamW([weight], lr=0.1), torch.optim.AdamW([exact], lr=0.1)
    own.step()
    peer.step()
    master = own.state[weight].get("master", weight)
    torch.testing.assert_close(master.double(), exact, rtol=1e-6, atol=1e-7)


def test_sparse_gradients_are_refused_with_the_remedy() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = custom_ops.AdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    message = r"gradient of a parameter of shape \[4, 2\]: expected a dense tensor, got torch.sparse_coo \(make the emb"
    for call in (optimizer.step, optimizer.gradient_norm):
        with pytest.raises(TypeError, match=message):
            call()


def test_a_step_that_is_refused_does_not_count() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = custom_ops.AdamW([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(ValueError, match="argument 'norm': expected one element"):
        optimizer.step(norm=torch.ones(2))
    assert optimizer.state[weight]["step"] == 1


def test_a_parameter_whose_elements_share_memory_is_refused_before_the_step_counts() -> None:
    weight = nn.Parameter(torch.ones(1, 4).expand(3, 4))
    optimizer = custom_ops.AdamW([weight])
    weight.grad = torch.ones(3, 4)
    with pytest.raises(ValueError, match="expected elements with memory of their own"):
        optimizer.step()
    assert not optimizer.state[weight]
    assert weight.eq(1).all()


@pytest.mark.parametrize("error", [BuildError("no compiler"), KeyboardInterrupt()], ids=repr)
def test_a_step_whose_kernel_is_not_built_does_not_count(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = custom_ops.AdamW([weight])
    weight.grad = torch.ones(3)

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(calls, "loaded", False)
    monkeypatch.setattr(calls, "load", fail)
    with pytest.raises(type(error)):
        optimizer.step()
    monkeypatch.undo()
    optimizer.step()
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_an_interrupted_step_counts_as_what_it_did(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    weight, twin = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizers = [custom_ops.AdamW([p]) for p in (weight, twin)]
    kernel = calls.adamw_

    def interrupted(*arguments: Any) -> None:  # as Python does it: a kernel in C++ ends first
        kernel(*arguments)
        raise error

    for p in (weight, twin):
        p.grad = torch.tensor([1.0, -2.0, 3.0])
    monkeypatch.setattr(calls, "adamw_", interrupted)
    with pytest.raises(error):
        optimizers[0].step()
    monkeypatch.undo()
    optimizers[0].step()
    optimizers[1].step()
    optimizers[1].step()
    assert torch.equal(weight, twin)
    assert optimizers[0].state[weight]["step"] == 2


@pytest.mark.parametrize(
    "flags", [{"foreach": True}, {"fused": False}, {"capturable": True}, {"foreach": None}], ids=str
)
def test_flags_that_change_nothing_are_accepted(flags: dict[str, Any]) -> None:
    found = []
    for given in ({}, flags):
        model, optimizer = layer(None, **given)
        advance(model.weight, optimizer.step, 0)
        found.append(model.weight)
    assert torch.equal(*found)


def test_options_are_those_of_each_group() -> None:
    up, down = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    optimizer = custom_ops.AdamW([{"params": [up], "maximize": True}], lr=0.1)
    optimizer.add_param_group({"params": [down], "amsgrad": True, "dtype": torch.bfloat16})
    up.grad, down.grad = torch.ones(3), torch.ones(3, dtype=torch.bfloat16)
    optimizer.step()
    assert (up > 0).all()
    assert (down < 0).all()
    assert "max_exp_avg_sq" in optimizer.state[down]
    assert "max_exp_avg_sq" not in optimizer.state[up]
    for wrong in ({"differentiable": True}, {"betas": (1.0, 0.5)}):
        with pytest.raises(ValueError, match="AdamW: argument"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], **wrong})
    with pytest.raises(TypeError, match=r"expected torch\.bfloat16 or torch\.float16"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "dtype": torch.float64})
    assert len(optimizer.param_groups) == 2


def test_what_torch_loads_before_and_after_the_first_step() -> None:
    for steps in (0, 1):
        model, optimizer = layer(torch.bfloat16, amsgrad=True)
        for seed in range(steps):
            advance(model.weight, optimizer.step, seed)
        peer = torch.optim.AdamW(copy.deepcopy(model).parameters())
        peer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        (weight,) = peer.param_groups[0]["params"]
        advance(weight, peer.step, 5)
        assert peer.state[weight]["step"] == steps + 1
        assert peer.param_groups[0]["amsgrad"]


@pytest.mark.parametrize("step", [1, 1.0, torch.tensor(1), torch.tensor(1.0, dtype=torch.float64)], ids=repr)
def test_a_step_of_any_kind_is_loaded(step: Any) -> None:
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    peer = torch.optim.AdamW(weights[:1])
    advance(weights[0], peer.step, 0)
    state = copy.deepcopy(peer.state_dict())
    state["state"][0]["step"] = step
    own = custom_ops.AdamW(weights[1:])
    weights[1].data.copy_(weights[0])
    own.load_state_dict(state)
    for weight, optimizer in zip(weights, (peer, own), strict=True):
        advance(weight, optimizer.step, 1)
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)
    assert own.state[weights[1]]["step"] == 2


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    weight = nn.Parameter(torch.ones(3))
    own, sgd = custom_ops.AdamW([weight], lr=0.5), torch.optim.SGD([weight], momentum=0.9)
    advance(weight, own.step, 0)
    before = copy.deepcopy(own.state_dict())
    advance(weight, sgd.step, 0)
    with pytest.raises(
        ValueError, match="expected a state with exp_avg, exp_avg_sq, step, got one with momentum_buffer"
    ):
        own.load_state_dict(sgd.state_dict())
    larger = custom_ops.AdamW([nn.Parameter(torch.ones(4))])
    advance(larger.param_groups[0]["params"][0], larger.step, 0)
    with pytest.raises(ValueError, match=r"state 'exp_avg': expected shape \[3\], that of its parameter, got \[4\]"):
        own.load_state_dict(larger.state_dict())
    damaged = copy.deepcopy(own.state_dict())
    damaged["state"][0]["exp_avg_sq"] = 0.5
    with pytest.raises(TypeError, match="state 'exp_avg_sq': expected a tensor, got float"):
        own.load_state_dict(damaged)
    differentiable = torch.optim.AdamW([weight], differentiable=True, fused=False)
    with pytest.raises(ValueError, match="argument 'differentiable': expected False, because the kernel has no deriv"):
        own.load_state_dict(differentiable.state_dict())
    assert own.state_dict()["param_groups"] == before["param_groups"]
    torch.testing.assert_close(own.state_dict()["state"], before["state"], rtol=0, atol=0)


def test_a_model_that_is_cast_takes_its_state_along() -> None:
    model, optimizer = layer(None)
    for seed, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64)):
        model.to(dtype)
        advance(model.weight, optimizer.step, seed)
        state = optimizer.state[model.weight]
        assert state["exp_avg"].dtype == (torch.float32 if dtype in NARROW else dtype)
        assert ("master" in state) == (dtype in NARROW)
    assert state["step"] == 3


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "way",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],  # noqa: S301
    ids=["copy", "pickle"],
)
def test_copies_go_on_as_the_original(way: Callable[[Any], Any], dtype: torch.dtype | None) -> None:
    model, optimizer = layer(dtype, amsgrad=True)
    advance(model.weight, optimizer.step, 0)
    other, again = way((model, optimizer))
    for pair in ((model, optimizer), (other, again)):
        advance(pair[0].weight, pair[1].step, 1)
    assert torch.equal(model.weight, other.weight)
    assert model.weight is not other.weight


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_the_state_goes_through_torch_s_distributed_checkpoints(dtype: torch.dtype | None, flat: bool) -> None:
    from torch.distributed.checkpoint import state_dict as checkpoints

    options = checkpoints.StateDictOptions(flatten_optimizer_state_dict=flat)
    pairs = [layer(dtype, amsgrad=True) for _ in range(2)]
    (model, optimizer), (other, again) = pairs
    for seed in range(2):
        advance(model.weight, optimizer.step, seed)
    saved = copy.deepcopy(checkpoints.get_optimizer_state_dict(model, optimizer, options=options))
    other.load_state_dict(model.state_dict())
    checkpoints.set_optimizer_state_dict(other, again, saved, options=options)
    for own, its in pairs:
        advance(own.weight, its.step, 2)
    assert torch.equal(model.weight, other.weight)
    for name, value in optimizer.state[model.weight].items():
        assert torch.equal(value, again.state[other.weight][name]), name


SHARDED = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
import custom_ops

rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def trained(dtype, placement, **options):
    torch.manual_seed(0)
    weight, *gradients = torch.randn(4, 5, 3)
    weights = [nn.Parameter(weight.to(dtype)), nn.Parameter(distribute_tensor(weight.to(dtype), mesh, placement))]
    optimizers = [custom_ops.AdamW([w], lr=0.1, **options) for w in weights]
    for step, gradient in enumerate(gradients):
        gradient = gradient.to(dtype)
        weights[0].grad, weights[1].grad = gradient, distribute_tensor(gradient, mesh, placement)
        if step == 1:
            for w in weights:
                w.detach().mul_(2)
        norms = [o.gradient_norm() for o in optimizers]
        torch.testing.assert_close(*norms)
        for o in optimizers:
            o.step(norm=norms[0], max_norm=1.0)
    return weights[0].detach(), weights[1].full_tensor().detach()

for dtype in (torch.float32, torch.bfloat16):
    for placement in ([Shard(0)], [Shard(1)], [Replicate()]):
        alone, together = trained(dtype, placement, amsgrad=True)
        assert torch.equal(alone, together), (dtype, placement)

models = [nn.Linear(3, 5).bfloat16() for _ in range(2)]
models[1].load_state_dict(models[0].state_dict())
for parameter in models[0].parameters():
    dist.broadcast(parameter.data, 0)
models[1].load_state_dict(models[0].state_dict())
fully_shard(models[1], mesh=mesh)
optimizers = [custom_ops.AdamW(m.parameters(), lr=0.1) for m in models]
x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
for model, optimizer in zip(models, optimizers):
    for _ in range(2):
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer._fitted = None  # with its state, the second step takes the parts as they are
for one, other in zip(models[0].parameters(), models[1].parameters()):
    torch.testing.assert_close(other.full_tensor(), one, rtol=0.01, atol=0.01)
try:
    custom_ops.AdamW(models[1].float().parameters(), dtype=torch.bfloat16)
    raise AssertionError("a cast of DTensors was accepted")
except TypeError as error:
    assert "before it is sharded" in str(error)
os._exit(0)
"""


@pytest.mark.slow
def test_two_processes_share_the_parameters(tmp_path: Path) -> None:
    programs = [[sys.executable, "-c", SHARDED, str(rank), str(tmp_path / "meeting")] for rank in range(2)]
    processes = [subprocess.Popen(program, stderr=subprocess.PIPE, text=True) for program in programs]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode == 0, errors
