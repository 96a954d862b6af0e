"""The float64-calibrated comparison: right results pass, planted errors do not, random models are left alone."""

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from compile_bench.measure.accuracy import ATTEMPTS, compare_with_eager, draws_random_numbers, vector, widened
from compile_bench.targets.target import Target


def target(*layers):
    torch.manual_seed(0)
    return Target(nn.Sequential(nn.Linear(16, 16), nn.GELU(), *layers, nn.Linear(16, 4)), (torch.randn(8, 16),))


def test_the_same_computation_is_within_the_bound():
    made = target()
    model = made.copied()
    accuracy = compare_with_eager(made, model, model, train=True)
    assert accuracy.holds
    assert accuracy.tensors == 6  # the loss, the output and four gradients
    assert accuracy.output.compiled == accuracy.output.eager


def test_elements_of_sparse_and_complex_tensors_are_compared():
    sparse = torch.sparse_coo_tensor([[1], [0]], [2.0], (2, 2), check_invariants=True)
    assert vector(sparse).tolist() == [0, 0, 2, 0]
    assert vector(torch.tensor([1 + 2j], requires_grad=True).conj()).tolist() == [1, -2]


@dataclass
class Detections:
    scores: torch.Tensor
    kept: list


class Detector(nn.Linear):
    def forward(self, x):
        scores = super().forward(x)
        return Detections(scores, [scores > 0, scores.argmax(-1)])


class Drawing(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def forward(self, x):
        return self.draw(x)


class Labels(nn.Linear):
    def forward(self, x):
        return super().forward(x).argmax(-1)


def test_an_output_that_is_a_dataclass_is_compared():
    made = Target(Detector(4, 4), (torch.ones(2, 4),))
    model = made.copied()
    accuracy = compare_with_eager(made, model, model, train=True)
    assert accuracy.holds
    assert accuracy.tensors == 6  # the loss, three outputs and two gradients
    accuracy = compare_with_eager(made, lambda x: Detections(model(x).scores * 1.001, []), model, train=False)
    assert not accuracy.holds


class Parts(nn.Linear):
    """A result, and another that no gradient goes through."""

    def forward(self, x):
        y = super().forward(x)
        return y, y.detach() * 3


@pytest.mark.parametrize(
    ("model", "changed", "wrong"),
    [
        (nn.Linear(4, 4), lambda y: -y, "output of the model"),  # the loss is a mean square
        (Parts(4, 4), lambda y: (y[0], -y[1]), "output 2 of the model"),
    ],
)
def test_in_training_an_output_is_compared_that_the_loss_hides(model, changed, wrong):
    made = Target(model, (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),))
    own = made.copied()
    assert compare_with_eager(made, own, own, train=True).holds
    accuracy = compare_with_eager(made, lambda x: changed(own(x)), own, train=True)
    assert not accuracy.holds
    assert accuracy.output.holds
    assert accuracy.gradient.name == wrong


def test_an_output_without_floating_point_numbers_is_not_compared():
    made = Target(Labels(4, 4), (torch.ones(2, 4),))
    model = made.copied()
    assert "holds no floating-point tensor to compare" in compare_with_eager(made, model, model, train=False).skipped


def test_a_model_whose_parameters_are_not_made_yet_is_not_compared():
    made = Target(nn.LazyLinear(4), (torch.ones(2, 4),))
    model = made.copied()
    model(torch.ones(2, 4))
    assert "first call makes its parameters" in compare_with_eager(made, model, model, train=True).skipped


def test_a_gradient_that_is_nan_is_wrong_wherever_it_stands():
    made = target()
    model = made.copied()
    model[2].weight.register_hook(lambda gradient: gradient * float("nan"))
    accuracy = compare_with_eager(made, model, model, train=True)
    assert not accuracy.holds
    assert accuracy.wrong == "the compiled step gives NaN or infinity where eager does not: 2.weight"


def test_a_compiled_call_that_raises_is_wrong_and_no_matter_of_float64():
    made = target()

    def raises(x):
        raise RuntimeError("accessing tensor output of CUDAGraphs that has been overwritten")

    accuracy = compare_with_eager(made, raises, made.copied(), train=False)
    assert not accuracy.holds
    assert accuracy.wrong.startswith("the compiled call raised RuntimeError: accessing tensor output of CUDAGraphs")
    assert not accuracy.skipped


