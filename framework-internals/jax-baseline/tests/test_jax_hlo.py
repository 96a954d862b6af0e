"""The reader of optimised HLO, on text written for the purpose and on a real module."""

import jax
import jax.numpy as jnp
import pytest

from jax_baseline.hlo import kernels, parse, summarise

# What XLA prints for a GPU, shortened: tuple shapes with comments, quoted brackets, a loop, custom calls, a collective.
# ruff: noqa: E501
GPU_STEP = r"""HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, must-alias) }, entry_computation_layout={(f32[4,4]{1,0})->(f32[4,4]{1,0})}

FileNames
1 "model.py"

%fused_add (p.0: f32[4,4], p.1: f32[4,4]) -> f32[4,4] {
  %p.0 = f32[4,4]{1,0} parameter(0)
  %p.1 = f32[4,4]{1,0} parameter(1)
  ROOT %add.1 = f32[4,4]{1,0} add(%p.0, %p.1)
}

%gemm_fusion (p.2: f32[4,4], p.3: f32[4,4]) -> f32[4,4] {
  %p.2 = f32[4,4]{1,0} parameter(0)
  %p.3 = f32[4,4]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,4]{1,0} dot(%p.2, %p.3), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (arg: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %arg = (s32[], f32[4,4]{1,0}) parameter(0)
  %count = s32[] get-tuple-element(%arg), index=0
  %value = f32[4,4]{1,0} get-tuple-element(%arg), index=1
  %looped = f32[4,4]{1,0} fusion(%value, %value), kind=kInput, calls=%fused_add
  ROOT %pair = (s32[], /*index=1*/f32[4,4]{1,0}) tuple(%count, %looped)
}

%condition (arg.1: (s32[], f32[4,4])) -> pred[] {
  %arg.1 = (s32[], f32[4,4]{1,0}) parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (a: f32[4,4], b: f32[4,4], c: f32[4,4]) -> (f32[4,4], f32[4,4]) {
  %a = f32[4,4]{1,0} parameter(0)
  %b = f32[4,4]{1,0} parameter(1)
  %c = f32[4,4]{1,0} parameter(2)
  %sum = f32[4,4]{1,0} fusion(%a, %b), kind=kLoop, calls=%fused_add, metadata={op_name="jit(step)/jvp(block0)/mlp/add"}
  %gemm = (f32[4,4]{1,0}, /*index=1*/s8[32]{0}) custom-call(%sum, %b), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/transpose(jvp(block1))/mlp/dot_general" stack_frame_id=3}, backend_config={"note":"a ) in a string"}
  %product = f32[4,4]{1,0} get-tuple-element(%gemm), index=0
  %triton = f32[4,4]{1,0} fusion(%product, %c), kind=kCustom, calls=%gemm_fusion, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %start = f32[4,4]{1,0} all-reduce-start(%triton), replica_groups={{0,1}}, to_apply=%fused_add
  %done = f32[4,4]{1,0} all-reduce-done(%start)
  %zero = s32[] constant(0)
  %state = (s32[], f32[4,4]{1,0}) tuple(%zero, %done)
  %loop = (s32[], f32[4,4]{1,0}) while(%state), condition=%condition, body=%body
  %last = f32[4,4]{1,0} get-tuple-element(%loop), index=1
  ROOT %out = (f32[4,4]{1,0}, f32[4,4]{1,0}) tuple(%last, %sum)
}
"""


def test_known_module():
    summary = summarise(GPU_STEP)
    assert summary.kinds == {
        "all-reduce-start": 1,
        "custom call: __cublas$gemm": 1,
        "fusion custom: __triton_gemm": 1,
        "fusion input": 1,
        "fusion loop": 1,
    }
    assert (summary.kernels, summary.dots) == (5, 1)
    assert summary.collectives == {"all-reduce-start": 1}
    assert (summary.donated, summary.arguments) == (2, 3)
    assert parse(GPU_STEP).donated == {0, 2}


def test_what_the_program_decides_when_it_runs_is_said():
    assert parse(GPU_STEP).assumptions == "1 loops of unknown length count as one iteration each"
    known = GPU_STEP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    assert parse(known).assumptions == ""
    x = jnp.ones((4, 4))
    chosen = jax.jit(lambda x: jax.lax.cond(x.sum() > 0, lambda: x @ x, lambda: x * 2))
    assert parse(chosen.lower(x).compile().as_text()).assumptions == "1 conditionals count with all branches"


def test_regions_and_phases():
    by_name = {kernel.name: kernel for kernel in kernels(parse(GPU_STEP))}
    assert (by_name["sum"].phase, by_name["sum"].region) == ("forward", "block0/mlp")
    assert (by_name["gemm"].phase, by_name["gemm"].region) == ("backward", "block1/mlp")
    assert (by_name["looped"].phase, by_name["looped"].region) == ("other", "")
    counts = {(group.region, group.phase): group.kernels for group in summarise(GPU_STEP).regions}
    assert counts[("block*/mlp", "forward")] == counts[("block*/mlp", "backward")] == 1


# XLA keeps one function for all sums of a module, labelled as the first of them was.
SHARED_FUNCTION = r"""HloModule jit_step

%region (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %plus = f32[] add(%x, %y), metadata={op_name="jit(step)/jvp(block0)/norm/reduce_sum" source_file="norm.py" source_line=7}
}

%fused (p: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %zero = f32[] constant(0)
  ROOT %total = f32[] reduce(%p, %zero), dimensions={}, to_apply=%region, metadata={op_name="jit(step)/jvp(loss)/reduce_sum" source_file="loss.py" source_line=3}
}

ENTRY %main (a: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  ROOT %mean = f32[] fusion(%a), kind=kInput, calls=%fused
}
"""


def test_the_function_of_a_reduction_is_no_operation_of_the_kernel():
    (kernel,) = kernels(parse(SHARED_FUNCTION))
    assert kernel.ops == {"reduce": 1}
    assert [label.region for label in kernel.labels] == ["loss"]
    assert str(kernel.location) == "loss.py:3"


def test_the_unlabelled_half_of_a_reduction_is_where_its_own_function_is():
    unlabelled = SHARED_FUNCTION.replace(
        ', metadata={op_name="jit(step)/jvp(loss)/reduce_sum" source_file="loss.py" source_line=3}', ""
    )
    (kernel,) = kernels(parse(unlabelled))
    assert (kernel.ops, kernel.region, kernel.phase) == ({"reduce": 1}, "block0/norm", "forward")
    # A second user: the label may be that one's.
    shared = unlabelled.replace(
        "  ROOT %mean = ", "  %another = f32[] reduce(%a, %a), dimensions={}, to_apply=%region\n  ROOT %mean = "
    )
    assert [kernel.region for kernel in kernels(parse(shared))] == ["", ""]


@pytest.mark.parametrize("text", ["", "int main() { return 0; }", "HloModule empty\n"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"expected (the text of an HLO module|HLO text)"):
        summarise(text)
