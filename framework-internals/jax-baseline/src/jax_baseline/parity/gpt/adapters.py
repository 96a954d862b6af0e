"""Adapters of torch_baseline, of this package and of permuted references for :mod:`jax_baseline.parity.comparison`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchkit.device import Device
from jax_baseline.gpt.compilation import ROUND_AS_WRITTEN
from jax_baseline.gpt.devices import require_jax_device, share_the_gpu
from jax_baseline.gpt.model import activations as jax_activations
from jax_baseline.gpt.optim import compute_dtype, master_dtype
from jax_baseline.gpt.train import initial_state, make_train_step
from jax_baseline.gpt.transfer import MOMENTS, from_torch, to_torch
from jax_baseline.parity.comparison import CONTROL_STEPS, Arrays, Comparison, Observation, compare
from jax_baseline.parity.gpt.permuted import Permutation
from jax_baseline.parity.rounding import torch_noise
from torch_baseline.config import GPTConfig, Precision, TrainConfig
from torch_baseline.data import Tokens, batch, load_corpus, require_length
from torch_baseline.model import GPT, Attention, Weights, causal_attention, init_numpy, parameter_count
from torch_baseline.optim import learning_rate, make_optimizer, set_learning_rate
from torch_baseline.train import TrainStep as TorchTrainStep
from torch_baseline.train import autocast
from torch_baseline.train import make_train_step as make_torch_train_step

# Parameters up to which a step in float64 takes a moment on a CPU.
_SMALL = 20_000_000


@dataclass(frozen=True)
class Setup:
    """Settings of a comparison."""

    model: GPTConfig
    training: TrainConfig  # steps, batch size, learning rate, dtype and seed
    device: Device = "cpu"
    least_controls: int = 3  # smallest number of controls, see :func:`control_adapters`
    # Factor of the initial matrices. Above 1, gains and biases are also random, so that every operation leaves its
    # almost linear range and every parameter matters.
    scale: float = 1.0

    @property
    def controls(self) -> int:
        """Number of controls: more for fewer steps, since the margin depends on the number of control steps."""
        return max(self.least_controls, -(-CONTROL_STEPS // self.training.steps))

    def with_seed(self, seed: int) -> Setup:
        """The same with other weights and batches."""
        return replace(self, training=replace(self.training, seed=seed))

    def weights(self) -> Weights:
        """The initial weights."""
        weights = init_numpy(self.model, self.training.seed)
        if self.scale == 1.0:
            return weights
        generator = np.random.Generator(np.random.PCG64(self.training.seed))
        return {
            name: array * np.float32(self.scale)
            if array.ndim > 1
            else array + np.float32(0.3) * generator.standard_normal(array.shape, np.float32)
            for name, array in weights.items()
        }

    def probe(self) -> Setup:
        """The same model with scaled weights and without warm-up, for two steps; in float64 where the model is small.

        Right after the initial values, activations are almost linear, gains are 1 and biases 0, and a warm-up takes
        steps of almost no length: many mistakes then change less than rounding does.
        """
        small = parameter_count(self.model) <= _SMALL
        training = replace(
            self.training,
            steps=min(self.training.steps, 2),
            batch_size=min(self.training.batch_size, 2 * self.training.accumulation),
            warmup=0,
            dtype="float64" if small else self.training.dtype,
        )
        return replace(self, training=training, scale=8.0)

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        steps: int,
        seed: int,
        dtype: Precision,
        device: Device = "cpu",
        lr: float = 1e-3,  # at 3e-3 the gradient norm has a spike, which multiplies rounding by ten
        batch_size: int | None = None,
        least_controls: int = 3,
        **shape: int | None,
    ) -> Setup:
        """Return the settings for a model preset.

        Training amplifies rounding: at a learning rate of 3e-3, which suits ``tiny`` for learning, torch deviates from
        its permuted reference ten times as far as at 1e-3, and the bounds are that much wider.

        Raises:
            ValueError: For an unknown preset or dtype, or for an impossible shape.
        """
        if dtype not in ("float64", "float32", "bfloat16"):
            raise ValueError(f"dtype must be float64, float32 or bfloat16, got {dtype!r}")
        training = TrainConfig.preset(name)
        training = replace(
            training,
            steps=steps,
            seed=seed,
            dtype=dtype,
            lr=lr,
            min_lr=lr / 10,
            batch_size=batch_size or training.batch_size,
            compile=False,
            ema_decay=0.0,
        )
        changed: dict[str, Any] = {key: size for key, size in shape.items() if size is not None}
        model = replace(GPTConfig.preset(name), **changed)
        return cls(model, training, device, least_controls)

    def batches(self) -> list[tuple[Tokens, Tokens]]:
        """The batches of the run, in order."""
        corpus = load_corpus(self.training.data)
        require_length(corpus, self.model.block_size)
        return [
            batch(corpus.train, self.training.seed, step, self.training.batch_size, self.model.block_size)
            for step in range(self.training.steps)
        ]


class TorchAdapter:
    """The training step of ``torch_baseline``, or a permuted reference.

    ``attention`` replaces the model's, and ``noise`` is the seed of rounding noise. A permuted reference is observed in
    the original order.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        attention: Attention = causal_attention,
        permutation: Permutation | None = None,
        noise: int | None = None,
    ) -> None:
        self._setup, self._attention, self._permutation = setup, attention, permutation
        self._noise = torch_noise(noise)
        self.restart()

    def restart(self) -> None:
        """Return to the initial weights."""
        setup = self._setup
        self._model = GPT(setup.model, seed=setup.training.seed, attention=self._attention).to(setup.device)
        weights = setup.weights()
        self._model.load_numpy(weights if self._permutation is None else self._permutation.weights(weights))
        if setup.training.dtype == "float64":
            self._model.double()
        self._optimizer = make_optimizer(self._model, setup.training)
        self._gradients: Arrays = {}
        self._step = make_torch_train_step(
            self._model, self._optimizer, setup.training, before_update=self._keep_gradients
        )
        self._done = 0

    def step(self, tokens_BT: Tokens, targets_BT: Tokens) -> Observation:
        """Take the next step."""
        set_learning_rate(self._optimizer, learning_rate(self._done, self._setup.training))
        self._done += 1
        with self._noise:
            loss = self._step(self._tensor(tokens_BT), self._tensor(targets_BT))
        moments: dict[str, NDArray] = {}
        for key in MOMENTS:
            state = {
                name: self._optimizer.state[parameter][key].cpu().numpy().copy()
                for name, parameter in self._model.named_parameters()
            }
            moments |= {f"{key} of {name}": array for name, array in self._original(state).items()}
        return Observation(
            loss.item(),
            self._step.gradient_norm.item(),
            self._original(self._gradients),
            self._original(self._model.to_numpy()),
            moments,
        )

    @torch.no_grad()
    def activations(self, tokens_BT: Tokens) -> Arrays:
        """Return the outputs of the modules under the names of :func:`jax_baseline.gpt.model.forward`."""
        outputs: dict[str, Tensor] = {}

        def keep(name: str) -> Callable[[nn.Module, object, Tensor], None]:
            return lambda module, inputs, output: outputs.update({name: output})

        parts = [
            f"blocks.{index}.{part}" for index in range(self._setup.model.n_layer) for part in ("attention", "mlp")
        ]
        hooks = [
            self._model.get_submodule(name).register_forward_hook(keep(name)) for name in ("embedding", *parts, "norm")
        ]
        with autocast(self._setup.training.dtype, self._setup.device), self._noise:
            outputs["logits"] = self._model(self._tensor(tokens_BT))
        for hook in hooks:
            hook.remove()
        wide = torch.float64 if self._setup.training.dtype == "float64" else torch.float32
        arrays = {name: output.to(wide).cpu().numpy() for name, output in outputs.items()}
        return arrays if self._permutation is None else self._permutation.original_activations(arrays)

    def _tensor(self, tokens_BT: Tokens) -> Tensor:
        if self._permutation is not None:
            tokens_BT = self._permutation.batch(tokens_BT)
        return torch.from_numpy(tokens_BT).to(self._setup.device)

    def _original(self, weights: Arrays) -> Arrays:
        return weights if self._permutation is None else self._permutation.original_weights(weights)

    def _keep_gradients(self, train_step: TorchTrainStep, loss: Tensor) -> None:
        # Copy, because .numpy() of a CPU tensor is a view, and clipping scales the gradient in place afterwards.
        self._gradients = {
            name: parameter.grad.cpu().numpy().copy()
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None
        }


