"""Python that needs the value of a tensor: branches, loops, numbers, keys."""

from __future__ import annotations

import ast
import math
import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compile_bench.catalogue.cause import Advice, Repro, Theme
from compile_bench.catalogue.conditions import of_branches, of_calls, of_constructs, of_places, of_values
from compile_bench.catalogue.use import UsedAs

theme = Theme("Values that Python needs")
BRANCH = "Data-dependent branching"
ITEM = r"Tensor\.item\(\)|Data dependent operator"
_VECTOR = (torch.tensor([0.3, 0.6, 0.1, 0.9]),)


@theme.cause(
    "branch-on-value",
    "`if` on the value of a tensor",
    pattern=BRANCH,
    code=r"\b(if|elif)\b",
    why="Python needs the value to choose a branch, but the value exists only after the graph has run. Dynamo ends "
    "the graph there and compiles each branch separately.",
    advice="Compute both sides and choose with torch.where.",
    when=of_branches.ELEMENTWISE_SIDES,
)
def _branch() -> Repro:
    def broken(x: Tensor) -> Tensor:
        if x.mean() > 0:
            x = x * 0.5
        return x.cos()

    def fixed(x: Tensor) -> Tensor:
        x = torch.where(x.mean() > 0, x * 0.5, x)
        return x.cos()

    return Repro(broken, fixed, [_VECTOR, (-_VECTOR[0],)])


@theme.cause(
    "branch-on-value-cond",
    "`if` with two expensive sides",
    pattern=BRANCH,
    code=r"\b(if|elif)\b",
    why="Python needs the value to choose a branch. torch.where would compute both sides.",
    advice="Use torch.cond(predicate, side, other_side, operands): only one side runs. Both must give the same shapes.",
    when=of_branches.PURE_SIDES,
)
def _branch_cond() -> Repro:
    def broken(x: Tensor) -> Tensor:
        if x.sum() > 0:
            return (x @ x).relu()
        return (x @ x).sin()

    def fixed(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: (x @ x).relu(), lambda x: (x @ x).sin(), (x,))

    return Repro(broken, fixed, [(torch.eye(4),), (-torch.eye(4),)])


@theme.cause(
    "choice-by-value",
    "`a if tensor else b`",
    pattern=BRANCH,
    code=r"\bif\b.*\belse\b",
    why="A conditional expression is a branch.",
    advice="Use torch.where(condition, a, b).",
    when=of_branches.CHOICE_OF_NUMBERS,
)
def _choice() -> Repro:
    def broken(x: Tensor) -> Tensor:
        scale = 2.0 if x.norm() > 1 else 0.5
        return x * scale

    def fixed(x: Tensor) -> Tensor:
        return x * torch.where(x.norm() > 1, 2.0, 0.5)

    return Repro(broken, fixed, [_VECTOR, (_VECTOR[0] * 0.1,)])