def test_a_gradient_that_is_missing_or_too_many_is_wrong():
    made = target()
    model = made.copied()
    accuracy = compare_with_eager(made, lambda x: model[2](model[0](x).detach()), model, train=True)
    assert accuracy.wrong == "the compiled step gives no gradient of 0.weight, 0.bias"
    made.model[2].bias.requires_grad_(False)
    accuracy = compare_with_eager(made, model, model, train=True)
    assert accuracy.wrong == "the compiled step gives a gradient, and eager none, of 2.bias"


@pytest.mark.parametrize(("value", "train"), [("nan", False), ("inf", True)])
def test_a_model_whose_own_results_are_not_finite_is_not_compared(value, train):
    made = target()
    with torch.no_grad():
        made.model[2].bias.fill_(float(value))
    model = made.copied()
    skipped = compare_with_eager(made, model, model, train=train).skipped
    assert skipped.startswith("eager's own results are not finite: ")


class Masked(nn.Linear):
    """Scores of attention: ``fill`` stands where the mask is."""

    def forward(self, x, fill):
        scores = super().forward(x)
        mask = torch.ones(scores.shape[-2:]).triu(1)
        if fill == "added":
            return scores - 1e9 * mask
        return scores.masked_fill(mask.bool(), torch.finfo(scores.dtype).min if fill == "least" else fill)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fill", [float("-inf"), "least", "added", -1e9])
def test_what_fills_masked_places_hides_nothing(fill, dtype):
    """An infinity is nothing to compute with, float64 has another least number, and −1e9 is 1e9 times the bound."""
    torch.manual_seed(0)
    made = Target(Masked(16, 16).to(dtype), (torch.randn(16, 16, dtype=dtype), fill))
    model = made.copied()

    def changed(factor, at=slice(0)):
        def call(*given):
            scores = model(*given)
            scores = torch.where(scores.abs() < 1e3, scores * factor, scores)
            scores[0, at] = 0.5
            return scores

        return compare_with_eager(made, call, model, train=False)

    assert changed(1.0).holds
    assert not changed(1.0).skipped
    assert not changed(1.1).holds
    assert not changed(1.0, at=3).holds


class Dropped(Masked):
    def forward(self, x, fill):
        return super().forward(nn.functional.dropout(x, training=self.training), fill)


@pytest.mark.parametrize("fill", [float("-inf"), "least", -1e9])
def test_a_model_that_fills_masked_places_is_seen_to_be_random(fill):
    made = Target(Dropped(16, 16), (torch.randn(16, 16), fill))
    assert draws_random_numbers(made, train=True)
    assert not draws_random_numbers(made, train=False)
    cut = Target(Drawing(lambda x: x[: random.randint(1, 3)]), (torch.randn(4),))
    assert draws_random_numbers(cut, train=False)


def test_weights_are_set_back_before_comparing():
    made = target()
    model = made.copied()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert compare_with_eager(made, model, model, train=False).holds


