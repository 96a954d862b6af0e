"""Predicted launches and bytes, against counting by hand and against the profiler."""

from functools import partial

import torch

import custom_ops
from custom_ops.bench.accounting import (
    Traffic,
    axpb_traffic,
    axpb_unfused_traffic,
    bias_gelu_backward_traffic,
    bias_gelu_traffic,
    bias_gelu_unfused_traffic,
    count_launches,
    cross_entropy_traffic,
    cross_entropy_unfused_traffic,
    glu_backward_traffic,
    glu_backward_unfused_traffic,
    glu_traffic,
    glu_unfused_traffic,
    rotary_traffic,
    rotary_unfused_traffic,
    vector_add_traffic,
)
from custom_ops.bench.cases import benchmark_cases


def test_known_figures() -> None:
    a = torch.empty(10, 20, dtype=torch.bfloat16)
    assert vector_add_traffic(a, a) == Traffic(launches=1, read=800, written=400)
    assert axpb_unfused_traffic(a) == Traffic(launches=2, read=1200, written=800)
    assert axpb_unfused_traffic(a).bytes * 3 == axpb_traffic(a, a).bytes * 5


def test_bias_gelu_moves_half_of_what_its_two_operators_do() -> None:
    x, bias = torch.empty(10, 20), torch.empty(20)
    assert bias_gelu_traffic(x, bias) == Traffic(launches=1, read=880, written=800)
    assert bias_gelu_unfused_traffic(x, bias) == Traffic(launches=2, read=1680, written=1600)
    assert bias_gelu_backward_traffic(x, bias) == Traffic(launches=1, read=1680, written=880)


def test_gated_activations_move_three_fifths_and_five_ninths_of_what_their_operators_do() -> None:
    x = torch.empty(10, 20)
    assert glu_traffic(x, x) == Traffic(launches=1, read=1600, written=800)
    assert glu_unfused_traffic(x, x) == Traffic(launches=2, read=2400, written=1600)
    assert glu_backward_traffic(x, x, x) == Traffic(launches=1, read=2400, written=1600)
    assert glu_backward_unfused_traffic(x, x, x) == Traffic(launches=3, read=4800, written=2400)
    for op in ("swiglu", "geglu"):
        case = benchmark_cases()[op]
        operands = case.operands(4096, 64, torch.float32, "cpu")
        results = [case.forms[form](*operands) for form in ("custom_ops", "torch")]
        torch.testing.assert_close(*results)
        case = benchmark_cases()[f"{op}_backward"]
        operands = case.operands(4096, 64, torch.float32, "cpu")
        assert case.compiled is not None
        torch.testing.assert_close(case.forms["custom_ops"](*operands), case.compiled(*operands))


def test_the_loss_moves_the_logits_twice_and_torch_six_times() -> None:
    logits, targets = torch.empty(10, 20), torch.zeros(10, dtype=torch.int64)
    assert cross_entropy_traffic(logits, targets) == Traffic(launches=1, read=800 + 80, written=800 + 40)
    unfused = cross_entropy_unfused_traffic(logits, targets)
    assert unfused.launches == 4
    assert unfused.bytes == 6 * 800 + 2 * (40 + 80 + 40)


def test_rotary_moves_less_than_a_quarter_of_what_its_operators_do() -> None:
    x, table = torch.empty(2, 5, 3, 8), torch.empty(5, 4)
    assert rotary_traffic(x, table, table) == Traffic(launches=1, read=960 + 2 * 80, written=960)
    # Of halves: four products, of which each reads a table, a sum and a difference; then the concatenation.
    assert rotary_unfused_traffic(x, table, table) == Traffic(7, 4 * (480 + 80) + 4 * 480 + 960, 6 * 480 + 960)
    casts = Traffic(9, 4 * (480 + 80) + 4 * 480 + 960 + 480 + 960, 6 * 480 + 960 + 960 + 480)
    assert rotary_unfused_traffic(x.bfloat16(), table, table) == casts


def test_an_operand_not_contiguous_costs_a_copy() -> None:
    a = torch.empty(10, 20)
    assert vector_add_traffic(a.t(), a.t()) == Traffic(launches=3, read=4 * 800, written=3 * 800)


def test_nothing_for_no_elements() -> None:
    assert vector_add_traffic(torch.empty(0), torch.empty(0)) == Traffic()


def test_profiler_counts_what_was_predicted(device: str) -> None:
    a, b = torch.randn(64, 64, device=device), torch.randn(64, 64, device=device)
    assert count_launches(lambda: custom_ops.vector_add(a, b), device=device) == 1
    transposed = vector_add_traffic(a.t(), b).launches
    assert count_launches(lambda: custom_ops.vector_add(a.t(), b), device=device) == transposed
    assert count_launches(lambda: custom_ops.axpb(a, b, 2.0), device=device) == 1
    assert count_launches(lambda: custom_ops.bias_gelu(a, b[0]), device=device) == 1
    targets = torch.arange(64, device=device)
    case = benchmark_cases()["cross_entropy"]
    forms = {"custom_ops": cross_entropy_traffic}
    if device == "cpu":  # on a GPU, torch's loss is more kernels than operators
        forms["torch"] = cross_entropy_unfused_traffic
    for form, traffic in forms.items():
        logits = a.clone()  # the kernel writes over them
        launches = count_launches(lambda form=form, x=logits: case.forms[form](x, targets), device=device)
        assert launches == traffic(a, targets).launches
    rotary = benchmark_cases()["rotary"]
    operands = rotary.operands(4096, 64, torch.float32, device)
    for form, traffic in {"custom_ops": rotary_traffic, "torch": rotary_unfused_traffic}.items():
        launches = count_launches(partial(rotary.forms[form], *operands), device=device)
        assert launches == traffic(*operands).launches
    assert count_launches(lambda: 2.0 * a + b, device=device) == axpb_unfused_traffic(a).launches