@theme.cause(
    "and-of-values",
    "`and`, `or`, `not` between tensors",
    pattern=rf"{BRANCH}|Data dependent operator",
    code=r"\b(and|or)\b|(=|\breturn|\() ?not\b",
    why="These operators ask a tensor whether it is true, which is a branch.",
    advice="Use torch.logical_and, torch.logical_or and torch.logical_not, or &, | and ~ on boolean tensors.",
    when=of_branches.NOT_A_TEST & of_constructs.PLAIN_OPERANDS,
)
def _and() -> Repro:
    def broken(x: Tensor) -> Tensor:
        both = x[0] > 0 and x[1] > 0
        return x * both

    def fixed(x: Tensor) -> Tensor:
        return x * torch.logical_and(x[0] > 0, x[1] > 0)

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "any-of-values",
    "any() or all() over a tensor, `in` a tensor",
    pattern=rf"{BRANCH}|{ITEM}",
    code=r"(?<!\.)\b(any|all)\(|\b(if|elif|while|assert|and|or|not) [\w.\[\]]+ (not )?in\b",
    why="any() tests one element after another, and `value in tensor` needs a Python bool.",
    advice="Use the tensor's .any() and .all(), or (tensor == value).any() for `value in tensor`.",
    when=of_branches.NOT_A_TEST,
)
def _any() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * any(x > 0)

    def fixed(x: Tensor) -> Tensor:
        return x * (x > 0).any()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "chained-comparison",
    "`low < tensor < high`",
    pattern=BRANCH,
    code=r"<.*<|>.*>",
    why="A chained comparison is two comparisons with an `and` between them.",
    advice="Use (low < t) & (t < high).",
    when=of_branches.CHAINED,
)
def _chained() -> Repro:
    def broken(x: Tensor) -> Tensor:
        inside = 0 < x.sum() < 3
        return x * inside

    def fixed(x: Tensor) -> Tensor:
        total = x.sum()
        return x * ((total > 0) & (total < 3))

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "filtered-by-value",
    "a comprehension that filters elements by value",
    pattern=BRANCH,
    code=r"\bfor\b.*\bif\b|\bfilter\(",
    why="The number of elements that pass is not known while tracing.",
    advice="Sum torch.where(condition, x, 0), which keeps the shape.",
    when=of_constructs.reduced(ast.ListComp, ast.GeneratorExp),
)
def _filtered() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return torch.stack([value for value in x if value > 0.2]).sum()

    def fixed(x: Tensor) -> Tensor:
        return torch.where(x > 0.2, x, 0).sum()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "loop-until-value",
    "`while` on the value of a tensor",
    pattern=BRANCH,
    code=r"\bwhile\b",
    why="The number of iterations depends on values.",
    advice="Use a fixed number of iterations with torch.where, or torch's while_loop operator.",
    when=of_branches.REPEATS_ELEMENTWISE,
)
def _loop() -> Repro:
    def broken(x: Tensor) -> Tensor:
        while x.norm() > 1:
            x = x * 0.5
        return x

    def fixed(x: Tensor) -> Tensor:
        for _ in range(8):
            x = torch.where(x.norm() > 1, x * 0.5, x)
        return x

    return Repro(broken, fixed, [(torch.full((4,), 8.0),)])


@theme.cause(
    "raise-on-value",
    "an error that is raised for a value",
    pattern=rf"{BRANCH}|{ITEM}",
    code=r"\bassert\b|\bif\b.*\braise\b",
    why="The check is a branch on a value, even if it is hardly ever taken.",
    advice="Use torch._assert_async while compiling, which checks on the device; or check outside, every few steps.",
    when=of_branches.RAISES_UNCAUGHT,
)
def _raise() -> Repro:
    def broken(x: Tensor) -> Tensor:
        if torch.isnan(x).any():
            raise ValueError("not a number")
        return x.cos()

    def fixed(x: Tensor) -> Tensor:
        torch._assert_async(~torch.isnan(x).any(), "not a number")
        return x.cos()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "warn-on-value",
    "a warning or a log message for a value",
    pattern=rf"{BRANCH}|{ITEM}",
    code=r"\bif\b.*(\bwarn(ing|ings)?\b|(?<!\.)\blog(ger|ging)?\.|\bprint\()",
    why="The check is a branch on a value, and Python writes the message.",
    advice="Leave the check out while compiling: `if not torch.compiler.is_compiling() and …`; or return the "
    "value that it checks.",
    when=of_branches.BODY_WRITES,
)
def _warn() -> Repro:
    def broken(x: Tensor) -> Tensor:
        if x.abs().max() > 10:
            warnings.warn("large", stacklevel=2)
        return x.cos()

    def fixed(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x.abs().max() > 10:
            warnings.warn("large", stacklevel=2)
        return x.cos()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "branch-on-item",
    "`if` on .item(), float() or bool() of a tensor",
    pattern=ITEM,
    code=r"\b(if|elif|while)\b(?!.*\bin\b).*(\.item\(\)|\b(float|int|bool)\([^()]*\))",
    why="The branch reads the value. Without .item() the graph still breaks, at the branch on the tensor.",
    advice="Remove .item(), compute both sides and choose with torch.where.",
    when=of_branches.ELEMENTWISE_SIDES,
)
def _branch_on_item() -> Repro:
    def broken(x: Tensor) -> Tensor:
        if x.max().item() > 0.5:
            x = x * 0.5
        return x.cos()

    def fixed(x: Tensor) -> Tensor:
        x = torch.where(x.max() > 0.5, x * 0.5, x)
        return x.cos()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "compared-as-whole",
    "torch.equal() or torch.allclose() in a condition",
    pattern=ITEM,
    code=r"\b(equal|allclose)\(",
    why="Both return a Python bool, which needs the values.",
    advice="Use (a == b).all() or torch.isclose(a, b).all(), and keep the result a tensor.",
    when=of_branches.NOT_A_TEST,
)
def _equal() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * torch.equal(x, x.clone())

    def fixed(x: Tensor) -> Tensor:
        return x * (x == x.clone()).all()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "item",
    ".item() or float() of a tensor",
    pattern=ITEM,
    code=r"\.item\(|\bfloat\(|\bint\(",
    why="Python needs the value, so the graph ends. On a GPU, Python also waits for all queued work.",
    advice="Keep a zero-dimensional tensor, detached: .item() cuts the gradient here as well.",
    when=of_values.read_as(UsedAs.ARITHMETIC, text=of_values.ARITHMETIC.text),
)
def _item() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x / x.abs().max().item()

    def fixed(x: Tensor) -> Tensor:
        return x / x.abs().max().detach()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "item-captured",
    ".item() where a Python number is needed",
    pattern=ITEM,
    code=r"\.item\(|\bfloat\(|\bint\(|\.tolist\(",
    settings={"capture_scalar_outputs": True},
    why="Some programs need the number. Dynamo can carry it as a symbol.",
    advice="Set torch._dynamo.config.capture_scalar_outputs = True.",
    when=of_values.read_as(
        UsedAs.ARITHMETIC,
        UsedAs.SIZE,
        text="the number goes into arithmetic with tensors or is a size, and nothing else",
    ),
)
def _item_captured() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * (x.sum().item() + 1.0)

    return Repro(broken, broken, [_VECTOR])


