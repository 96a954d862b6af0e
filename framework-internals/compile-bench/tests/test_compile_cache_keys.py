"""Cache keys: what is read from the trace, written to a file, and said about two files that differ."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from benchkit import UserError
from compile_bench import Harness
from compile_bench.capture.parsing import Event
from compile_bench.capture.trace import CompileTrace
from compile_bench.check.cache_keys import (
    CacheKey,
    KeyFile,
    KeyPart,
    compare_keys,
    read_cache_keys,
    read_keys,
    write_keys,
)
from compile_bench.cli import app
from compile_bench.measure.records import Triage

TENSOR = "TensorMetadata(dtype=torch.float32, shape=torch.Size([4, 8]), stride=(8, 1), device=device(type='cpu'))"
PARTS = (
    KeyPart("gm", "g1", "GraphModule()\n\ndef forward(self, x):\n    sin = torch.ops.aten.sin.default(x);  x = None\n"),
    KeyPart("example_inputs[0]", "e1", TENSOR),
    KeyPart("fx_kwargs[is_backward]", "f", "False"),
    KeyPart("cpp_runtime_thread_count", "c1", "2"),
    KeyPart("torch_version", "t1", "�M��"),
    KeyPart("inductor_config[max_autotune]", "m1", "False"),
    KeyPart("fx_kwargs[cudagraphs]", "b1", "BoxedBool(value=False)"),
)
FORWARD = CacheKey("fx_graph", "0/0", "miss", "fa", PARTS)
BACKWARD = replace(FORWARD, key="fb", parts=(*PARTS[:2], KeyPart("fx_kwargs[is_backward]", "b", "True"), *PARTS[3:]))
FILE = KeyFile("m.py:target, training, cpu, default", {"torch": "2.13.0", "Python": "3.11.7"}, (FORWARD, BACKWARD))


def changed(key, **texts):
    """A key with other texts (and so hashes) of some parts."""
    names = {"gm": "gm", "size": "example_inputs[0]", "threads": "cpp_runtime_thread_count", "tune": PARTS[5].name}
    texts = {names.get(name, name): text for name, text in texts.items()}
    parts = (replace(part, digest="other", text=texts[part.name]) if part.name in texts else part for part in key.parts)
    return replace(key, key=f"{key.key}2", parts=tuple(parts))


def test_keys_are_read_from_the_events_of_the_trace():
    content = {
        "key": "fa",
        "components": ["[g1] gm: def forward(self):\n    a: f32 = b", "[m1] inductor_config[a.b]: {'x': 1}", "no part"],
        "cache_state": "miss",
    }
    events = [
        Event("fx_graph_cache_miss", "0/0", {}, json.dumps(content)),
        Event("fx_graph_cache_bypass", "1/0", {}, json.dumps({"cache_bypass_reason": "a HOP"})),
        Event("aotautograd_cache_hit", "2/0", {}, json.dumps({"key": "ak", "components": []})),
        Event("fx_graph_cache_hit_event", "2/0", {}),
    ]
    one, two, three = read_cache_keys(events)
    assert one == CacheKey(
        "fx_graph",
        "0/0",
        "miss",
        "fa",
        (KeyPart("gm", "g1", "def forward(self):\n    a: f32 = b"), KeyPart("inductor_config[a.b]", "m1", "{'x': 1}")),
    )
    assert (two.state, two.key, two.reason) == ("bypass", "", "a HOP")
    assert (three.cache, three.state, three.key, three.parts) == ("aotautograd", "hit", "ak", ())
    assert (FORWARD.backward, BACKWARD.backward) == (False, True)


def test_a_file_comes_back(tmp_path):
    write_keys(tmp_path / "keys.json", FILE)
    assert read_keys(tmp_path / "keys.json") == FILE
    assert compare_keys(FILE, FILE) == []


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 1, "texts": {}, "keys": [{}]}'])
def test_what_is_no_file_of_keys_is_one_line(tmp_path, text):
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(UserError, match="is not a file of compile-bench cache-key"):
        read_keys(tmp_path / "keys.json")
    (tmp_path / "keys.json").write_text('{"version": 7}')
    with pytest.raises(UserError, match="of version 7; this compile-bench reads version 1"):
        read_keys(tmp_path / "keys.json")
    with pytest.raises(UserError, match="there is no file"):
        read_keys(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tune": "True"}, "setting torch._inductor.config.max_autotune: False → True"),
        ({PARTS[6].name: "BoxedBool(value=True)"}, "whether CUDA graphs are asked for (the mode): False → True"),
        ({"threads": "8"}, "the number of CPU threads (torch.set_num_threads, OMP_NUM_THREADS): 2 → 8"),
        (
            {"size": TENSOR.replace("[4, 8]", "[5, 8]").replace("float32", "float16")},
            "input 0 of the graph: dtype float32 → float16, shape [4, 8] → [5, 8]",
        ),
        (
            {"gm": PARTS[0].text.replace("sin", "cos").replace("x = None", "y = None")},
            "the operations of the graph: - sin = torch.ops.aten.sin.default(x); + cos = torch.ops.aten.cos.default(x)",
        ),
        (
            {"torch_version": "�N��"},
            "the source files of torch (another version or build): differs, in what PyTorch does not print",
        ),
    ],
)
def test_a_part_that_differs_is_named_in_plain_words(change, expected):
    after = replace(FILE, keys=(changed(FORWARD, **change), BACKWARD))
    assert compare_keys(FILE, after) == ["1 of 2 keys differ, so the caches miss:", f"  {expected} (all)"]
    both = replace(FILE, keys=(changed(FORWARD, **change), changed(BACKWARD, tune="True")))
    lines = compare_keys(FILE, both)
    assert lines[0] == "2 of 2 keys differ, so the caches miss:"
    assert f"  {expected} ({'all' if 'tune' in change else '0/0 forward'})" in lines


def test_parts_and_graphs_of_one_run_only_are_named_with_what_differs_between_the_runs():
    more = replace(FORWARD, key="fz", parts=(*PARTS, KeyPart("default_dtype", "d", "torch.float64")))
    second = replace(FORWARD, compile_id="1/0", key="fy")
    after = KeyFile(FILE.target, {"torch": "2.14.0", "Python": "3.11.7", "GPU": "H200"}, (more, BACKWARD, second))
    assert compare_keys(FILE, after) == [
        "1/0 forward is in the second file only",
        "1 of 3 keys differ, so the caches miss:",
        "  torch.set_default_dtype: in the second run only (all)",
        "the runs differ in torch: 2.13.0 → 2.14.0; GPU: none → H200",
    ]
    never = CacheKey("fx_graph", "0/0", "bypass", reason="a custom pass without a uuid")
    assert compare_keys(replace(FILE, keys=(never,)), replace(FILE, keys=(never,))) == [
        "0/0 forward is never cached: a custom pass without a uuid"
    ]


def test_the_commands_write_and_compare(tmp_path, monkeypatch):
    answers = [(FILE.facts, FILE.keys), (FILE.facts, (changed(FORWARD, tune="True"), BACKWARD))]
    monkeypatch.setattr(Harness, "triage", lambda self, case: Triage(case, CompileTrace(), 2))
    monkeypatch.setattr(Harness, "toolchain_seconds", lambda self: 1.0)
    monkeypatch.setattr(Harness, "ask", lambda self, job, case: answers.pop(0) if answers else (FILE.facts, ()))
    files = [str(tmp_path / name) for name in ("a.json", "b.json")]

    def command(*arguments):
        return CliRunner().invoke(app, arguments)

    for file in files:
        result = command("cache-key", "m", "--file", file, "--device", "cpu")
        assert (result.exit_code, result.output) == (0, f"{file}: 2 keys of m, training, cpu, default\n")
    result = command("cache-diff", *files)
    assert result.exit_code == 1
    assert "setting torch._inductor.config.max_autotune: False → True" in result.output
    result = command("cache-diff", files[0], files[0])
    assert (result.exit_code, result.output) == (
        0,
        "2 keys, all the same: the caches of one run serve the other\n",
    )
    assert command("cache-diff", files[0], str(tmp_path / "c.json")).exit_code == 2
    result = command("cache-key", "m", "--file", files[0], "--device", "cpu")  # which would be "all the same"
    assert result.exit_code == 2
    assert "Inductor's caches were asked for no graph" in result.output


@pytest.mark.slow
def test_two_runs_of_one_target_have_the_same_keys_and_a_setting_between_them_is_found(tmp_path):
    path = tmp_path / "model.py"
    text = "import torch\nSETTINGS\ndef target():\n    return torch.nn.Linear(8, 8), (torch.ones(4, 8),)\n"
    found = []
    for settings in ("", "", "torch._inductor.config.max_fusion_size = 32"):
        path.write_text(text.replace("SETTINGS", settings))
        file = tmp_path / f"{len(found)}.json"
        result = CliRunner().invoke(app, ["cache-key", f"{path}:target", "--file", str(file), "--device", "cpu"])
        assert result.exit_code == 0, result.output
        found.append(read_keys(file))
    assert {key.cache for key in found[0].keys} == {"aotautograd", "fx_graph"}
    assert all(len(key.parts) > 100 for key in found[0].keys)
    assert compare_keys(found[0], found[1]) == []
    assert compare_keys(found[0], found[2]) == [
        f"{len(found[0].keys)} of {len(found[0].keys)} keys differ, so the caches miss:",
        "  setting torch._inductor.config.max_fusion_size: 64 → 32 (all)",
    ]
