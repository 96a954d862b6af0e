import dataclasses

import pytest
import torch

from benchkit import UserError
from torch_baseline import data
from torch_baseline.config import GPTConfig, TrainConfig
from torch_baseline.model import GPT
from torch_baseline.optim import ClippingOptimizer, make_optimizer, set_learning_rate
from torch_baseline.train import GraphedStep, make_train_step

SHORT = TrainConfig(steps=6, batch_size=4)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def make_step(shape: GPTConfig, config: TrainConfig, device: str, **options):
    model = GPT(shape).to(device)
    return make_train_step(model, make_optimizer(model, config, **options), config)


def batches(count: int, device: str, block_size: int = 32):
    corpus = data.load_corpus().train
    return [[torch.from_numpy(p).to(device) for p in data.batch(corpus, 0, i, 4, block_size)] for i in range(count)]


class Clipping(torch.optim.SGD):
    """Clips in its step, as custom_ops.AdamW does, and notes with what."""

    def __init__(self, groups, lr, betas, eps):
        super().__init__(groups, lr=float(lr))
        self.asked = []

    def gradient_norm(self):
        return torch.tensor(3.0)

    def step(self, closure=None, *, norm, max_norm):
        self.asked.append((float(norm), max_norm))
        super().step(closure)


def test_an_optimizer_that_clips_by_itself_gets_the_norm_and_the_gradients_as_they_are(small):
    step = make_step(small, SHORT, "cpu", kind=Clipping)
    assert isinstance(step.optimizer, ClippingOptimizer)
    plain = make_step(small, dataclasses.replace(SHORT, clip=0.0), "cpu")
    (x, y), *_ = batches(1, "cpu")
    assert torch.equal(step(x, y), plain(x, y))
    assert step.optimizer.asked == [(3.0, SHORT.clip)]
    assert step.gradient_norm == 3
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(step.parameters, plain.parameters, strict=True))


def test_a_graph_on_a_cpu_is_refused(small):
    with pytest.raises(UserError, match="needs an NVIDIA GPU"):
        GraphedStep(make_step(small, SHORT, "cpu", graph=True))


def test_the_learning_rate_on_the_device_changes_in_place(small):
    optimizer = make_step(small, SHORT, "cpu", kind=torch.optim.AdamW, graph=True).optimizer
    rates = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.25)
    assert all(group["lr"] is rate and rate == 0.25 for group, rate in zip(optimizer.param_groups, rates, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_replays_take_the_same_steps(small):
    # Float64, so that sums in another order, which atomics give, stay far below the bound.
    config = dataclasses.replace(SHORT, dtype="float64")
    losses = []
    for graph in (False, True):
        model = GPT(small).cuda().double()
        optimizer = make_optimizer(model, config, graph=graph)
        step = make_train_step(model, optimizer, config)
        taken = GraphedStep(step) if graph else step
        found = []
        for index, (x, y) in enumerate(batches(8, "cuda")):
            set_learning_rate(optimizer, 2**-10 * (index + 1))  # the graph's rate is a float32 tensor
            found.append(taken(x, y))
        losses.append(torch.stack([*found, step.gradient_norm]))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=0)


@pytest.mark.gpu
@needs_gpu
def test_what_a_graph_cannot_do_is_refused(small):
    with pytest.raises(ValueError, match=r"make_optimizer\(graph=True\)"):
        GraphedStep(make_step(small, SHORT, "cuda"))
    with pytest.raises(ValueError, match="cannot wait for the device"):
        GraphedStep(make_step(small, dataclasses.replace(SHORT, dtype="float16"), "cuda", graph=True))
    step = GraphedStep(make_step(small, SHORT, "cuda", graph=True))
    for x, y in batches(4, "cuda"):
        step(x, y)
    with pytest.raises(ValueError, match=r"takes shape \[4, 32\], got \[4, 16\]"):
        step(x[:, :16], y[:, :16])