class Keeping(nn.Module):
    """It keeps an average in a buffer, a count, and what it saw last, none of them in its state dict."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.seen = nn.Linear(8, 8), 1.0, []
        self.register_buffer("average", torch.ones(8), persistent=False)

    def forward(self, x):
        h = self.linear(x)
        self.average.mul_(0.9995).add_(0.0005 * h.detach().mean(0))
        self.scale *= 0.9999
        if self.seen:
            h = h + self.last
        self.seen.append(h.detach().mean().item())
        self.last = h.detach()
        return (h - self.average) * self.scale

    def state_dict(self, *args, **kwargs):
        return {"average": self.average}


def test_what_a_model_keeps_is_set_back_before_comparing():
    torch.manual_seed(0)
    made = Target(Keeping(), (torch.randn(4, 8),))
    model = made.copied()
    for _ in range(100):
        made.step(model, train=True)()
    for train in (True, False):
        accuracy = compare_with_eager(made, model, model, train=train)
        assert (accuracy.holds, accuracy.skipped) == (True, "")
    assert not compare_with_eager(made, lambda x: model(x) * 1.001, model, train=False).holds


def test_a_list_of_weights_stays_one_of_the_modules_own():
    torch.manual_seed(0)
    made = Target(nn.LSTM(4, 4), (torch.randn(3, 2, 4),), loss=lambda out: out[0].square().sum())
    model = made.copied()
    made.step(model, train=True)()
    assert compare_with_eager(made, model, model, train=True).holds
    assert all(one is other for one, other in zip(model._flat_weights, model.parameters(), strict=True))


class Several(nn.Linear):
    def forward(self, x):
        x.mul_(3)  # the bound would grow with the difference between a first and a second call
        h = super().forward(x)
        return h * 1e8, h.softmax(-1), h.argmax(-1)


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        (lambda a, b, c: (a, b.roll(1, -1), c), "output 2"),  # small beside the first
        (lambda a, b, c: (a, b, c + 1), "output 3"),
    ],
)
def test_each_output_is_compared(changed, name):
    torch.manual_seed(0)
    made = Target(Several(8, 8), (torch.randn(4, 8),))
    model = made.copied()
    assert compare_with_eager(made, model, model, train=False).tensors == 4  # three outputs and the argument
    accuracy = compare_with_eager(made, lambda x: changed(*model(x)), model, train=False)
    assert (accuracy.output.holds, accuracy.gradient.holds, accuracy.gradient.name) == (True, False, name)
    assert accuracy.attempts == ATTEMPTS


def test_an_output_of_another_shape_or_dtype_is_wrong():
    torch.manual_seed(0)
    made = Target(Several(8, 8), (torch.randn(4, 8),))
    model = made.copied()
    for change, said in ((lambda a: a.reshape(8, 4), "float32[8, 4]"), (lambda a: a.double(), "float64[4, 8]")):
        accuracy = compare_with_eager(made, lambda x, c=change: (c(model(x)[0]), *model(x)[1:]), model, train=False)
        assert accuracy.wrong.startswith(f"the compiled step gives {said}, float32[4, 8], int64[4] instead of")


def test_a_training_step_has_its_backward_pass_though_the_file_turned_gradients_off():
    made = target()
    model = made.copied()
    with torch.set_grad_enabled(False):
        made.step(model, train=True)()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert compare_with_eager(made, model, model, train=True).tensors == 6


def test_a_lower_precision_is_outside_the_bound():
    made = target()
    model = made.copied()

    def rounded(x):
        return model(x.bfloat16().float())

    accuracy = compare_with_eager(made, rounded, model, train=False)
    assert not accuracy.holds
    assert accuracy.output.compiled > 100 * accuracy.output.eager


def test_a_wrong_gradient_is_found_though_the_output_is_right():
    made = target()
    model = made.copied()
    model[0].weight.register_hook(lambda gradient: gradient * 1.001)
    accuracy = compare_with_eager(made, model, model, train=True)
    assert accuracy.output.holds
    assert not accuracy.gradient.holds
    assert accuracy.gradient.name == "0.weight"
    assert accuracy.attempts == ATTEMPTS


def test_a_wrong_gradient_of_an_argument_is_found():
    x = torch.randn(4, 8, requires_grad=True)
    x.grad = torch.ones_like(x)  # of the steps that were timed
    made = Target(Drawing(lambda x: x * x), (x,))
    assert compare_with_eager(made, made.model, made.model, train=True).holds
    accuracy = compare_with_eager(made, lambda x: x * x.detach(), made.model, train=True)
    assert accuracy.output.holds
    assert (accuracy.gradient.name, accuracy.gradient.holds) == ("argument 1", False)
    assert torch.equal(x.grad, torch.ones_like(x))


def test_an_argument_that_stands_twice_has_one_gradient_in_float64_too():
    x = torch.randn(4, 8, requires_grad=True)
    made = Target(Drawing(lambda xs: xs[0] * xs[1]), ([x, x],))
    accuracy = compare_with_eager(made, made.model, made.model, train=True)
    assert accuracy.holds
    assert accuracy.gradient.bound < 1e-5


def test_a_gradient_that_jumps_is_looked_at_with_other_weights():
    made = target()
    model = made.copied()
    original = made.model[0].weight.detach().clone()

    def jump(gradient):
        return gradient * 1.001 if torch.equal(model[0].weight, original) else gradient

    model[0].weight.register_hook(jump)
    accuracy = compare_with_eager(made, model, model, train=True)
    assert accuracy.holds
    assert accuracy.attempts == 2
    assert torch.equal(model[0].weight, original)  # set back


def test_a_gradient_that_cancels_may_be_summed_in_another_order_and_not_be_wrong():
    """That of a bias before a batch norm is zero but for rounding errors."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    made = Target(layers, (torch.randn(4, 3, 16, 16),))
    model = made.copied()
    of_sums = torch.tensor([1.0, -1.0, 1.0, -1.0])
    hook = model[0].bias.register_hook(lambda gradient: gradient + 1e-6 * of_sums)
    accuracy = compare_with_eager(made, model, model, train=True)
    assert accuracy.holds
    hook.remove()
    model[0].bias.register_hook(lambda gradient: gradient + 1e-4 * of_sums)
    accuracy = compare_with_eager(made, model, model, train=True)
    assert (accuracy.gradient.name, accuracy.gradient.holds) == ("0.bias", False)


