"""The operators before a build is loaded: what the import registers, and the first call of each kind.

Each first call runs in a process of its own, forked from one that has imported the package and called nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import warm_python

import custom_ops
from custom_ops.operators.registration import NAMESPACES, SCHEMAS

PATH = os.pathsep.join(sys.path)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run(arguments, env={**os.environ, "PYTHONPATH": PATH, **environment})


def names_of(schemas: tuple[str, ...]) -> list[str]:
    return [schema.split("(")[0] for schema in schemas]


def test_every_operator_has_one_schema() -> None:
    assert len(set(names_of(SCHEMAS))) == len(SCHEMAS) == 27
    for namespace in NAMESPACES:
        for schema in SCHEMAS:
            name, _, overload = schema.split("(")[0].partition(".")
            found = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")._schema
            assert str(found) == str(torch._C.parse_schema(f"{namespace}::{schema}"))


NOTHING_BUILT = """
import sys, warnings
import torch
import custom_ops
assert not {"torch._dynamo", "setuptools", "jax"} & set(sys.modules)
from custom_ops.operators.registration import NAMESPACES, SCHEMAS
from torch._subclasses.fake_tensor import FakeTensorMode

for namespace in NAMESPACES:
    for schema in SCHEMAS:
        name, _, overload = schema.split("(")[0].partition(".")
        getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")

ops = torch.ops.custom_ops
with FakeTensorMode():
    x, bias = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    y = ops.bias_gelu(ops.axpb(x, ops.vector_add(x, ops.scale(x)), 2.0), bias)
    assert y.shape == (3, 4) and y.requires_grad
    y.sum().backward()
    assert x.grad.shape == (3, 4) and bias.grad.shape == (4,)
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    out, lse = torch.vmap(ops.flash_attention)(q[None], q[None], q[None])
    assert out.shape == (1, 1, 2, 5, 8) and lse.shape == (1, 1, 2, 5)
    with torch.autocast("cpu"):
        assert ops.bias_gelu(x, bias).dtype == torch.bfloat16

class Model(torch.nn.Module):
    def forward(self, x, bias):
        return ops.bias_gelu(ops.vector_add(x, x), bias)

program = torch.export.export(Model(), (torch.randn(3, 4), torch.randn(4)))
targets = [node.target for node in program.graph.nodes]
assert ops.vector_add.default in targets and ops.bias_gelu.default in targets

from native_build import BuildError
x = torch.ones(2)
for call in (ops.vector_add, custom_ops.vector_add):
    try:
        call(x, x)
    except BuildError as error:
        assert "no C++ compiler 'absent'" in str(error), error
    else:
        raise AssertionError(call)
assert torch.equal(torch.compile(custom_ops.vector_add, backend="eager")(x, x), 2 * x)  # the formula
"""


def test_names_fakes_derivatives_and_graphs_need_no_build() -> None:
    # With a GPU, the kernels that the driver's library compiles would be the build.
    answer = run("-c", NOTHING_BUILT, CXX="absent", CUSTOM_OPS_LIBRARY="", CUDA_VISIBLE_DEVICES="")
    assert answer.returncode == 0, answer.stderr


FIRST_CALLS = """
import functools, os, sys, traceback, warnings
import torch
import custom_ops
from custom_ops.builds.torch_internals import operator_names
from custom_ops.operators.calls import calls
from custom_ops.operators.registration import NAMESPACES, SCHEMAS
from torch.autograd import forward_ad
from torch.library import opcheck

