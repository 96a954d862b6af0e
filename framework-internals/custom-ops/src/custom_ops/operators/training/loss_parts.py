"""What a loss has beside the cross-entropy: smoothing, class weights, a penalty on the normaliser, capped logits.

With l = softcap·tanh(z / softcap) of a logit z, or l = z, and n = log Σ_v exp(l_v), the loss of a row with target t is

f0·(n − l_t) + share·Σ_v w_v·(n − l_v) + f2·n²

Its factors are f0 = (1 − smoothing)·w_t, f1 = share·Σ_v w_v and f2, that of the penalty; share = smoothing / V.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from custom_ops.operators.checks import check_classes, explain, wide


class Parts(NamedTuple):
    """The parts of a loss, as the kernels take them; the defaults are those of the cross-entropy alone.

    Attributes:
        factors_N3: f0, f1 and f2 of each row, in the dtype of the losses; None if no part is asked for.
        class_weight_V: The weights of the classes in that dtype; None if all are 1.
        share: The share of each class in the smoothing.
        softcap: The bound of the logits; 0 if they have none.
        accuracy: Whether the hits are wanted.
    """

    factors_N3: Tensor | None = None
    class_weight_V: Tensor | None = None
    share: float = 0  # whole numbers: Dynamo takes 0.0 for a symbol, and traces twice
    softcap: float = 0
    accuracy: bool = False


def weights_of_rows(class_weight: Tensor | None, targets_N: Tensor, counted_N: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what each row counts in a mean: the weight of its target, 0 where it is ignored."""
    if class_weight is None:
        return counted_N.to(dtype)
    chosen_N = torch.where(counted_N, targets_N, 0).clamp(0, class_weight.shape[0] - 1)  # any: its loss is NaN
    return torch.where(counted_N, class_weight.to(dtype)[chosen_N], 0)


def parts_of(
    weights_N: Tensor, counted_N: Tensor, class_weight: Tensor | None, classes: int, *,
    label_smoothing: float, z_loss: float, softcap: float | None, accuracy: bool, mean: bool,
) -> Parts:  # fmt: skip
    """Make the parts of a loss; in a mean the penalty is divided by the number of rows, not by their weights."""
    dtype = weights_N.dtype
    share = label_smoothing / max(classes, 1) if label_smoothing else 0
    if class_weight is not None:
        class_weight = class_weight.to(dtype).contiguous()
    smoothing: float | Tensor = label_smoothing if class_weight is None else share * class_weight.sum()
    penalty: float | Tensor = z_loss
    if mean and class_weight is not None:
        penalty = z_loss * (weights_N.sum() / counted_N.sum())
    same_N = torch.zeros_like(weights_N)
    factors_N3 = torch.stack((weights_N * (1 - label_smoothing), same_N + smoothing, same_N + penalty), -1)
    return Parts(factors_N3, class_weight, share, softcap or 0, accuracy)


def statistics_of(highest_N: Tensor, sum_N: Tensor, hits_N: Tensor) -> Tensor:
    """Return (N, 2), the normaliser of each row and whether its target has the highest logit."""
    return torch.stack((highest_N + sum_N.log(), hits_N), -1)


def losses_of(parts: Parts, logarithm_N: Tensor, highest_N: Tensor, chosen_N: Tensor, weighted_N: Tensor) -> Tensor:
    """Return the loss of each row from its sums; the normaliser is ``highest_N + logarithm_N``."""
    of_target_N, smoothing_N, penalty_N = _factors(parts)
    normaliser_N = highest_N + logarithm_N
    losses_N = of_target_N * (logarithm_N + (highest_N - chosen_N)) + penalty_N * normaliser_N * normaliser_N
    return losses_N + (smoothing_N * normaliser_N - parts.share * weighted_N) if parts.share else losses_N


def scales_of(parts: Parts, highest_N: Tensor, sum_N: Tensor) -> Tensor:
    """Return (N, 3): reference, factor of the powers and factor of the target, in the gradient of a row's logits."""
    of_target_N, smoothing_N, penalty_N = _factors(parts)
    of_powers_N = of_target_N + smoothing_N + 2 * penalty_N * (highest_N + sum_N.log())
    return torch.stack((highest_N, of_powers_N / sum_N, of_target_N), -1)


def losses_by_formula(logits_NV: Tensor, targets_N: Tensor, ignore_index: int, parts: Parts) -> tuple[Tensor, Tensor]:
    """Return the loss of each row and its statistics by torch's operators, which every transformation knows."""
    logits_NV = logits_NV.to(wide(logits_NV.dtype))
    capped_NV = _capped(logits_NV, parts)
    counted_N = targets_N != ignore_index
    chosen_N = torch.where(counted_N, targets_N, 0)
    normaliser_N = capped_NV.logsumexp(-1)
    try:
        of_target_N = capped_NV.gather(-1, chosen_N[:, None])[:, 0]
    except RuntimeError as error:
        explain(error, check_classes, targets_N, logits_NV.shape[-1], ignore_index)
    if parts.factors_N3 is None:
        return torch.where(counted_N, normaliser_N - of_target_N, 0), normaliser_N
    weighted_NV = capped_NV if parts.class_weight_V is None else capped_NV * parts.class_weight_V
    losses_N = losses_of(parts, normaliser_N, torch.zeros_like(normaliser_N), of_target_N, weighted_NV.sum(-1))
    hits_N = ((logits_NV.argmax(-1) == targets_N) & counted_N).to(losses_N.dtype)
    return torch.where(counted_N, losses_N, 0), torch.stack((normaliser_N.detach(), hits_N), -1)


def gradient_by_formula(logits_NV: Tensor, targets_N: Tensor, ignore_index: int, parts: Parts) -> Tensor:
    """Return the gradient of the logits, 0 in rows that are ignored, by operators that can be differentiated again."""
    logits_NV = logits_NV.to(wide(logits_NV.dtype))
    chosen_NV = (torch.arange(logits_NV.shape[-1], device=logits_NV.device) == targets_N[:, None]).to(logits_NV.dtype)
    capped_NV = _capped(logits_NV, parts)
    powers_NV = capped_NV.softmax(-1)
    if parts.factors_N3 is None:
        gradient_NV = powers_NV - chosen_NV
    else:
        of_target_N, smoothing_N, penalty_N = (factor[:, None] for factor in _factors(parts))
        normaliser_N1 = capped_NV.logsumexp(-1, keepdim=True)
        gradient_NV = powers_NV * (of_target_N + smoothing_N + 2 * penalty_N * normaliser_N1) - of_target_N * chosen_NV
        if parts.share:
            gradient_NV = gradient_NV - parts.share * (1 if parts.class_weight_V is None else parts.class_weight_V)
    if parts.softcap:
        gradient_NV = gradient_NV * (1 - (capped_NV / parts.softcap).square())
    return torch.where((targets_N != ignore_index)[:, None], gradient_NV, 0)


def _capped(logits_NV: Tensor, parts: Parts) -> Tensor:
    return (logits_NV / parts.softcap).tanh() * parts.softcap if parts.softcap else logits_NV


def _factors(parts: Parts) -> tuple[Tensor, ...]:
    assert parts.factors_N3 is not None
    return parts.factors_N3.unbind(-1)