def test_a_wrong_output_is_not_looked_at_again():
    made = target()
    model = made.copied()
    accuracy = compare_with_eager(made, lambda x: model(x) * 1.001, model, train=True)
    assert not accuracy.output.holds
    assert accuracy.attempts == 1


def test_a_model_with_dropout_is_not_compared_in_training():
    made = target(nn.Dropout(0.5))
    made.model.train()
    model = made.copied()
    assert "random numbers" in compare_with_eager(made, model, model, train=True).skipped
    model.eval()
    assert not compare_with_eager(made, model, model, train=False).skipped


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x * (1 + 1e-4 * np.random.rand()),  # as a mask over one of a thousand positions
        lambda x: x * (1 + 1e-4 * random.random()),
        lambda x: x if torch.rand(()) > 0.15 else 0 * x,  # a layer that is left out now and then
    ],
)
def test_small_and_rare_effects_of_random_numbers_are_seen(draw):
    made = target()
    made.model.append(Drawing(draw))
    assert draws_random_numbers(made, train=True)


def test_a_count_of_calls_is_no_random_number_to_a_copy():
    """Compared in its first call each time, a model with a counter needs no compiler's own rounding in its bound."""

    class Counting(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    made = target()
    made.model.append(Counting())
    assert draws_random_numbers(made, train=True)  # as the same model sees it
    assert not draws_random_numbers(made, train=True, fresh=True)
    made.model.append(nn.Dropout(0.5))
    assert draws_random_numbers(made, train=True, fresh=True)


def test_a_number_that_decides_nothing_is_no_randomness():
    made = target()
    made.model.append(Drawing(lambda x: x if torch.rand(()) + random.random() > -1 else 0 * x))
    model = made.copied()
    assert not draws_random_numbers(made, train=True)
    assert not compare_with_eager(made, model, model, train=True).skipped


def test_a_model_that_cannot_do_float64_says_so():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x.to(torch.float32))

    torch.manual_seed(0)
    made = Target(Fixed(), (torch.randn(2, 4),))
    model = made.copied()
    assert "does not run in float64" in compare_with_eager(made, model, model, train=False).skipped


def test_a_model_that_makes_tensors_of_the_default_dtype_is_compared():
    class Masked(nn.Linear):
        def forward(self, x):
            return torch.ones(len(x), len(x)).tril() @ super().forward(x)

    torch.manual_seed(0)
    made = Target(Masked(4, 4), (torch.randn(3, 4),))
    model = made.copied()
    accuracy = compare_with_eager(made, model, model, train=True)
    assert (accuracy.holds, accuracy.skipped) == (True, "")
    assert not compare_with_eager(made, lambda x: model(x) * 1.00001, model, train=True).holds
    assert torch.get_default_dtype() == torch.float32


def test_a_sum_in_order_is_within_the_bound_and_a_dropped_term_is_not():
    class Scaled(nn.Module):
        """A weight whose gradient is a sum over all rows, added as the flag says."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            return x * self.weight

    torch.manual_seed(0)
    made = Target(Scaled(), (torch.randn(4096, 4),), loss=lambda y: (y * y.detach().sin()).sum())
    model = made.copied()

    def gradient_over(rows):
        x = made.args[0]
        terms = x * (x * model.weight.detach()).sin()
        total = torch.zeros(4)
        for term in terms[:rows]:
            total = total + term
        return total

    def check(rows):
        hook = model.weight.register_hook(lambda _: gradient_over(rows))
        accuracy = compare_with_eager(made, model, model, train=True)
        hook.remove()
        return accuracy

    assert check(4096).holds
    assert not check(4095).holds


class Attending(nn.Module):
    """It keeps statistics in buffers, keys in a cache that is an argument, and what it saw last in a list."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.seen = nn.BatchNorm1d(8), nn.Linear(8, 8), []

    def forward(self, x, cache, position):
        h = self.linear(self.norm(x.mul_(0.5)))
        cache.keys[position].copy_(h[0].detach())
        self.seen.append(h.detach().clone())
        return h


class Cache:
    def __init__(self):
        self.keys = torch.full((4096, 8), -1e9)


