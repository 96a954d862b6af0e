import math
import platform

import numpy as np
import pytest

from benchkit import UserError
from torch_baseline import data


def test_the_built_in_text_is_the_pinned_one():
    corpus = data.load_corpus()
    if platform.python_version() not in data.PINNED_TEXT:
        assert "is not listed" in corpus.note
        assert corpus.sha256[:16] in corpus.note
    else:
        assert corpus.note == ""
    total = len(corpus.train) + len(corpus.validation)
    assert len(corpus.train) == int(0.9 * total)
    assert total > 400_000


def test_a_changed_or_unknown_text_is_said(monkeypatch):
    monkeypatch.setattr(data, "_builtin_text", lambda: b"something else")
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.7")
    assert "should have the hash 71f2ff5d99bdc1f9" in data.load_corpus().note
    monkeypatch.setattr(platform, "python_version", lambda: "3.11.99")
    assert "is not listed" in data.load_corpus().note


def test_a_file_is_split_in_order(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(100)))
    corpus = data.load_corpus(file)
    assert corpus.train.tolist() == list(range(90))
    assert corpus.validation.tolist() == list(range(90, 100))
    assert corpus.name == "text"


def test_unusable_files_are_one_line(tmp_path):
    with pytest.raises(UserError, match=r"cannot read the data file .*missing: No such file"):
        data.load_corpus(tmp_path / "missing")
    with pytest.raises(UserError, match="cannot read the data file"):
        data.load_corpus(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="is empty"):
        data.load_corpus(tmp_path / "empty")


@pytest.mark.parametrize("block_size", [1, 7, 128])
def test_the_size_that_the_error_asks_for_is_the_least(tmp_path, block_size):
    file = tmp_path / "short"
    file.write_bytes(b"x" * 9)
    with pytest.raises(UserError, match="too short: 9 bytes") as caught:
        data.require_length(data.load_corpus(file), block_size)
    needed = int(str(caught.value).split("at least ")[1].split()[0])
    file.write_bytes(b"x" * needed)
    data.require_length(data.load_corpus(file), block_size)
    file.write_bytes(b"x" * (needed - 1))
    with pytest.raises(UserError, match=f"at least {needed} "):
        data.require_length(data.load_corpus(file), block_size)


def test_a_batch_is_a_pure_function_of_seed_and_step():
    text = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    x, y = data.batch(text, seed=3, step=11, batch_size=8, block_size=16)
    again, _ = data.batch(text, seed=3, step=11, batch_size=8, block_size=16)
    assert x.shape == y.shape == (8, 16)
    assert x.dtype == np.int64
    np.testing.assert_array_equal(x, again)
    np.testing.assert_array_equal(x[:, 1:], y[:, :-1])
    for other in (data.batch(text, 3, 12, 8, 16)[0], data.batch(text, 4, 11, 8, 16)[0]):
        assert (other != x).any()


def test_batches_reach_both_ends_of_the_data():
    text = np.arange(6, dtype=np.uint8)
    seen = {int(row[0]) for step in range(50) for row in data.batch(text, 0, step, 4, 4)[0]}
    assert seen == {0, 1}  # the last start leaves room for the target of the last byte
    with pytest.raises(ValueError, match="need 7 bytes, got 6"):
        data.batch(text, 0, 0, 1, 6)


def test_validation_walks_the_data_once_without_overlap():
    text = np.arange(100, dtype=np.uint8)
    batches = list(data.validation_batches(text, batch_size=3, block_size=10, limit=100))
    inputs = np.concatenate([x for x, _ in batches]).ravel()
    assert inputs.tolist() == list(range(90))  # bytes 90..99 have no whole window with a target
    assert len(list(data.validation_batches(text, 3, 10, limit=2))) == 2


def test_validation_of_a_short_text_fills_its_batch():
    text = np.arange(100, dtype=np.uint8)
    ((x, y),) = data.validation_batches(text, batch_size=64, block_size=10, limit=5)
    assert x.shape == (64, 10)
    assert (x[0, 0], y[-1, -1]) == (0, 99)  # from the first byte to the last
    assert np.diff(x[:, 0]).max() <= 2


def test_unigram_entropy_of_known_frequencies():
    assert str(data.unigram_entropy_bits(np.full(9, 97, dtype=np.uint8))) == "0.0"  # not -0.0
    assert data.unigram_entropy_bits(np.arange(256, dtype=np.uint8)) == pytest.approx(8.0, rel=1e-12)
    skewed = np.array([0, 0, 0, 1], dtype=np.uint8)
    assert data.unigram_entropy_bits(skewed) == pytest.approx(-0.75 * math.log2(0.75) + 0.5, rel=1e-12)
