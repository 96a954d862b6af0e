"""Models of packages that others wrote: all that TORCH_LOGS=graph_breaks,recompiles names is found."""

from __future__ import annotations

import importlib

import pytest

from compile_bench import Case
from compile_bench.measure.survey import survey

from .test_compile_agreement import compare_recompilations, logged, places, recompile_limits

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # the packages warn, and so does PyTorch's compiler about what they do
]

HEAD = "import torch\nfrom torch import nn\n\nfrom compile_bench.targets.target import Target\n\n\n"
TARGETS = {
    "gpytorch": """\
def target():
    import gpytorch

    torch.manual_seed(0)
    x = torch.linspace(0, 1, 20)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Process(gpytorch.models.ExactGP):
        def __init__(self):
            super().__init__(x, x.sin(), likelihood)
            self.mean, self.kernel = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))

    class Step(nn.Module):
        def __init__(self):
            super().__init__()
            self.process = Process()
            self.loss = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, self.process)

        def forward(self, x):
            return -self.loss(self.process(x), x.sin())

    return Step(), (x,)
""",
    "e3nn": """\
def target():
    from e3nn import o3

    torch.manual_seed(0)
    return o3.FullyConnectedTensorProduct("2x0e+1x1o", "2x0e+1x1o", "1x1o"), (torch.randn(6, 5), torch.randn(6, 5))
""",
    "kornia": """\
def target():
    import kornia.augmentation as augmentation

    torch.manual_seed(0)
    parts = augmentation.RandomHorizontalFlip(p=1.0), augmentation.RandomAffine(10.0, p=1.0)
    images = [torch.rand(n, 3, 16, 16) for n in (2, 3, 1)]
    return Target(nn.Sequential(*parts), (images[0],), schedule=images[1:])
""",
    "accelerate": """\
def target():
    from accelerate import Accelerator

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(8, 2)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def train_step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        return loss.detach()

    return train_step, (torch.randn(4, 8),)
""",
    "pyro": """\
def target():
    import pyro
    import pyro.distributions as distributions

    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.place = nn.Parameter(torch.zeros(()))

        def forward(self, data):
            with pyro.plate("data", 10):
                pyro.sample("x", distributions.Normal(self.place, 1.0), obs=data)
            return distributions.Normal(self.place, 1.0).log_prob(data).sum()

    return Model(), (torch.randn(10),)
""",
    "peft": """\
def target():
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=200))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"]))
    first, *others = [{"input_ids": t, "labels": t} for t in (torch.randint(0, 200, (2, n)) for n in (16, 24, 1))]
    return Target(adapted, kwargs=first, schedule=others)
""",
    "lightning": """\
def target():
    import lightning

    torch.manual_seed(0)

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(8, 2)

        def forward(self, batch):
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

    return Target(Lit(), (torch.randn(4, 8),), schedule=[torch.randn(n, 8) for n in (2, 1)])
""",
    "torchvision": """\
def target():
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    torch.manual_seed(0)
    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    boxes, labels = torch.tensor([[4.0, 4.0, 40.0, 40.0]]), torch.tensor([1])
    return model, ([torch.rand(3, 64, 64)], [{"boxes": boxes, "labels": labels}])
""",
}


@pytest.mark.parametrize("package", TARGETS)
def test_every_line_and_guard_of_the_log_is_found_with_its_caller(package, tmp_path):
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision built for another torch
        pytest.skip(f"{package} cannot be imported: {str(error).splitlines()[0]}")
    path = tmp_path / f"of_{package}.py"
    path.write_text(HEAD + TARGETS[package])
    case = Case(f"{path}:target", "cpu")
    found = survey(case, seeds=(0,))
    lines = {place for each in found.breaks for place in (each.place, each.library)}
    lines |= {frame.place for each in found.breaks for frame in each.stack}
    messages = logged(case, found.calls)
    log = places(messages) | recompile_limits(messages)
    assert {place for place in log if not place.startswith("<eval_with_key>")} <= lines
    compare_recompilations(found, messages)
    for each in found.breaks:
        if any(frame.file == str(path) for frame in each.stack):
            assert each.file == str(path), each  # the user's line, with the package's beside it
