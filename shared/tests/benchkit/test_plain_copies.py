"""The copy beside which a kernel is timed."""

from types import SimpleNamespace

import pytest
import torch

from benchkit.timing import plain_copies


@pytest.mark.parametrize("faster", [0, 1])
@pytest.mark.parametrize(("device", "reads"), [("cuda", 1), ("cpu", 1), ("cpu", 2)])
def test_the_copy_is_the_faster_of_two(monkeypatch, faster, device, reads):
    x, y, sets = torch.randn(16), torch.randn(16), [(torch.randn(16), torch.randn(16))]
    copies = SimpleNamespace(copy=lambda x, out: out.copy_(-x), combine=lambda x, y, out: out.copy_(-x - y))
    monkeypatch.setattr(plain_copies, "vector_copies", lambda _: copies)

    def compare(ways, *, device, inputs, seconds):
        assert (inputs, seconds) == (sets, plain_copies._CHOICE_SECONDS)
        return {way: SimpleNamespace(median=1.0 if place == faster else 2.0) for place, way in enumerate(ways)}

    monkeypatch.setattr(plain_copies, "compare", compare)
    found = plain_copies.plain_copy(device, sets, reads=reads)(x, y)
    right = x if reads == 1 else x + y
    assert torch.equal(found, -right if faster else right)
    assert found.data_ptr() != x.data_ptr()


@pytest.mark.parametrize(("size", "stores"), [(511, "ordinary"), (512, "streaming")])
def test_the_copy_stores_as_the_kernels_do(monkeypatch, size, stores):
    asked = []
    monkeypatch.setattr(plain_copies, "last_level_cache", lambda: 4096)
    monkeypatch.setattr(plain_copies, "vector_copies", asked.append)
    plain_copies.plain_copy("cpu", [(torch.empty(size),)])
    assert asked == [stores]


def test_the_copy_of_a_cpu_without_a_compiler_is_torchs(monkeypatch):
    monkeypatch.setattr(plain_copies, "vector_copies", lambda _: None)
    monkeypatch.setattr(plain_copies, "compare", lambda *_, **__: pytest.fail("there is nothing to choose"))
    x = torch.randn(4)
    assert torch.equal(plain_copies.plain_copy("cpu", [(x,)])(x), x)