warnings.simplefilter("error")
torch.set_num_threads(1)
ops, bare = torch.ops.custom_ops, torch.ops.custom_ops_kernels
x, bias = torch.randn(3, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh")
same = torch.testing.assert_close

def plain():
    assert torch.equal(ops.vector_add(x, x), x + x)

def without_the_environment():
    del os.environ["CUSTOM_OPS_DEFINED_IN"]
    plain()

def without_derivatives():
    assert torch.equal(bare.scale(x, 2.0), 2 * x)

def overload():
    same(bare.bias_gelu.access(x, bias, 0), gelu(x + bias))

def lists():
    same(ops.gradient_norm([x, bias]), torch.cat([x.flatten(), bias]).norm())

def in_place():
    logits, targets = x.clone(), torch.tensor([0, 1, 3])
    losses = ops.cross_entropy_gradient_(logits, targets, 4, -100)
    same(losses, torch.nn.functional.cross_entropy(x, targets, reduction="none"))

def gradient():
    assert torch.autograd.gradcheck(ops.bias_gelu, (x.clone().requires_grad_(), bias.clone().requires_grad_()))

def functional_gradient():
    same(torch.func.grad(lambda x: ops.scale(x, 3.0).sum())(x), torch.full_like(x, 3.0))

def mapped():
    same(torch.vmap(ops.bias_gelu, (1, None))(x.expand(2, 3, 4).movedim(0, 1), bias), gelu(x + bias).expand(2, 3, 4))

def gradient_of_mapped():
    leaf = x.clone().requires_grad_()
    torch.vmap(ops.bias_gelu, (0, None))(leaf, bias).sum().backward()
    other = x.clone().requires_grad_()
    gelu(other + bias).sum().backward()
    same(leaf.grad, other.grad)

def tangent():
    with forward_ad.dual_level():
        ops.vector_add(forward_ad.make_dual(x, x), x)

def tangent_of_func():
    torch.func.jvp(ops.scale, (x,), (x,))

def every_tangent():
    names = [name for name in operator_names() if name.startswith("custom_ops")]
    assert len(names) == len(NAMESPACES) * (len(SCHEMAS) + 2), names  # two are implemented in Python
    refuses(dual, names)
    assert not calls.loaded
    refuses(jvp, names)
    plain()
    refuses(dual, names)

def dual(function):
    with forward_ad.dual_level():
        function(forward_ad.make_dual(x, x))

def jvp(function):
    torch.func.jvp(function, (x,), (x,))

def refuses(forward_mode, names):
    values = {"Tensor": x, "Optional[Tensor]": x, "List[Tensor]": [x], "float": 1.0, "int": 1, "List[int]": [1]}
    values["List[bool]"] = [True, True, True]
    for name in names:
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        kinds = [str(argument.type) for argument in operator._schema.arguments]
        for place, kind in enumerate(kinds):
            def call(tensor):
                before, after = ([values.get(kind) for kind in part] for part in (kinds[:place], kinds[place + 1 :]))
                operator(*before, [x, tensor] if kind == "List[Tensor]" else tensor, *after)
            if "Tensor" not in kind:
                continue
            try:
                forward_mode(call)
            except NotImplementedError as error:
                assert f"{namespace}::{packet}" in str(error) and "no forward-mode derivative" in str(error), error
            else:
                raise AssertionError(f"{name} drops the tangent of argument {place}")

def autocast():
    with torch.autocast("cpu"):
        assert ops.bias_gelu(x.float(), bias.float()).dtype == torch.bfloat16

def sparse():
    ops.scale(x.to_sparse())

def device():
    ops.scale(x.to("meta"))
    assert not calls.loaded
    plain()

def checked():
    leaf = x.clone().requires_grad_()
    opcheck(ops.bias_gelu.default, (leaf, bias))
    opcheck(ops.vector_add.default, (leaf, leaf))

def compiled(backend):
    torch._dynamo.config.suppress_errors = False
    warnings.simplefilter("ignore")  # of the compilers
    w, t = torch.randn(5, 4, requires_grad=True), torch.tensor([0, 1, 4])
    def step(x, bias):
        y = ops.scale(custom_ops.bias_gelu(x, bias, lowering="kernel"), 1.0)
        q = x[None, None]
        return custom_ops.linear_cross_entropy(y, w, t) + ops.flash_attention(q, q, q)[0].sum()
    def results(function):
        operands = [x.float().requires_grad_(), bias.float().requires_grad_()]
        return torch.autograd.grad(function(*operands), operands)
    found = results(torch.compile(step, fullgraph=True, backend=backend))
    for one, other in zip(found, results(step), strict=True):
        same(one, other)

def traced():
    compiled("aot_eager")

def inductor():
    compiled("inductor")

refused = {
    "tangent": "no forward-mode derivative", "tangent_of_func": "no forward-mode derivative",
    "sparse": "custom_ops::scale: the build in use has no kernels for SparseCPU tensors",
}
warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # torch's own use in forward mode
if not {"checked", "traced", "inductor"}.isdisjoint(sys.argv):
    import torch._dynamo  # once, before the processes fork
assert not calls.loaded
failed = []
for name in sys.argv[1:]:
    if (child := os.fork()) == 0:
        status = 0
        try:
            globals()[name]()
            assert name not in refused, "nothing was refused"
            assert calls.loaded
        except NotImplementedError as error:
            status = 0 if refused.get(name, "\\0") in str(error) else (traceback.print_exc(), 1)[1]
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)
    if os.waitpid(child, 0)[1] != 0:
        failed.append(name)