@theme.cause(
    "item-in-text",
    "a value that is formatted into a string",
    pattern=ITEM,
    code=r"f[\"'].*\.item\(|format\(",
    why="The text needs the number.",
    advice="Return the value, and format it outside.",
    when=of_constructs.TEXT_IS_SHOWN,
)
def _text() -> Repro:
    def broken(x: Tensor) -> tuple[Tensor, str]:
        return x.cos(), f"{x.sum().item():.1f}"

    def fixed(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.cos(), x.sum()

    return Repro(lambda x: broken(x)[0], lambda x: fixed(x)[0], [_VECTOR])


@theme.cause(
    "text-of-tensor",
    "str() or repr() of a tensor",
    pattern=r"Failed to trace builtin operator|repr\(\) on tensor",
    code=r"\b(str|repr)\(",
    why="The text of a tensor contains its values.",
    advice="Keep text out of the model.",
    when=of_values.never(UsedAs.BRANCH, UsedAs.INDEX, UsedAs.KEPT, of=("str", "repr")),
)
def _str() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * (len(str(x)) > 0)

    def fixed(x: Tensor) -> Tensor:
        return x * True

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "key-from-value",
    "a dict that is indexed by a tensor's value",
    pattern=ITEM,
    code=r"\[(float|int)\([^\]]*\]|\.(get|setdefault|pop)\((float|int)\([^)]*\)|\w\[[^\]]*\.item\(\)\]",
    why="Python needs the value to find the entry.",
    advice="Put the entries into one tensor and index that.",
    when=of_constructs.DICT_OF_NUMBERS,
    others=(Advice("Count with index_add_ on a tensor of counts.", of_constructs.COUNTS_ENTRIES),),
)
def _key() -> Repro:
    scales = {0: 1.0, 1: 2.0}
    table = torch.tensor([1.0, 2.0])

    def broken(x: Tensor, index: Tensor) -> Tensor:
        return x * scales[int(index)]

    def fixed(x: Tensor, index: Tensor) -> Tensor:
        return x * table[index]

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor(1))])


