"""The lens: a small run measures, records and renders."""

from pathlib import Path

import pytest

from benchkit.results import load
from benchkit.run import measure_and_write
from custom_ops import lens

SMALL = {
    "builds": False,
    "call_counts": [1, 64],
    "counts": [256, 1024],
    "columns": 64,
    "dtypes": ["float32", "bfloat16"],
    "large_count": 4096,
    "correctness_count": 2000,
    "preset": "tiny",
    "seconds": 0.01,
}


@pytest.mark.slow
def test_small_run_renders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lens, "configure", lambda device, quick: SMALL)
    built = lens.build_lens(Path(__file__).resolve().parents[1])
    monkeypatch.setattr(lens, "memory_limits", lambda device, seconds: limits(device))
    report = measure_and_write(built, device="cpu", quick=True, out=tmp_path)
    text = report.read_text()
    results = load(tmp_path / "results.json")
    assert results.complete
    assert all(record["differing"].value == 0 for record in results.select("correctness", op="vector_add"))
    assert "bit-equal to torch.add" in text
    assert "operators agree with what the profiler counted" in " ".join(text.split())
    losses = {round(record["loss"].value, 4) for record in results.select("training")}
    assert len(losses) == 1
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"speed.svg", "calls.svg"}


def limits(device: str) -> list:
    """The full-size measurement of the machine's memory takes longer than the rest of this test."""
    from benchkit.limits import memory_limits

    return list(memory_limits(device, bytes_per_tensor=1 << 20, seconds=0.01))


def test_configuration_is_smaller_when_quick() -> None:
    for device in ("cpu", "cuda"):
        full, quick = lens.configure(device, False), lens.configure(device, True)
        assert full.keys() == quick.keys()
        assert max(quick["counts"]) < max(full["counts"])
        assert quick["seconds"] < full["seconds"]
