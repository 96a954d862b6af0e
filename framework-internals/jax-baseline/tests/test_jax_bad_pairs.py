"""A pair that cannot be compared is one line: what was expected, what was received, what to do."""

import pytest

from benchkit import UserError
from jax_baseline.cli.pair_file import load_pair
from jax_baseline.parity.pairs import run

FILE = """\
import jax.numpy as jnp, numpy as np, optax, torch


def torch_side():
    return torch.nn.Linear(3, 4), lambda model, x: model(x).square().mean()


def jax_side():
    params = {"weight": jnp.zeros((3, 4)), "bias": jnp.zeros(4)}
    return params, lambda p, x: ((x @ p["weight"] + p["bias"]) ** 2).mean()


def inputs():
    return [(np.ones((2, 3)),)]


def names():
    return {"weight": "weight.T"}
"""
MODULE, LOSS = "torch.nn.Linear(3, 4)", "lambda model, x: model(x).square().mean()"
PARAMS = 'params, lambda p, x: ((x @ p["weight"] + p["bias"]) ** 2).mean()'
BATCHES, MAP = "[(np.ones((2, 3)),)]", '{"weight": "weight.T"}'

BAD = {
    "a module alone": (f"{MODULE}, {LOSS}", MODULE, ["torch_side must return (module, loss) or", "got torch.Linear"]),
    "a loss that is no function": (LOSS, "3.0", ["the second element must be the loss", "got float"]),
    "an optimizer that exists": (
        LOSS,
        f"{LOSS}, torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1)",
        ["the third element must be a function of the parameters", "got torch.SGD"],
    ),
    "a state for an optimizer": (PARAMS, f"{PARAMS}, {{}}", ["must be an optax transformation, got dict", "fourth"]),
    "five elements": (PARAMS, f"{PARAMS}, None, None, None", ["or (parameters, loss, optimizer, state), got a tuple"]),
    "a loss that takes no state": (
        PARAMS,
        f"{PARAMS}, None, {{'mean': jnp.zeros(4)}}",
        ["jax_side: the loss raised TypeError", "positional arguments"],
    ),
    "a loss that returns no state": (
        PARAMS,
        f"{PARAMS.replace('p, x', 'p, state, x')}, None, {{'mean': jnp.zeros(4)}}",
        ["JAX's loss takes (parameters, state, *batch) and returns (loss, new state), got"],
    ),
    "a number among the parameters": ("jnp.zeros(4)}", "jnp.zeros(4), 'n': None or 3}", ["got int at ['n']"]),
    "no parameters": (PARAMS, PARAMS.replace("params,", "{},"), ["must be a tree of arrays, got dict without any"]),
    "one tuple for all steps": (
        BATCHES,
        "(np.ones((2, 3)),)",
        ["one tuple of NumPy arrays for each step", "element 0 is numpy.ndarray: put"],
    ),
    "lists for tuples": (
        BATCHES,
        "[[np.ones((2, 3))]]",
        ["element 0 is a list of 1 elements: put the arrays of a step"],
    ),
    "torch tensors": (BATCHES, "[(torch.ones(2, 3),)]", ["array 0 of step 0 is torch.Tensor: use .numpy()"]),
    "strings": (BATCHES, '[(np.array(["a"]),)]', ["has dtype <U1: use floating numbers, integers or bool"]),
    "numbers wider than torch's": (
        BATCHES,
        "[(np.ones((2, 3), np.longdouble),)]",
        ["integers or bool of NumPy, of at most 64 bits"],
    ),
    "numbers that JAX wraps": (BATCHES, "[(np.full((2, 3), 2**40),)]", ["JAX converts it to 32 bits", "ids % vocab"]),
    "complex parameters": (
        MODULE,
        "torch.nn.ParameterList([torch.ones(3, dtype=torch.complex64)])",
        ["0 are complex", "torch.view_as_real"],
    ),
    "an optimizer of another module": (
        LOSS,
        f"{LOSS}, lambda parameters: torch.optim.SGD({MODULE}.parameters())",
        ["has none of the parameters that its function is given"],
    ),
    "no steps": (BATCHES, "[]", ["got an empty list"]),
    "a vector in torch": (
        "square().mean()",
        "square().mean(0)",
        ["torch_side: the loss must return one number, got shape (4,)"],
    ),
    "an integer in torch": ("square().mean()", "argmax()", ["the loss must be a floating number, got int64"]),
    "a loss with more": (
        PARAMS,
        PARAMS.replace("x: ", "x: (").replace("mean()", "mean(), 0)"),
        ["jax_side: the loss must return an array without axes, got a tuple of 2"],
    ),
    "a number of Python": (
        "square().mean()",
        "mean().item()",
        ["the loss must return a tensor without axes, got float"],
    ),
    "NaN": (
        "square().mean()",
        "mean().abs().neg().log()",
        ["the loss of the first batch is nan at torch's initial weights"],
    ),
    "no map": ("def names", "def nanes", ["the map of parameters", "has no function 'names'; it has"]),
    "a list as map": (MAP, '["weight"]', ["must return a dictionary of patterns", "got a list of 1 elements"]),
    "a pattern that matches nothing": (
        MAP,
        '{"wait": "weight.T"}',
        ["the pattern 'wait' matches none of torch's parameters, weight, bias"],
    ),
    "two patterns": (
        MAP,
        '{"weight": "weight.T", "w.*": "weight"}',
        ["weight matches 'weight' and 'w.*', which give different paths, weight.T and weight"],
    ),
    "a group that is not there": (
        MAP,
        r'{"weight": r"\1/weight.T"}',
        ["is no pattern with its path", "invalid group reference"],
    ),
    "two for one": (MAP, '{"weight": "weight.T", "bias": "weight.T"}', ["weight must be (4,) for bias, got (3, 4)"]),
    "a shape": (MAP, '{"weight": "weight"}', ["weight must be (4, 3) for weight, got (3, 4); '.T' reverses"]),
    "a lazy module": (MODULE, "torch.nn.LazyLinear(4)", ["weight, bias have no shape before the first call; call the"]),
    "a cast to the dtype of the weights": (
        f"{MODULE}, lambda model, x: model(x)",
        f"{MODULE}.bfloat16(), lambda model, x: model(x.bfloat16())",
        ["must have the same dtype", "; here the weights are float32 and float64: cast to the dtype of a weight"],
    ),
    "an optimizer that raises": (
        LOSS,
        f"{LOSS}, lambda parameters: torch.optim.SGD(parameters, lr=-1)",
        ["torch_side: the optimizer raised ValueError: Invalid learning rate: -1"],
    ),
    "no optimizer": (LOSS, f"{LOSS}, lambda parameters: 3", ["the third element must return an optimizer, got int"]),
    "an optimizer with a closure": (
        LOSS,
        f"{LOSS}, torch.optim.LBFGS",
        ["LBFGS evaluates the loss itself", "use an optimizer whose step() needs no closure"],
    ),
    "an optimizer of optax that needs the loss": (
        PARAMS,
        f"{PARAMS}, optax.lbfgs()",
        ["jax_side: the optimizer raised TypeError", "'value_fn'"],
    ),
    "a factory that raises": (
        "return torch.nn",
        "raise OSError('no weights'); torch.nn",
        ["torch_side raised OSError: no weights"],
    ),
    "another number of arrays": (
        BATCHES,
        "[(np.ones((2, 3)), np.ones(2))]",
        ["the loss raised TypeError", "positional arguments"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compared_is_one_line(tmp_path, name):
    given, bad, says = BAD[name]
    assert given in FILE
    file = tmp_path / "mine.py"
    file.write_text(FILE.replace(given, bad))
    with pytest.raises(UserError) as raised:
        load_pair(f"{file}:torch_side", f"{file}:jax_side")
    assert "\n" not in str(raised.value)
    for words in says:
        assert words in str(raised.value)


RAISING = {
    "a batch of another width": (
        BATCHES,
        "[(np.ones((2, 3)),), (np.ones((2, 5)),)]",
        "torch's loss or its gradient in step 1",
    ),
    "a loss without a derivative": (
        PARAMS,
        'params, lambda p, x: jax.lax.while_loop(lambda y: y < 9, lambda y: y + 1, p["bias"].sum())',
        "JAX's loss or its gradient",
    ),
    "an optimizer that raises": (
        LOSS,
        f"{LOSS}, lambda parameters: Raising(parameters, {{}})",
        "torch's optimizer in step 0 raised ValueError: the first step",
    ),
}


@pytest.mark.parametrize("name", RAISING)
def test_what_a_step_raises_is_one_line_that_names_it(tmp_path, name):
    given, bad, says = RAISING[name]
    file = tmp_path / "mine.py"
    optimizer = (
        "class Raising(torch.optim.Optimizer):\n    def step(self):\n        raise ValueError('the first step')\n\n\n"
    )
    file.write_text("import jax\n" + FILE.replace(given, bad).replace("def torch_side", f"{optimizer}def torch_side"))
    pair = load_pair(f"{file}:torch_side", f"{file}:jax_side")
    with pytest.raises(UserError, match=says) as raised:
        run(pair, "float64")
    assert "\n" not in str(raised.value)


def test_two_parameters_of_torch_are_not_one_of_jax(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import jax.numpy as jnp, numpy as np, torch\n"
        "def torch_side():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))\n"
        "    return model, lambda model, x: model(x).mean()\n"
        "def jax_side(): return {'w': jnp.zeros((3, 3))}, lambda p, x: (x @ p['w'] @ p['w']).mean()\n"
        "def inputs(): return [(np.ones((2, 3)),)]\n"
        "def names(): return {r'\\d\\.weight': 'w.T'}\n"
    )
    with pytest.raises(UserError, match=r"0\.weight and 1\.weight are both mapped to w; map each to a parameter"):
        load_pair(f"{file}:torch_side", f"{file}:jax_side")


TIED = """\
import jax.numpy as jnp, numpy as np, torch


def torch_side():
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    return model, lambda model, x: model(x).square().mean()


def jax_side():
    params = {"embed": jnp.zeros((5, 4)), "head": jnp.zeros((4, 5))}
    return params, lambda p, x: ((p["embed"][x] @ p["head"]) ** 2).mean()


def inputs():
    return [(np.arange(5),)]


def names():
    return {r"0\\.weight": "embed", MORE}
"""


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            r'r"1\.weight": "head.T"',
            r"1\.weight is the same parameter of torch as 0\.weight, .* read one array in both",
        ),
        ("", r"JAX without a partner in torch: head; torch's are tied, 1\.weight is 0\.weight: read one array in both"),
    ],
)
def test_tied_parameters_are_named(tmp_path, more, says):
    file = tmp_path / "mine.py"
    file.write_text(TIED.replace("MORE", more))
    with pytest.raises(UserError, match=says):
        load_pair(f"{file}:torch_side", f"{file}:jax_side")


def test_sides_in_the_wrong_order_are_named(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    with pytest.raises(UserError, match=r"got dict; name torch's side first and JAX's second"):
        load_pair(f"{file}:jax_side", f"{file}:torch_side")


def test_a_pair_that_fits_is_loaded(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    pair = load_pair(f"{file}:torch_side", f"{file}:jax_side")
    assert pair.paths() == {"weight": ("weight", (1, 0)), "bias": ("bias", (0,))}
