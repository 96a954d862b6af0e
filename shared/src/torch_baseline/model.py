"""A GPT whose norm, residual sum, activation, rotation, attention and loss can be replaced by other operators.

Pre-norm blocks with RMSNorm (Zhang and Sennrich 2019), rotary positions (Su et al. 2021), an MLP with a biased
tanh-GELU, causal attention and, by default, a tied embedding.

Shapes: B sequences, T positions, C model width, H heads, D head size (C = H·D), F MLP width (4·C), V vocabulary.
A name ends in the shape of its tensor: ``x_BTC``. Weights are (out, in), as in ``torch.nn.Linear``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_baseline.config import GPTConfig

NormFactory = Callable[[int, float], nn.Module]
AddNorm = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
Activation = Callable[[Tensor, Tensor], Tensor]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Rotate = Callable[[Tensor, Tensor, Tensor], Tensor]
LinearFactory = Callable[[int, int], nn.Linear]
Weights = dict[str, NDArray[np.float32]]

INIT_STD = 0.02

# A row of logits is summed in pieces of equal size, of at most _PIECE logits. A compiler keeps a piece in registers
# between its maximum and its sum, and so reads it once. Combining pieces below _SMALLEST_PIECE costs more than reading
# the row twice.
_PIECE, _SMALLEST_PIECE = 128, 32

# The kernels of scaled_dot_product_attention, by their common names.
ATTENTION_KERNELS: Mapping[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def rms_norm(width: int, eps: float) -> nn.Module:
    """Return torch's RMSNorm over the last dimension, y = x / √(mean(x²) + eps) · weight."""
    return nn.RMSNorm(width, eps=eps)