@theme.cause(
    "list-indexed-by-tensor",
    "a Python list that is indexed by a tensor",
    pattern=rf"{ITEM}|Indexing list",
    code=r"\]\[|\w\[\w+\]",
    why="Python needs the index as a number.",
    advice="Stack the entries and use index_select or take_along_dim.",
    when=of_constructs.LIST_OF_TENSORS,
)
def _list() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return [x.sin(), x.cos(), x, -x][x.argmax()]

    def fixed(x: Tensor) -> Tensor:
        return torch.stack([x.sin(), x.cos(), x, -x]).index_select(0, x.argmax().view(1))[0]

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "match-on-value",
    "`match` on a tensor's value",
    pattern=ITEM,
    code=r"\bmatch\b",
    why="A match statement is a sequence of branches.",
    advice="Use torch.where, or a table that the value indexes.",
    when=of_constructs.CASES_ARE_VALUES,
)
def _match() -> Repro:
    def broken(x: Tensor) -> Tensor:
        match int(x.argmax()):
            case 3:
                return x + 1
            case _:
                return x - 1

    def fixed(x: Tensor) -> Tensor:
        return torch.where(x.argmax() == 3, x + 1, x - 1)

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "range-of-tensor",
    "range() of a tensor",
    pattern=rf"Failed to trace builtin operator|{ITEM}",
    code=r"\brange\(",
    why="The number of iterations is a value.",
    advice="Pass the count as a Python int.",
    when=of_constructs.PASSED_COUNT,
)
def _range() -> Repro:
    def broken(x: Tensor, rounds: Tensor) -> Tensor:
        for _ in range(rounds):
            x = x.sin()
        return x

    def fixed(x: Tensor, rounds: int) -> Tensor:
        for _ in range(rounds):
            x = x.sin()
        return x

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor(2))], [(*_VECTOR, 2)])


@theme.cause(
    "math-of-tensor",
    "math.sqrt(), math.isnan() … of a tensor",
    pattern=ITEM,
    code=r"\bmath\.\w+\(",
    why="Functions of the math module take Python numbers.",
    advice="Use the function of the same name in torch.",
    when=of_values.only(
        UsedAs.ARITHMETIC,
        of=("sqrt", "exp", "log", "sin", "cos", "tan", "tanh", "floor", "ceil", "erf", "isnan", "isinf"),
    ),
)
def _math() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * math.sqrt(x.sum())

    def fixed(x: Tensor) -> Tensor:
        return x * x.sum().sqrt()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "sorted-by-value",
    "sorted(), min() or max() over tensors by value",
    pattern=r"Failed to trace builtin operator|invalid call to builtin|sort with non-constant",
    code=r"\b(sorted|min|max)\(",
    why="Each comparison is a branch on a value.",
    advice="Stack the tensors and sort them, or use argmin with index_select.",
    when=of_constructs.PICKED_FROM_LIST,
)
def _sorted() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return sorted([x[:2], x[2:]], key=lambda part: part.sum())[0] * 1.0

    def fixed(x: Tensor) -> Tensor:
        parts = torch.stack([x[:2], x[2:]])
        return parts.index_select(0, parts.sum(1).argmin().view(1))[0]

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "list-of-values",
    ".tolist() of floats",
    pattern=r"tolist|Data dependent operator",
    code=r"\.tolist\(",
    why="Python needs all values.",
    advice="Reduce the tensor itself, such as x.max() for max(x.tolist()).",
    when=of_values.only(UsedAs.REDUCED, of=("tolist",)),
)
def _tolist() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * max(x.tolist())

    def fixed(x: Tensor) -> Tensor:
        return x * x.max()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "sizes-from-tensor",
    "split sizes from a tensor",
    pattern=r"tolist|Data dependent operator|Tensor\.item\(\)",
    code=r"\.tolist\(|\b(arange|zeros|ones|full|empty|linspace|rand|randn)\(.*\.item\(\)",
    why="Sizes determine shapes, and the generated code depends on shapes.",
    advice="Pass the sizes as Python ints.",
    when=of_calls.of_argument("tolist", "item") & of_values.only(UsedAs.SIZE, of=("tolist", "item")),
)
def _sizes() -> Repro:
    def broken(x: Tensor, sizes: Tensor) -> Tensor:
        return torch.cat([part.relu() for part in x.split(sizes.tolist())])

    def fixed(x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return torch.cat([part.relu() for part in x.split(sizes)])

    return Repro(broken, fixed, [(*_VECTOR, torch.tensor([1, 3]))], [(*_VECTOR, (1, 3))])


@theme.cause(
    "tensor-from-values",
    "torch.tensor() of a list of items",
    pattern=ITEM,
    code=r"torch\.tensor\(\[",
    why="The values go to Python one by one, and then back.",
    advice="Use torch.stack on the tensors.",
    when=of_constructs.ALL_ITEMS,
)
def _from_values() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return torch.tensor([x.min().item(), x.max().item()])

    def fixed(x: Tensor) -> Tensor:
        return torch.stack([x.min(), x.max()])

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "numpy-value",
    "float() of a NumPy result",
    pattern=ITEM,
    code=r"\bfloat\(|np\.",
    why="Dynamo traces NumPy as torch operations; the float() at the end still needs the value.",
    advice="Stay with tensors: torch.linalg.norm.",
    when=of_values.only(
        UsedAs.ARITHMETIC, of=("norm", "mean", "sum", "max", "min", "abs", "sqrt", "exp", "std", "var")
    ),
)
def _numpy() -> Repro:
    def broken(x: Tensor) -> Tensor:
        return x * float(np.linalg.norm(x.numpy()))

    def fixed(x: Tensor) -> Tensor:
        return x * torch.linalg.vector_norm(x)

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "clip-and-check",
    "clip_grad_norm_(error_if_nonfinite=True)",
    pattern=rf"{BRANCH}|returned non-Tensor|graph break in",
    code=r"clip_grad_norm_\(",
    equal=False,
    why="It has to read the norm to raise an error.",
    advice="Leave error_if_nonfinite off, and check the norm that it returns outside the model.",
    when=of_calls.has_keyword("clip_grad_norm_", "error_if_nonfinite"),
)
def _clip() -> Repro:
    layer = nn.Linear(4, 4)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)

    def broken(x: Tensor) -> Tensor:
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0, error_if_nonfinite=True)
        return x.cos()

    def fixed(x: Tensor) -> Tensor:
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        return x.cos()

    return Repro(broken, fixed, [_VECTOR])