class JaxAdapter:
    """The training step of this package, from the same initial weights."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._device = jax.devices(setup.device)[0]
        self._step = make_train_step(
            setup.model, setup.training, keep_gradients=True, compiler_options=ROUND_AS_WRITTEN
        )
        self._activations = jax.jit(
            lambda params, tokens_BT: jax_activations(
                params, tokens_BT, setup.model, dtype=compute_dtype(setup.training)
            ),
            compiler_options=ROUND_AS_WRITTEN,
        )
        self.restart()

    def restart(self, seed: int | None = None) -> None:
        """Return to the initial weights, or take those of another seed; the step stays compiled."""
        if seed is not None:
            self._setup = self._setup.with_seed(seed)
        setup = self._setup
        params = from_torch(setup.weights(), setup.model, master_dtype(setup.training))
        self._state = jax.device_put(initial_state(setup.model, setup.training, params), self._device)

    def step(self, tokens_BT: Tokens, targets_BT: Tokens) -> Observation:
        """Take the next step."""
        batch_ = jax.device_put((tokens_BT.astype(np.int32), targets_BT.astype(np.int32)), self._device)
        self._state, metrics = self._step(self._state, *batch_)
        assert metrics.gradients is not None, "keep_gradients is set"
        model = self._setup.model
        return Observation(
            float(metrics.loss),
            float(metrics.gradient_norm),
            to_torch(metrics.gradients, model),
            to_torch(self._state.params, model),
            moments_by_torch_names(self._state.optimizer, model),
        )

    def activations(self, tokens_BT: Tokens) -> Arrays:
        """Return the intermediates that the forward pass records."""
        outputs = self._activations(self._state.params, jax.device_put(tokens_BT.astype(np.int32), self._device))
        wide = np.float64 if self._setup.training.dtype == "float64" else np.float32
        return {name: np.asarray(array).astype(wide) for name, array in outputs.items()}


def moments_by_torch_names(state: optax.OptState, model: GPTConfig) -> dict[str, NDArray]:
    """Return Adam's moments of an optax state with the names and layouts of :class:`TorchAdapter`."""
    by_torch_names: dict[str, NDArray] = {}
    for torch_name, optax_name in MOMENTS.items():
        moments = to_torch(optax.tree_utils.tree_get(state, optax_name), model)
        by_torch_names |= {f"{torch_name} of {name}": array for name, array in moments.items()}
    return by_torch_names


