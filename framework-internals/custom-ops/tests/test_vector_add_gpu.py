"""What only a GPU can get wrong: streams, devices, graphs, indices beyond 32 bits."""

import pytest
import torch

import custom_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_build_has_cuda_kernels() -> None:
    assert custom_ops.build_info().cuda


def test_launch_is_on_the_current_stream() -> None:
    # On the default stream the sum would read `a` long before the products of the side stream have written it.
    matrix = torch.randn(4096, 4096, device="cuda") / 64
    custom_ops.vector_add(matrix, torch.linalg.multi_dot([matrix] * 8))  # whatever is loaded at the first call
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        product = torch.linalg.multi_dot([matrix] * 8)
        total = custom_ops.vector_add(product, product)
        reference = product + product
    stream.synchronize()
    assert torch.equal(total, reference)


def test_capture_into_a_cuda_graph_and_replay() -> None:
    a, b = torch.randn(10_001, device="cuda"), torch.randn(10_001, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        custom_ops.axpb(custom_ops.vector_add(a, b), b, 2.0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = custom_ops.axpb(custom_ops.vector_add(a, b), b, 2.0)
    for _ in range(2):
        a.normal_()
        b.normal_()
        graph.replay()
        assert torch.equal(result, custom_ops.axpb(custom_ops.vector_add(a, b), b, 2.0))


def test_mixed_devices_are_refused() -> None:
    host, card = torch.ones(3), torch.ones(3, device="cuda")
    with pytest.raises(ValueError, match="argument 'b': expected device cuda:0 like 'a', got cpu"):
        custom_ops.vector_add(card, host)
    with pytest.raises(ValueError, match="argument 'b': expected device cpu like 'a', got cuda:0"):
        custom_ops.vector_add(host, card)


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_tensors_decide_the_device() -> None:
    a = torch.randn(1000, device="cuda:1")
    with torch.cuda.device(0):
        result = custom_ops.vector_add(a, a)
    assert result.device == a.device
    assert torch.equal(result, a + a)


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, 1])
def test_more_elements_than_32_bits_count(offset: int) -> None:
    count = 2**32 + 5
    if torch.cuda.mem_get_info()[0] < 4 * 2 * count:
        pytest.skip(f"needs {8 * count >> 30} GiB of free GPU memory")
    a = torch.zeros(count + offset, dtype=torch.float16, device="cuda")[offset:]
    b = torch.zeros(count + offset, dtype=torch.float16, device="cuda")[offset:]
    positions = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1, 2**32, count - 1], device="cuda")
    a[positions] = torch.arange(1, 7, dtype=torch.float16, device="cuda")
    b[positions] = 10
    result = custom_ops.vector_add(a, b)
    assert torch.equal(result[positions], torch.arange(11, 17, dtype=torch.float16, device="cuda"))
    assert int(torch.count_nonzero(result)) == len(positions)