@theme.cause(
    "layer-dropped",
    "layers skipped at random",
    pattern=BRANCH,
    code=r"\btorch\.rand\(",
    equal=False,
    why="LayerDrop draws a number and branches on it. It does so only in training, so a survey of inference does not "
    "show it.",
    advice="Multiply the layer's contribution by a drawn mask (stochastic depth) instead of skipping the layer.",
    when=of_branches.RESIDUAL,
)
def _layerdrop() -> Repro:
    def broken(x: Tensor) -> Tensor:
        if torch.rand([]) < 0.5:
            x = x + x.sin()
        return x

    def fixed(x: Tensor) -> Tensor:
        return x + (torch.rand([]) < 0.5) * x.sin()

    return Repro(broken, fixed, [_VECTOR] * 4)


@theme.cause(
    "experts-looped",
    "a loop over experts that each get only their rows",
    pattern=r"Dynamic shape operator",
    code=r"nonzero\(",
    why="The number of rows of an expert depends on values. Dynamo cannot resume inside the loop, so it skips the "
    "whole frame.",
    advice="With few experts, compute all of them and weight them by the routing. With many, use torch's "
    "grouped matrix multiplication.",
    when=of_places.IN_LOOP,
)
def _experts() -> Repro:
    class Experts(nn.Module):
        def __init__(self, dense: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.dense = dense
            self.gate = nn.Linear(8, 3)
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.gate(x).argmax(-1)
            if self.dense:
                every = torch.stack([expert(x) for expert in self.experts], 1)
                return (F.one_hot(chosen, 3).unsqueeze(-1) * every).sum(1)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero().squeeze(-1)
                if rows.numel() > 0:
                    out[rows] = expert(x[rows])
            return out

    torch.manual_seed(1)
    return Repro(Experts(dense=False), Experts(dense=True), [(torch.randn(16, 8),)])