def written(model, cache):
    return {
        "norm.running_mean": lambda: model.norm.running_mean.data.mul_(1.1),
        "norm.num_batches_tracked": lambda: model.norm.num_batches_tracked.add_(1),
        "args[0]": lambda: None,
        "args[1].keys": lambda: cache.keys[5].add_(0.01),
        "seen[0]": lambda: model.seen[0].mul_(1.01),
    }


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("name", ["", *written(None, None)])
def test_what_a_call_writes_is_compared(name, train):
    torch.manual_seed(0)
    made = Target(Attending(), (torch.randn(16, 8), Cache(), 5))
    assert widened(made).args[1].keys.dtype == torch.float64
    model = made.copied()

    def call(x, cache, position):
        output = model(x, cache, position)
        if name == "args[0]":
            x.data.mul_(1.01)
        elif name:
            with torch.no_grad():
                written(model, cache)[name]()
        return output

    accuracy = compare_with_eager(made, call, model, train=train)
    assert (accuracy.skipped, accuracy.wrong) == ("", "")
    assert accuracy.output.holds
    assert accuracy.holds is not bool(name)
    if name:
        assert accuracy.gradient.name == f"written {name}"


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor
    ids: list
    note: str = ""


def test_tensors_in_a_dataclass_are_arguments_like_others():
    x = torch.randn(4, 8, requires_grad=True)
    made = Target(Drawing(lambda batch: batch.x * batch.ids[0] * batch.x), (Batch(x, [torch.arange(8)]),))
    assert [tensor.dtype for tensor in made.tensors] == [torch.float32, torch.int64]
    moved = made.moved("meta").args[0]
    assert (moved.x.device.type, moved.ids[0].device.type, moved.x.is_leaf) == ("meta", "meta", True)
    model = made.copied()
    assert compare_with_eager(made, model, model, train=True).holds
    accuracy = compare_with_eager(made, lambda batch: batch.x * batch.ids[0] * batch.x.detach(), model, train=True)
    assert (accuracy.gradient.name, accuracy.gradient.holds) == ("argument 1", False)


def test_what_only_the_compiled_call_keeps_or_drops_is_wrong():
    torch.manual_seed(0)
    made = Target(Attending(), (torch.randn(16, 8), Cache(), 5))
    model = made.copied()

    def call(*given):
        output = model(*given)
        model.seen.clear()
        return output

    wrong = compare_with_eager(made, call, model, train=False).wrong
    assert wrong == "the compiled step leaves no tensor in seen[0] instead of float32[16, 8]"


class Noisy(nn.Linear):
    """Its next call would use what this one has drawn."""

    def __init__(self):
        super().__init__(4, 4)
        self.register_buffer("noise", torch.zeros(4))
        self.register_buffer("scratch", torch.full((4,), float("nan")))

    def forward(self, x):
        self.noise.copy_(torch.randn(4))
        self.scratch[0] = x[0, 0]
        return super().forward(x)


def test_random_numbers_for_a_later_call_are_not_compared_and_nan_that_stays_hides_nothing():
    torch.manual_seed(0)
    made = Target(Noisy(), (torch.randn(8, 4),))
    model = made.copied()

    def drawing(x):
        torch.manual_seed(3)
        return model(x)

    accuracy = compare_with_eager(made, drawing, model, train=False)
    assert (accuracy.holds, accuracy.tensors) == (True, 2)  # the output and the scratch
    assert accuracy.left_out == ("noise",)
    assert accuracy.gap == "; not compared, since random or not finite by itself: noise"


class Shifting(nn.Module):
    """It writes one view of a buffer and reads another that overlaps it."""

    def forward(self, x, written, read):
        written[:, :4] = x
        return read * 2


def test_arguments_that_overlap_in_memory_still_do_in_copies_and_in_float64():
    base = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    made = Target(Shifting(), (torch.ones(4, 4), base[:, :20], base[:, 2:22]))
    model = made.copied()
    compiled = torch.compile(model, backend="aot_eager")
    compiled(*made.args)
    base.zero_()
    accuracy = compare_with_eager(made, compiled, model, train=False)
    assert (accuracy.wrong, accuracy.left_out, accuracy.tensors) == ("", (), 3)
    assert accuracy.output.eager == 0.0  # eager and float64 have read what was written
    moved = made.moved("meta")
    assert moved.args[1]._base is moved.args[2]._base
    assert base.eq(0.0).all()


def test_nested_tensors_are_compared():
    torch.manual_seed(0)
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(5, 4)], layout=torch.jagged)
    made = Target(nn.Linear(4, 4), (nested,))
    model = made.copied()
    accuracy = compare_with_eager(made, model, model, train=False)
    assert (accuracy.skipped, accuracy.holds, accuracy.output.eager > 0.0) == ("", True, True)
    assert not compare_with_eager(made, lambda x: model(x) * 1.01, model, train=False).holds