assert not failed, failed
"""
KINDS = (
    "plain", "without_the_environment", "without_derivatives", "overload", "lists", "in_place", "gradient",
    "functional_gradient", "mapped", "gradient_of_mapped", "tangent", "tangent_of_func", "every_tangent", "autocast",
    "sparse", "device",
)  # fmt: skip
COMPILED = ("checked", "traced")


@pytest.mark.parametrize(
    ("autograd", "kinds"),
    [
        ("nodes", KINDS),
        pytest.param("nodes", COMPILED, marks=pytest.mark.slow),
        pytest.param(
            "python", ("gradient", "gradient_of_mapped", "tangent", "every_tangent", "in_place", "traced"),
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_first_call_of_any_kind_is_right(autograd: str, kinds: tuple[str, ...]) -> None:
    custom_ops.load()  # builds
    answer = run("-c", FIRST_CALLS, *kinds, CUSTOM_OPS_AUTOGRAD=autograd)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.slow
def test_a_first_call_compiled_by_inductor_is_right() -> None:
    custom_ops.load()
    answer = run("-c", FIRST_CALLS, "inductor")
    assert answer.returncode == 0, answer.stderr


TOGETHER = """
import sys, threading
import torch
import custom_ops
x = torch.ones(3)
found, start = [], threading.Barrier(8)
def call():
    start.wait()
    found.append(torch.ops.custom_ops.vector_add(x, x))
threads = [threading.Thread(target=call) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 8 and all(torch.equal(one, 2 * x) for one in found)
"""


def test_threads_may_make_the_first_call_together() -> None:
    custom_ops.load()
    answer = run("-c", TOGETHER)
    assert answer.returncode == 0, answer.stderr


ALONE = """
import sys
import torch
library, *schemas = sys.argv[1:]
torch.ops.load_library(library)
for namespace in ("custom_ops", "custom_ops_kernels"):
    for schema in schemas:
        name, _, overload = schema.split("(")[0].partition(".")
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")._schema
        assert str(found) == str(torch._C.parse_schema(f"{namespace}::{schema}")), found
x = torch.ones(3)
assert torch.equal(torch.ops.custom_ops.vector_add(x, x), 2 * x)
"""


def test_the_library_alone_defines_the_same_schemas() -> None:
    library = custom_ops.load().file
    answer = warm_python.run(
        ["-c", ALONE, library, *SCHEMAS], env={**os.environ, "CUSTOM_OPS_DEFINED_IN": str(os.getpid())}
    )
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("first", ["library", "package"])
def test_the_library_and_the_package_may_be_loaded_in_either_order(first: str, tmp_path: Path) -> None:
    library = custom_ops.load().file
    assert library is not None
    copy = str(shutil.copy(library, tmp_path / "copy.so"))  # another file: the linker would recognise the same one
    load, package = f"torch.ops.load_library({copy!r})", "import custom_ops"
    both = f"{load}\n{package}" if first == "library" else f"{package}\n{load}"
    program = (
        f"import torch\n{both}\nx = torch.ones(3, requires_grad=True)\n"
        "custom_ops.bias_gelu(torch.ops.custom_ops.vector_add(x, x), x).sum().backward()\n"
        "assert x.grad.shape == (3,)\n"
    )
    answer = run("-c", program)
    assert answer.returncode == 0, answer.stderr