def add_norm(norm: nn.Module, x_BTC: Tensor, branch_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Return x + branch and its norm, which is computed in float32 or float64."""
    x_BTC = x_BTC + branch_BTC
    return x_BTC, norm(x_BTC.to(_wide(x_BTC)))


def rotate(x_BTHD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + D/2}) by position times frequency (Su et al. 2021, in the half-split layout).

    Args:
        x_BTHD: Queries or keys (…, T, H, D) of any floating dtype.
        cos_TD: Cosines (T, D/2) from :func:`rotary_tables`, in the dtype of the computation.
        sin_TD: Sines of the same shape and dtype.

    Returns:
        A tensor of the shape and dtype of ``x_BTHD``.
    """
    first, second = x_BTHD.to(cos_TD.dtype).chunk(2, -1)
    cos_T1D, sin_T1D = cos_TD[:, None], sin_TD[:, None]
    turned = first * cos_T1D - second * sin_T1D, second * cos_T1D + first * sin_T1D
    return torch.cat(turned, -1).to(x_BTHD.dtype)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """Return a linear layer without a bias."""
    return nn.Linear(inputs, outputs, bias=False)


def bias_gelu(x_BTF: Tensor, bias_F: Tensor) -> Tensor:
    """Return GELU(x + bias) in its tanh form (Hendrycks and Gimpel 2016), in the dtype of x."""
    return F.gelu(x_BTF + bias_F.to(x_BTF.dtype), approximate="tanh")


def causal_attention(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
    """Return softmax(q kᵀ / √D, masked above the diagonal) v; torch chooses the kernel."""
    return F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)


def causal_attention_by(kernel: str) -> Attention:
    """Return :func:`causal_attention` restricted to one of torch's kernels, which raises for unsupported inputs.

    Args:
        kernel: A key of :data:`ATTENTION_KERNELS`.

    Raises:
        ValueError: For any other name.
    """
    if kernel not in ATTENTION_KERNELS:
        raise ValueError(f"the kernel must be one of {', '.join(ATTENTION_KERNELS)}, got {kernel!r}")
    backend = ATTENTION_KERNELS[kernel]

    def attend(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return causal_attention(q_BHTD, k_BHTD, v_BHTD)

    return attend


def linear_cross_entropy(x_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the mean :func:`cross_entropy` of the logits x·Wᵀ."""
    return cross_entropy(F.linear(x_BTC, weight_VC).flatten(0, 1), targets_BT.flatten())


class GPT(nn.Module):
    """A decoder-only transformer.

    Args:
        config: Shape of the model.
        seed: Seed of the initial weights, see :func:`init_numpy`.
        norm: Makes a norm from (width, eps). Its only parameter must be ``weight`` of shape (width,).
        add_norm: Called as ``add_norm(norm, x_BTC, branch_BTC)`` with one of these norms, the residual stream and what
            a block adds to it, so that sum and norm can be one kernel. Returns the sum and the normed sum.
        activation: Called as ``activation(x_BTF, bias_F)`` on the product of the first MLP matrix, so that bias and
            nonlinearity can be one kernel. ``bias_F`` has the dtype of the weights, ``x_BTF`` that of the computation.
        linear: Makes a linear layer from (inputs, outputs). Its only parameter must be ``weight`` of shape (outputs,
            inputs).
        rotate: Called as ``rotate(x_BTHD, cos_TD, sin_TD)`` on queries and on keys, see :func:`rotate`.
        attention: Called as ``attention(q_BHTD, k_BHTD, v_BHTD)`` with rotated queries and keys, which are views of
            (B, T, H, D) memory. It must be causal and scale by 1/√D.
        loss: Called as ``loss(x_BTC, weight_VC, targets_BT)`` with the normed residual stream and the matrix of the
            logits, so that the logits and their cross-entropy can be one operator. Returns the mean in nats.
    """

    # One pair of tables for float64 models and one for all others. With a single pair, each kernel of a compiled step
    # would repeat the conversion, and Inductor would compute the gradients of queries and keys in two kernels.
    cos_TD: Tensor
    sin_TD: Tensor
    cos32_TD: Tensor
    sin32_TD: Tensor

    def __init__(
        self,
        config: GPTConfig,
        *,
        seed: int = 0,
        norm: NormFactory = rms_norm,
        add_norm: AddNorm = add_norm,
        activation: Activation = bias_gelu,
        linear: LinearFactory = linear,
        rotate: Rotate = rotate,
        attention: Attention = causal_attention,
        loss: Loss = linear_cross_entropy,
    ) -> None:
        super().__init__()
        self.config = config
        self.loss, self.add_norm = loss, add_norm
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        parts = _Parts(norm, add_norm, activation, linear, rotate, attention)
        self.blocks = nn.ModuleList(Block(config, parts) for _ in range(config.n_layer))
        self.norm = norm(config.n_embd, config.norm_eps)
        self.head = None if config.tie_embeddings else linear(config.n_embd, config.vocab_size)
        for name, table_TD in zip(("cos", "sin"), rotary_tables(config), strict=True):
            self.register_buffer(f"{name}_TD", torch.from_numpy(table_TD), persistent=False)
            self.register_buffer(f"{name}32_TD", torch.from_numpy(table_TD.astype(np.float32)), persistent=False)
        self.load_numpy(init_numpy(config, seed))

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the logits, or the mean cross-entropy if targets are given.

        Args:
            tokens_BT: Tokens, int64 or int32; T is at most ``block_size``.
            targets_BT: The token that follows each position, int64.

        Returns:
            Logits (B, T, V) in the dtype of the computation. With targets, a scalar in nats per token, computed in
            float32 or float64.

        Raises:
            ValueError: If a sequence is longer than ``block_size``.
        """
        length = tokens_BT.shape[1]
        if length > self.config.block_size:
            raise ValueError(f"a sequence has at most block_size={self.config.block_size} tokens, got {length}")
        x_BTC = self.embedding(tokens_BT)
        wide = _wide(x_BTC)
        exact = wide == torch.float64
        tables = (self.cos_TD, self.sin_TD) if exact else (self.cos32_TD, self.sin32_TD)
        cos_TD, sin_TD = (table_TD[:length].to(wide) for table_TD in tables)
        if self.config.low_precision_residual:
            x_BTC = x_BTC.to(_compute_dtype(x_BTC))
        branch_BTC = None
        for block in self.blocks:
            x_BTC, branch_BTC = block(x_BTC, branch_BTC, cos_TD, sin_TD)
        normed_BTC = self.norm(x_BTC.to(wide)) if branch_BTC is None else self.add_norm(self.norm, x_BTC, branch_BTC)[1]
        if targets_BT is not None:
            weight_VC = self.embedding.weight if self.head is None else self.head.weight
            return self.loss(normed_BTC, weight_VC, targets_BT)
        return F.linear(normed_BTC, self.embedding.weight) if self.head is None else self.head(normed_BTC)

    def compile_parts(self) -> None:
        """Compile the embedding, each block, the last norm and the loss by itself.

        The gradients of a block are then known, and exchanged, while those of the blocks before it are computed; and
        all blocks but the first share a program. Hooks of DDP and FSDP run outside of what is compiled.
        """
        for block in self.blocks:
            block.forward = torch.compile(block.forward)
        self.embedding.forward = torch.compile(self.embedding.forward)  # type: ignore[method-assign]
        self.add_norm, self.loss = torch.compile(self.add_norm), torch.compile(self.loss)

    def load_numpy(self, weights: Mapping[str, NDArray]) -> None:
        """Copy weights by the names of :func:`parameter_shapes`; parameters keep their dtype and device.

        Raises:
            ValueError: If a name is missing or unknown, or a shape differs.
        """
        parameters = dict(self.named_parameters())
        if parameters.keys() != weights.keys():
            missing, unknown = sorted(parameters.keys() - weights.keys()), sorted(weights.keys() - parameters.keys())
            raise ValueError(
                f"the weights do not fit the model: missing {missing}, unknown {unknown} "
                "(a replaced norm must have exactly one parameter, `weight`)"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                if parameter.shape != weights[name].shape:
                    raise ValueError(f"{name} must be {tuple(parameter.shape)}, got {weights[name].shape}")
                parameter.copy_(torch.from_numpy(np.ascontiguousarray(weights[name])))

    def to_numpy(self) -> dict[str, NDArray]:
        """Return copies of the weights by name; the inverse of :meth:`load_numpy`."""
        return {name: parameter.detach().cpu().numpy().copy() for name, parameter in self.named_parameters()}


class _Parts(NamedTuple):
    """What a block is made of, see :class:`GPT`."""

    norm: NormFactory
    add_norm: AddNorm
    activation: Activation
    linear: LinearFactory
    rotate: Rotate
    attention: Attention


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).

    A block adds the branch of the block before it, and leaves its own to the next one, so that each sum stands beside
    the norm that follows it.
    """

    def __init__(self, config: GPTConfig, parts: _Parts) -> None:
        super().__init__()
        self.add_norm = parts.add_norm
        self.attention_norm = parts.norm(config.n_embd, config.norm_eps)
        self.attention = SelfAttention(config, parts)
        self.mlp_norm = parts.norm(config.n_embd, config.norm_eps)
        self.mlp = MLP(config, parts)

    def forward(
        self, x_BTC: Tensor, branch_BTC: Tensor | None, cos_TD: Tensor, sin_TD: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream before the last sum of this block, and what is to be added to it.

        Args:
            x_BTC: The residual stream.
            branch_BTC: What is to be added to it first; None for the first block.
            cos_TD: Cosines from :func:`rotary_tables`.
            sin_TD: Sines.
        """
        if branch_BTC is None:
            normed_BTC = self.attention_norm(x_BTC.to(_wide(x_BTC)))
        else:
            x_BTC, normed_BTC = self.add_norm(self.attention_norm, x_BTC, branch_BTC)
        x_BTC, normed_BTC = self.add_norm(self.mlp_norm, x_BTC, self.attention(normed_BTC, cos_TD, sin_TD))
        return x_BTC, self.mlp(normed_BTC)


class SelfAttention(nn.Module):
    """Causal self-attention with rotary positions; no biases."""

    def __init__(self, config: GPTConfig, parts: _Parts) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.rotate, self.attend = parts.rotate, parts.attention
        self.qkv = parts.linear(config.n_embd, 3 * config.n_embd)
        self.out = parts.linear(config.n_embd, config.n_embd)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        """Return the attention's contribution to the residual stream."""
        q_BTHD, k_BTHD, v_BTHD = self.qkv(x_BTC).unflatten(-1, (3, self.n_head, -1)).unbind(2)
        q_BTHD, k_BTHD = (self.rotate(x_BTHD, cos_TD, sin_TD) for x_BTHD in (q_BTHD, k_BTHD))
        y_BHTD = self.attend(q_BTHD.transpose(1, 2), k_BTHD.transpose(1, 2), v_BTHD.transpose(1, 2))
        return self.out(y_BHTD.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down · activation(up · x, bias); the activation adds the bias, so that one kernel can do both."""

    def __init__(self, config: GPTConfig, parts: _Parts) -> None:
        super().__init__()
        self.activate = parts.activation
        self.up = parts.linear(config.n_embd, config.mlp_size)
        self.bias = nn.Parameter(torch.zeros(config.mlp_size))
        self.down = parts.linear(config.mlp_size, config.n_embd)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return the MLP's contribution to the residual stream."""
        return self.down(self.activate(self.up(x_BTC), self.bias))


def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Return the mean of log Σ exp(logits) − logits[target] over all rows, in float32 or float64.

    In eager mode this is ``torch.nn.functional.cross_entropy``, whose kernels are far faster than separate operators.
    When compiled, the logits keep the dtype of their computation and are read twice: once for the normaliser and once
    for the gradient, softmax(logits) − onehot(target), which has their dtype. That takes 2.9 ms for 32 768 rows of
    50 304 logits on an H200; torch.compile of torch's own cross-entropy takes 4.1 ms.

    Args:
        logits_NV: Logits of any floating dtype.
        targets_N: Targets below V, int64 or int32.

    Returns:
        A scalar in nats.
    """
    if torch.compiler.is_compiling():
        return _CrossEntropy.apply(logits_NV, targets_N)  # type: ignore[no-untyped-call]
    return F.cross_entropy(logits_NV.to(_wide(logits_NV)), targets_N.long())


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of sums over x. ``torch.promote_types`` says the same, but is an operator call at each residual sum."""
    return x.dtype if x.element_size() >= 4 else torch.float32


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        wide = _wide(logits_NV)
        piece = math.gcd(logits_NV.shape[1], _PIECE)
        pieces = logits_NV.shape[1] // piece if piece >= _SMALLEST_PIECE else 1
        logits_NPV = logits_NV.to(wide).unflatten(1, (pieces, -1))
        # torch.logsumexp is this as well, but makes a compiler read the logits twice. The bound is for a piece of -inf.
        highest_NP = logits_NPV.amax(2).clamp(min=torch.finfo(wide).min)
        sum_NP = (logits_NPV - highest_NP[:, :, None]).exp().sum(2)
        highest_N = highest_NP.amax(1)
        normaliser_N = highest_N + (sum_NP * (highest_NP - highest_N[:, None]).exp()).sum(1).log()
        chosen_N = logits_NV.gather(1, targets_N[:, None].long())[:, 0].to(wide)
        ctx.save_for_backward(logits_NV, normaliser_N, targets_N)
        return (normaliser_N - chosen_N).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        logits_NV, normaliser_N, targets_N = ctx.saved_tensors
        scale = gradient / len(targets_N)
        hit_NV = (
            torch.arange(logits_NV.shape[1], device=logits_NV.device, dtype=torch.int32) == targets_N[:, None].int()
        )
        softmax_NV = (logits_NV.to(normaliser_N.dtype) - normaliser_N[:, None]).exp() * scale
        return torch.where(hit_NV, softmax_NV - scale, softmax_NV).to(logits_NV.dtype), None


def _compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product with ``x``: autocast's dtype if autocast is on, else that of ``x``."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def rotary_tables(config: GPTConfig) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return cos and sin of t · base^(−2i/D), both (block_size, D/2) float64."""
    frequency = config.rope_base ** (-np.arange(0, config.head_size, 2) / config.head_size)
    angle = np.arange(config.block_size)[:, None] * frequency
    return np.cos(angle), np.sin(angle)


def parameter_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, in the order of the model; matrices are (out, in)."""
    width, inner = config.n_embd, config.mlp_size
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, width)}
    for index in range(config.n_layer):
        shapes |= {
            f"blocks.{index}.attention_norm.weight": (width,),
            f"blocks.{index}.attention.qkv.weight": (3 * width, width),
            f"blocks.{index}.attention.out.weight": (width, width),
            f"blocks.{index}.mlp_norm.weight": (width,),
            f"blocks.{index}.mlp.bias": (inner,),
            f"blocks.{index}.mlp.up.weight": (inner, width),
            f"blocks.{index}.mlp.down.weight": (width, inner),
        }
    shapes["norm.weight"] = (width,)
    if not config.tie_embeddings:
        shapes["head.weight"] = (config.vocab_size, width)
    return shapes


def init_numpy(config: GPTConfig, seed: int) -> Weights:
    """Draw initial weights with NumPy, so that every framework can start from the same numbers.

    As in GPT-2 (Radford et al. 2019), matrices come from N(0, 0.02²). The two matrices per block that write to the
    residual stream are divided by √(2·n_layer), so that its variance does not grow with depth. Norms are 1, biases 0.

    Args:
        config: Shape of the model.
        seed: Seed of NumPy's PCG64.

    Returns:
        float32 arrays by parameter name, with the shapes of :func:`parameter_shapes`.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    residual_std = INIT_STD / math.sqrt(2 * config.n_layer)
    weights: Weights = {}
    for name, shape in parameter_shapes(config).items():
        if name.endswith("norm.weight"):
            weights[name] = np.ones(shape, np.float32)
        elif name.endswith("bias"):
            weights[name] = np.zeros(shape, np.float32)
        else:
            std = residual_std if name.endswith(("attention.out.weight", "mlp.down.weight")) else INIT_STD
            weights[name] = generator.standard_normal(shape, np.float32) * np.float32(std)
    return weights


def parameter_count(config: GPTConfig) -> int:
    """Return the number of trained scalars."""
    return sum(math.prod(shape) for shape in parameter_shapes(config).values())


def flops_per_token(config: GPTConfig) -> int:
    """Return the floating-point operations that one trained token needs: 6·N + 12·L·H·Q·T.

    The formula is from Chowdhery et al. 2022 (PaLM), appendix B: two operations per parameter in the forward pass and
    four in the backward pass, and the same for the two matrix products of attention. The causal mask gives no discount,
    and recomputation does not count. N excludes an embedding table that is only looked up. It includes a tied one,
    which computes the logits.

    Returns:
        FLOP per token, forward and backward, at sequences of ``block_size``.
    """
    looked_up = 0 if config.tie_embeddings else config.vocab_size * config.n_embd
    attention = 12 * config.n_layer * config.n_head * config.head_size * config.block_size
    return 6 * (parameter_count(config) - looked_up) + attention
