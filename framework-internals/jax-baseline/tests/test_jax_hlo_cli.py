"""``hlo``, ``lock`` and ``diff``, and the GPU's program on a machine without one."""

import importlib.util
import re
import sys
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from benchkit import UserError
from benchkit.processes import ChildCrashed
from benchkit.run import Run
from jax_baseline.cli import app
from jax_baseline.diff import measurements as hlo_lens
from jax_baseline.hlo import gpu_target, kernels, parse, summarise
from torch_baseline.config import GPTConfig, TrainConfig

GOLDEN = Path(__file__).parent / "golden"
SMALL = ["--layers", "1", "--batch-size", "2", "--device", "cpu"]


def invoke(*arguments):
    return CliRunner().invoke(app, [*arguments])


def kernel_rows(output):
    return output.split("| kernel |")[1].split("\n\n")[0].splitlines()[2:]


def test_hlo_of_our_step_measured(tmp_path):
    dump, before = tmp_path / "step.txt", tmp_path / "step.stablehlo"
    ours = invoke(
        "hlo", *SMALL, "--measure", "--kernels", "1000", "--save", str(dump), "--save-stablehlo", str(before)
    )  # fmt: skip
    assert ours.exit_code == 0, ours.output
    assert "train step of tiny, 1 blocks, 2 sequences, float32, xla attention, on cpu" in ours.output
    for line in ("the same, counted by XLA", "a step", "scratch memory"):
        assert f"\n| {line} | " in ours.output
    donated, arguments = re.search(r"results reuse their memory \| (\d+) of (\d+) ", ours.output).groups()
    assert int(donated) == int(arguments) - 2  # all but tokens and targets
    assert re.search(r"\| block\*/attention \| backward \|.* (µs|ms) \|", ours.output)
    rows = kernel_rows(ours.output)
    assert any("gpt/" in row for row in rows)
    assert "stablehlo.dot_general" in before.read_text()
    # What was counted in this process is what stands in the file.
    kept = len(kernels(parse(dump.read_text())))
    assert f"\n| kernels | {kept} |" in ours.output
    assert len(rows) == kept
    of_file = invoke("hlo", str(dump), "--kernels", "3").output
    assert f"\n| kernels | {kept} |" in of_file
    assert len(kernel_rows(of_file)) == 3


def test_a_lock_passes_and_fails(tmp_path):
    lock, dump = tmp_path / "step.lock", tmp_path / "step.txt"
    dump.write_text((GOLDEN / "cpu_step.hlo").read_text())
    made = invoke("lock", str(lock), str(dump))
    assert made.exit_code == 0, made.output
    assert re.search(r"41 kernels with \d+ signatures", made.output)
    same = invoke("hlo", str(dump), "--check", str(lock))
    assert same.exit_code == 0
    assert f"LOCKED {lock}: 41 kernels" in same.output.replace("\n", "")
    dump.write_text((GOLDEN / "h200_step.hlo").read_text())
    drifted = invoke("hlo", str(dump), "--check", str(lock))
    assert drifted.exit_code == 1
    assert f"DRIFT {dump} from {lock}: 41 kernels in the lock, 34 now" in drifted.output.replace("\n", " ")
    assert "→ bf16[" in drifted.output
    lock.write_text(lock.read_text().replace(f'"jax installed": "{jax.__version__}"', '"jax installed": "0.1"'))
    other = tmp_path / "other.txt"
    other.write_text(dump.read_text())
    of_other = invoke("hlo", str(other), "--check", str(lock)).output
    assert f"DRIFT {other} from {lock}: 41 kernels in the lock (of {dump}), 34 now" in of_other.replace("\n", " ")
    assert f"jax installed: 0.1 in the lock, {jax.__version__} now" in of_other
    assert "stack, backward: + 3 × " in drifted.output or "stack, backward: + 1 × " in drifted.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hlo", "no_such_file.txt"], "cannot read no_such_file.txt"),
        (["hlo", str(GOLDEN / "regenerate.py")], "expected the text of an HLO module"),
        (["hlo", sys.executable], "is no text; write that of compiled.as_text()"),
        (["hlo", str(GOLDEN / "cpu_step.hlo"), "--check", "no.lock"], "write it with jax-baseline lock"),
        pytest.param(
            ["hlo", "--attention", "flash", *SMALL],
            "attention must be one of xla, cudnn, got 'flash'",
            marks=pytest.mark.slow,
        ),
        pytest.param(["hlo", "--dtype", "float16", *SMALL], "float16", marks=pytest.mark.slow),
        (["hlo", "--target", "mi300", *SMALL], "--target takes h200, got 'mi300'"),
        (["hlo", "--target", "h200", "--attention", "cudnn", *SMALL], "without a GPU the attention must be xla"),
        pytest.param(
            ["diff", "--attention", "flash", *SMALL],
            "attention must be one of xla, cudnn, got 'flash'",
            marks=pytest.mark.slow,
        ),
        (["diff", "mine.py:f"], "diff takes two functions"),
        pytest.param(
            ["diff", "mine.py:f", "mine.py:g", "--device", "cpu"], "there is no file mine.py", marks=pytest.mark.slow
        ),
    ],
)
def test_mistakes_are_user_errors(arguments, message):
    result = invoke(*arguments)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