def control_adapters(setup: Setup) -> list[TorchAdapter]:
    """Return permuted references, one per control; every second one also computes attention by its formula.

    A control with another attention alone would round like torch in every other operation. In a permuted reference
    every sum of the model has another order of its terms, as in JAX. Rounding noise moves what the few and short sums
    of a small model leave alone.
    """
    return [
        TorchAdapter(
            setup,
            attention=written_out_attention if index % 2 else causal_attention,
            permutation=Permutation.draw(setup.model, setup.training.batch_size, seed=setup.training.seed + index),
            noise=setup.training.seed + index,
        )
        for index in range(setup.controls)
    ]


def run(setup: Setup) -> Comparison:
    """Run torch, JAX and the permuted references over the same batches.

    float64 enables JAX's 64-bit mode during the run.

    Raises:
        UserError: If JAX has no such device.
    """
    return next(run_seeds(setup, [setup.training.seed]))


def run_seeds(setup: Setup, seeds: Iterable[int]) -> Iterator[Comparison]:
    """Compare from several seeds as :func:`run` does from one, and compile the step of JAX once.

    Raises:
        UserError: If JAX has no such device.
    """
    share_the_gpu()
    require_jax_device(setup.device)
    with jax.enable_x64(setup.training.dtype == "float64"):
        candidate = JaxAdapter(setup)
        for seed in seeds:
            candidate.restart(seed)
            of_seed = setup.with_seed(seed)
            reference, controls = TorchAdapter(of_seed), control_adapters(of_seed)
            yield compare(
                of_seed.batches(),
                reference=reference,
                candidate=candidate,
                controls=controls,
                dtype=setup.training.dtype,
            )


def written_out_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """Return causal attention by its formula, with the softmax in at least float32."""
    wide = torch.promote_types(q_BHTD.dtype, torch.float32)
    with torch.autocast(q_BHTD.device.type, enabled=False):
        scores_BHTS = (q_BHTD.to(wide) @ k_BHTD.to(wide).transpose(-2, -1)) / math.sqrt(q_BHTD.shape[-1])
        later_TS = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=q_BHTD.device).triu(1)
        weights_BHTS = scores_BHTS.masked_fill(later_TS, -math.inf).softmax(-1)
        return weights_BHTS.to(v_BHTD.dtype) @ v_BHTD
