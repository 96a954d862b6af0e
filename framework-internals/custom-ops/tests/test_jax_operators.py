"""The same kernels under jax.ffi: the same bits as under torch, under jit, grad and vmap."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import custom_ops

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

from custom_ops import jax_operators  # noqa: E402
from custom_ops.operators.calls import calls  # noqa: E402


@pytest.fixture(autouse=True)
def one_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both frameworks on one device, where the kernels are the same: the processor, or a test's own ``device``."""
    device = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    try:
        of_jax = jax.devices("gpu" if device == "cuda" else "cpu")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no such device: {error}")
    with jax.default_device(of_jax), torch.device(device):
        yield


def pair(*shape: int) -> tuple[torch.Tensor, object]:
    values = np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)
    return torch.tensor(values), jnp.asarray(values)


def same(ours: object, theirs: torch.Tensor) -> bool:
    return bool((np.asarray(ours) == theirs.cpu().numpy()).all())


@pytest.mark.usefixtures("device")
def test_vector_add_and_scale_under_jit_grad_and_vmap() -> None:
    (a, ja), (b, jb) = pair(33, 5), pair(33, 5)
    assert same(jax.jit(jax_operators.vector_add)(ja, jb), custom_ops.vector_add(a, b))
    assert same(jax.jit(jax_operators.scale)(ja), custom_ops.scale(a))
    assert same(jax.vmap(jax_operators.vector_add)(ja, jb), a + b)
    assert same(jax.grad(lambda x: jax_operators.scale(x, 3.0).sum())(ja), torch.full_like(a, 3.0))


@pytest.mark.usefixtures("device")
def test_bias_gelu_and_its_gradients_have_the_bits_of_torchs() -> None:
    (x, jx), (bias, jbias) = pair(40, 17), pair(17)
    assert same(jax.jit(jax_operators.bias_gelu)(jx, jbias), custom_ops.bias_gelu(x, bias))
    dx, dbias = jax.jit(jax.grad(lambda x, b: jax_operators.bias_gelu(x, b).sum(), argnums=(0, 1)))(jx, jbias)
    expected = calls.bias_gelu_backward(torch.ones_like(x), x, bias)
    assert same(dx, expected[0])
    assert same(dbias, expected[1])


@pytest.mark.usefixtures("device")
def test_vmap_over_x_and_over_both() -> None:
    (x, jx), (bias, jbias), (biases, jbiases) = pair(3, 40, 17), pair(17), pair(3, 17)
    assert same(jax.vmap(jax_operators.bias_gelu, (0, None))(jx, jbias), custom_ops.bias_gelu(x, bias))
    each = torch.stack([custom_ops.bias_gelu(*one) for one in zip(x, biases, strict=True)])
    assert same(jax.vmap(jax_operators.bias_gelu)(jx, jbiases), each)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_its_gradients(causal: bool) -> None:
    (q, jq), (k, jk), (v, jv) = pair(2, 4, 9, 16), pair(2, 2, 11, 16), pair(2, 2, 11, 16)
    out, lse = jax.jit(lambda *x: jax_operators.flash_attention(*x, causal))(jq, jk, jv)
    expected = custom_ops.flash_attention(q, k, v, causal)
    assert same(out, expected[0])
    assert same(lse, expected[1])
    gradients = jax.grad(lambda *x: jax_operators.flash_attention(*x, causal)[0].sum(), argnums=(0, 1, 2))(jq, jk, jv)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    custom_ops.flash_attention(*leaves, causal)[0].sum().backward()
    for ours, leaf in zip(gradients, leaves, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(np.asarray(ours), leaf.grad.cpu().numpy(), rtol=1e-5, atol=1e-6)


def test_conv_bn_relu_and_its_gradient() -> None:
    (x, jx), (weight, jweight), (scale, jscale), (shift, jshift) = pair(2, 3, 8, 8), pair(4, 3, 3, 3), pair(4), pair(4)
    y = jax.jit(lambda *a: jax_operators.conv_bn_relu(*a, padding=1))(jx, jweight, jscale, jshift)
    np.testing.assert_allclose(np.asarray(y), custom_ops.conv_bn_relu(x, weight, scale, shift, padding=1), atol=1e-5)
    ours = jax.grad(lambda s: jax_operators.conv_bn_relu(jx, jweight, s, jshift).sum())(jscale)
    scale.requires_grad_()
    custom_ops.conv_bn_relu(x, weight, scale, shift).sum().backward()
    np.testing.assert_allclose(np.asarray(ours), scale.grad, rtol=1e-4, atol=1e-4)


def test_what_does_not_go_together_is_named() -> None:
    with pytest.raises(ValueError, match=r"bias_gelu: argument 'bias': expected shape \(3,\), got \(4,\)"):
        jax_operators.bias_gelu(jnp.ones((2, 3)), jnp.ones(4))
    with pytest.raises(ValueError, match="bias_gelu: argument 'x': expected one dimension or more"):
        jax_operators.bias_gelu(jnp.ones(()), jnp.ones(()))
    with pytest.raises(TypeError, match="vector_add: argument 'b': expected dtype float32 like 'a', got int32"):
        jax_operators.vector_add(jnp.ones(3), jnp.ones(3, dtype=jnp.int32))
    q = jnp.ones((1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"flash_attention: argument 'k': expected .+ that divides its own"):
        jax_operators.flash_attention(q, q[:, :0], q[:, :0])
    with pytest.raises(ValueError, match="flash_attention: argument 'q': expected a head size of 1 to 256, got 0"):
        jax_operators.flash_attention(q[..., :0], q[..., :0], q[..., :0])