@pytest.mark.parametrize(
    ("loss", "status", "verdict"),
    [
        (2.0, 0, "THE SAME FUNCTION: in the dtype of the inputs result 0, float32[], differs by 0 (bound 5.8e-05)"),
        (2.0001, 0, "differs by 5.0e-05 (bound 5.8e-05)\n"),
        (2.0002, 1, "NOT THE SAME FUNCTION: in the dtype of the inputs result 0, float32[], differs by 1.0e-04 (bound"),
    ],
)
def test_diff_prints_both_programs(monkeypatch, loss, status, verdict):
    from jax_baseline.diff.programs import KernelLaunch, Program, Rounding, Tensor

    def program(compiler, kind, name, loss):
        scores = Tensor("scores", "float32", (4, 4), 64, (16.0, 1.0, 2.0, 3.0, 4.0, 5.0, float(len(name))))
        launch = KernelLaunch(
            name, kind, "reduction", {"reduce": 1}, "forward", ("head",), (("head",),), "mine.py:3", 1, 64, 64, 9, 1e-3,
            "source text", (scores,),
        )  # fmt: skip
        first, second = ((Tensor("loss", "float32", (), 4, (1.0, *[size] * 6)),) for size in (loss, loss / (1 + 1e-5)))
        notes = ("a note",) if compiler == "XLA" else ()
        return Program(compiler, (launch,), 2e-3, 1.0, first, notes, Rounding((first, *[second] * 8)))

    both = program("XLA", "fusion loop", "fusion", 2.0), program("Inductor", "C++ kernel", "0:cpp_fused_sum_0:1", loss)
    monkeypatch.setattr("jax_baseline.diff.compiled_programs.compile_both", lambda one, other, rounding: both)
    result = invoke("diff", "--device", "cpu")
    assert result.exit_code == status, result.output
    assert verdict in result.output
    assert "| head | forward | 1 | 128 B | 1.00 ms | 1 | 128 B | 1.00 ms |" in result.output
    for line in ("a run | 2.00 ms | 2.00 ms", "assigned to a part by their label | 1 | 1", "not assigned | 0 | 0"):
        assert f"\n| {line} |" in result.output
    assert "\n- XLA: a note" in result.output
    assert "#### `head`, forward" in result.output
    assert "XLA, `fusion` (fusion loop):" in result.output


def test_a_program_that_fails_is_not_taken_for_another_function(monkeypatch):
    """Exit status 1 says that the two functions differ."""

    def dies(one, other, rounding):
        raise ChildCrashed("JaxProgram.program raised XlaRuntimeError: INTERNAL: no kernel")

    monkeypatch.setattr("jax_baseline.diff.compiled_programs.compile_both", dies)
    result = invoke("diff", "--device", "cpu")
    assert isinstance(result.exception, UserError)  # one line and status 2
    why = "JaxProgram.program raised XlaRuntimeError: INTERNAL: no kernel"
    assert str(result.exception) == f"compiling or running one of the programs failed: {why}"


def test_without_the_extra_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(gpu_target.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"install the optional extra jax-baseline\[gpu-target\]"):
        gpu_target.require_gpu_target()

    class Absences:
        def absent(self, what, why):
            self.found = (what, why)

    recorder = Absences()
    asked = hlo_lens.configure("cpu", quick=False)
    hlo_lens._collect_target(Run("cpu", {}, recorder), asked["target"], asked["layouts"])
    assert recorder.found[0] == "The GPU's program"
    assert "gpu-target" in recorder.found[1]


@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="the optional extra gpu-target is not installed"
)
def test_the_step_compiles_for_sharded_h200s():
    config = GPTConfig(vocab_size=256, block_size=32, n_layer=1, n_head=2, n_embd=64)
    training = TrainConfig(batch_size=8, dtype="bfloat16")
    whole = gpu_target.compile_step_for_h200(config, training)
    sharded = gpu_target.compile_step_for_h200(config, training, devices=4, layout="FSDP")
    found = summarise(sharded.text)
    assert not summarise(whole.text).collectives
    assert {"all-gather-start", "reduce-scatter-start"} & found.collectives.keys()
    assert found.donated == found.arguments - 2
    assert sharded.arguments < whole.arguments / 3
    assert any("triton" in kind or "cublas" in kind for kind in found.kinds)
