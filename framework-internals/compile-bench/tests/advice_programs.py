"""For each cause of the catalogue a program with the same break or guard, in which its advice would do harm or nothing.

The line that breaks ends in ``#!``. A body without ``def`` or ``class`` is that of ``def f(self, x, n, flag)``.
"""

BRANCH = "Data-dependent branching"
SKIPPED = "Attempted to call function marked as skipped"
ITEM = "Unsupported Tensor.item() call with capture_scalar_outputs=False"
SHAPE = "Dynamic shape operator"
BUILTIN = "Failed to trace builtin operator"
CONTEXT = "Unsupported context manager"
METHOD = "Unsupported method call"

# Cause: (PyTorch's reason, program).
BREAKS = {
    "break-in-loop": (BUILTIN, "print(x)  #!"),
    "break-in-try": (BUILTIN, "for _ in range(3):\n    print(x)  #!"),
    "break-in-with": (BUILTIN, "try:\n    print(x)  #!\nfinally:\n    pass"),
    "code-executed": (BUILTIN, "exec(self.source)  #!"),
    "class-defined": (
        "Invalid call to __build_class__",
        "k = n + 1\nclass Pair:  #!\n    first = k\nreturn x * Pair.first",
    ),
    "dataclass-made": (METHOD, 'point = make_dataclass("point", n)  #!'),
    "globals-read": (BUILTIN, "return x * globals()[n]  #!"),
    "cache-made": (METHOD, "return functools.lru_cache(None)(lambda k: k * n)(2)  #!"),
    "weak-dictionary": (METHOD, "self.kept[n] = x  #!\nreturn self.kept[0] + x"),
    "module-copied": ("Attempted to copy.deepcopy a tensor", "h = x * 2\nreturn copy.deepcopy(h)  #!"),
    "signature-read": ("Observed exception", "return len(inspect.signature(n).parameters) * x  #!"),
    "graph-break-call": ("Call to `torch._dynamo.graph_break()`", "done = torch._dynamo.graph_break() or n  #!"),
    # A forward hook that stores values: without the decorator, .item() breaks instead.
    "disabled-function": (
        "Skip calling `torch.compiler.disable()`d function",
        "@torch.compiler.disable\ndef store(v):\n    seen.append(v.norm().item())\n\n\ndef f(x):\n    store(x)  #!\n",
    ),
    "foreign-call": ("Unsupported ndarray method call", "self.view = memoryview(x.numpy())  #!"),
    "json": (METHOD, "return x * json.loads(n)  #!"),
    "pickle": (SKIPPED, "return len(pickle.dumps(x * 2))  #!"),
    "hash-computed": (SKIPPED, "return self.table[zlib.crc32(n)] * x  #!"),
    "date": (METHOD, "return x * (datetime.datetime.now() > n)  #!"),
    "decimal": ("Unsupported function call", "return x * float(decimal.Decimal(n))  #!"),
    "context-variable": (METHOD, "gain.set(n)\nreturn x * gain.get()  #!"),
    "lock": (CONTEXT, "def g():\n    with lock:\n        count()\n\n\ndef f(x):\n    with lock:  #!\n        g()\n"),
    "thread": (SKIPPED, "q = queue.Queue()  #!\nq.put(x)\nreturn q.get()"),
    "python-random": (SKIPPED, "if random.random() < 0.5:  #!\n    x = self.layer(x)\nreturn x"),
    "python-seed": (SKIPPED, "for layer in self.layers:\n    random.seed(0)  #!\n    x = layer(x)"),
    "numpy-random": ("Data dependent operator", "for _ in range(int(np.random.randint(3))):  #!\n    x = x.sin()"),
    "numpy-generator": (METHOD, "return self.layers[np.random.default_rng(0).integers(3)](x)  #!"),
    "torch-seed": (SKIPPED, "torch.manual_seed(n)  #!"),
    "random-state": (SKIPPED, "torch.set_rng_state(n)  #!"),
    "generator": (
        "Failed to convert args/kwargs to proxy",
        "h = x[:2]\nreturn randn(h.shape, generator=Generator())  #!",
    ),
    "print": (BUILTIN, "print(self.queue.pop())  #!"),
    "logging": ("logging.Logger method not supported for non-export cases", "self.log.info(next(self.names))  #!"),
    "warning": (SKIPPED, "self.warned = warnings.warn('once') or True  #!"),
    "write": (METHOD, "count = sys.stdout.write(n)  #!"),
    "clock": (SKIPPED, "while time.time() < n:  #!\n    x = x.sin()"),
    "sleep": (SKIPPED, "slept = self.sleep(n)  #!"),
    "file": (BUILTIN, "with open(n) as stream:  #!\n    x = x * len(stream.read())"),
    "save": (SKIPPED, "for layer in self.layers:\n    x = layer(x)\n    torch.save(x, self.file)  #!"),
    "path": (SKIPPED, "return x if os.path.exists(n) else -x  #!"),
    "environment-written": (SKIPPED, "os.environ['SIZE'] = str(n)  #!"),
    "upkeep": (SKIPPED, "freed = gc.collect()  #!"),
    "stack-inspected": (SKIPPED, "if 'train' in sys._getframe(1).f_code.co_name:  #!\n    x = x.sin()"),
    "stream-redirected": (METHOD, "with contextlib.redirect_stdout(io.StringIO()) as text:  #!\n    x = x.sin()"),
    "temporary-file": (SKIPPED, "return subprocess.run(n)  #!"),
    "function-attribute": ("setattr() on unsupported type", "wrapper.last = x  #!"),
    "backward": ("Unsupported Tensor.backward() call", "x.sum().backward()  #!\nreturn torch.autograd.grad(x, n)"),
    "autograd-grad": (
        "using `torch.autograd.grad` with `torch._dynamo.config.trace_autograd_ops=False`",
        "return torch.autograd.grad(x.sum(), self.parameters())  #!",
    ),
    "requires-grad-set": ("setattr() on Tensor.requires_grad", "h = self.layer(x * 2)\nh.requires_grad = True  #!"),
    "parameter-made-inside": (
        "Attempted to use `torch.nn.Parameter()` constructor with Dynamo",
        "return x * nn.Parameter(x.mean(0))  #!",
    ),
    "function-with-side-effect": (BUILTIN, "class Net(nn.Module):\n    def forward(self, x):\n        print(x)  #!\n"),
    "saved-tensor-hooks": (CONTEXT, "with saved_tensors_hooks(a, b):  #!\n    x = x.sin()\nreturn self.layer(x)"),
    "anomaly-detection": (SKIPPED, "with torch.autograd.detect_anomaly(n):  #!\n    x = x.sin()"),
    "gradient-scaler": (SKIPPED, "self.scaler.scale(x.sum()).backward()  #!"),
    "data-replaced": ("Failed to mutate tensor data attribute", "self.weight.data = x.t()  #!"),
    "rnn-allowed": ("Attempted to wrap RNN, GRU, or LSTM", "return self.lstm(pack_padded_sequence(x, n))  #!"),
    "packed-sequence": (SKIPPED, "packed = pack_padded_sequence(x, n)  #!\nreturn self.lstm(packed)"),
    "sparse": ("Attempted to wrap sparse Tensor", "h = x @ self.w\nreturn h.to_sparse()  #!"),
    "resized": ("Unsupported Tensor.resize_() call", "x.resize_(2)  #!"),
    "memory-address": (METHOD, "return x if x.data_ptr() % 16 == 0 else x.clone()  #!"),
    "memory-kind": ("torch.* op returned non-Tensor", "h = x * 2\nreturn h.is_pinned()  #!"),
    "shallow-copy": ("torch.* op returned non-Tensor", "y = copy.copy(x)  #!\ny.zero_()\nreturn x + y"),
    "tensor-subclass": (
        "Argument of `as_subclass` must be a non-dispatcher-style tensor subclass",
        "return x.as_subclass(library.Named)  #!",
    ),
    "exchanged-memory": (SKIPPED, "h = x * 2\nreturn from_dlpack(h)  #!"),
    "script-traced": (
        "Skip calling `torch.compiler.disable()`d function",
        "torch.jit.trace(self.layer, x).save('layer.pt')  #!",
    ),
    "threads-asked": ("torch.* op returned non-Tensor", "return torch.get_device(x).is_available(n)  #!"),
    "threads-set": (SKIPPED, "torch.set_num_threads(n)  #!"),
    "hook-with-side-effect": (BUILTIN, "layer.register_forward_hook(lambda m, a, o: print(o) or o * 2)  #!"),
    "boolean-mask": (SHAPE, "return x[x > 0]  #!"),
    "dynamic-shape-captured": (SHAPE, "counts = torch.bincount(x)  #!\nreturn x.split(counts.tolist())"),
    "nonzero": (SHAPE, "return x[torch.nonzero(x > 0)]  #!"),
    "masked-select": (SHAPE, "return x.masked_select(x > 0)  #!"),
    "unique": (SHAPE, "return self.table[torch.unique(x)]  #!"),
    "unique-consecutive": (SHAPE, "return torch.unique_consecutive(x)  #!"),
    "repeat-interleave": (SHAPE, "return x.repeat_interleave(n, output_size=n.sum())  #!"),
    "one-hot": (SHAPE, "return F.one_hot(x, n)  #!"),
    "bincount": (SHAPE, "return torch.bincount(x)  #!"),
    # A cache with a position and a length that are both values: no change is known.
    "slice-by-value": (ITEM, "self.cache[:, n.item() : flag.item()] = x  #!"),
    "length-by-value": (ITEM, "return torch.arange(int(n))  #!"),
    "topk-by-value": (ITEM, "k = (x > 0).sum()\nreturn x.topk(int(k))  #!"),
    "branch-on-value": (BRANCH, "if x.sum() > 0:  #!\n    self.seen.append(x)\nreturn x"),
    "branch-on-value-cond": (BRANCH, "if x.sum() > 0:  #!\n    self.total = x @ x\nreturn x"),
    "choice-by-value": (BRANCH, "name = 'hot' if x.sum() > 0 else 'cold'  #!\nreturn self.heads[name](x)"),
    "and-of-values": (BRANCH, "return x * (flag and x.sum() > 0)  #!"),
    "any-of-values": (BRANCH, "if any(x > 0):  #!\n    self.count()"),
    "chained-comparison": (BRANCH, "if 0 < x.sum() < 3:  #!\n    self.count()"),
    "filtered-by-value": (BRANCH, "return torch.stack([v for v in x if v > 0])  #!"),
    "loop-until-value": (BRANCH, "while x.norm() > 1:  #!\n    self.steps.append(x)\n    x = x * 0.5"),
    "raise-on-value": (
        BRANCH,
        "try:\n    assert x.max() < 3  #!\nexcept AssertionError:\n    x = x / 3\nreturn x",
    ),
    "warn-on-value": (BRANCH, "if x.max() > 3: warnings.warn('large'); x = x / 3  #!\nreturn x"),
    "branch-on-item": (ITEM, "if x.max().item() > 3:  #!\n    self.large += 1"),
    "compared-as-whole": (ITEM, "if torch.equal(x, n):  #!\n    return None"),
    "item": (ITEM, "return f'{x.sum().item():.1f}'  #!"),
    "item-captured": (ITEM, "for _ in range(x.sum().item()):  #!\n    n = n + 1"),
    "item-in-text": (ITEM, "return self.heads[f'{x.item()}'](n)  #!"),
    "text-of-tensor": (BUILTIN, "if str(x) in self.known:  #!\n    return x"),
    "key-from-value": (ITEM, "return self.heads[int(x)](n)  #!"),
    "list-indexed-by-tensor": (ITEM, "return self.layers[x](n)  #!"),
    "match-on-value": (ITEM, "match int(x):  #!\n    case 3:\n        self.threes += 1"),
    "range-of-tensor": (BUILTIN, "rounds = x.sum()\nfor _ in range(rounds):  #!\n    n = n + 1"),
    "math-of-tensor": (ITEM, "if math.isnan(x.sum()):  #!\n    return None"),
    "sorted-by-value": (BUILTIN, "return sorted(self.scores.items(), key=score)  #!"),
    "list-of-values": ("Tensor.tolist() with non-integer tensor", "return x.split(n.tolist())  #!"),
    # The counts of a mixture of experts: nobody has them before the call.
    "sizes-from-tensor": (ITEM, "counts = x.sum(0)\nreturn n.split(counts.tolist())  #!"),
    "tensor-from-values": (ITEM, "return torch.tensor([x.item(), 1, n])  #!"),
    "numpy-value": (ITEM, "return float(np.percentile(x, 90)) * x  #!"),
    "clip-and-check": (BRANCH, "nn.utils.clip_grad_norm_(self.parameters(), 1.0)  #!"),
    "layer-dropped": (BRANCH, "if torch.rand([]) < 0.5:  #!\n    return None\nreturn self.layer(x)"),
    "experts-looped": (SHAPE, "return x[n.nonzero()]  #!"),
}

SIZE_0 = "tensor 'x' size mismatch at index 0. expected 32, actual 20"
SIZE_1 = "tensor 'x' size mismatch at index 1. expected 8, actual 16"

# Cause: (guard, program).
GUARDS = {
    "last-batch": (SIZE_0, "def f(x):  #!\n    for i in range(x.shape[0]):\n        g(x[i])\n"),
    "growing-sequence": (SIZE_1, "def f(x):  #!\n    return x.sin() + torch.cat([g(), h()])\n"),
    "sequence-length": (SIZE_1, "def f(x):  #!\n    if x.size(1) > 8:\n        x = x[:, :8]\n    return x\n"),
    "batch-of-one": ("tensor 'self.table' size mismatch at index 0. expected 1, actual 4", "return self.table * x  #!"),
    "shape-tested": ("(x.size()[0] % 8) == 0", "if x.shape[0] % 8:  #!\n    raise ValueError"),
    "dtype": ("tensor 'x' dtype mismatch. expected Long, actual Float", "def f(x):  #!\n    return self.table[x]\n"),
    "layout": ("tensor 'x' stride mismatch at index 0. expected 8, actual 1", "def f(x):  #!\n    x.add_(1)\n"),
    "rank": (
        "tensor 'x' rank mismatch. expected 1, actual 2",
        "def f(x):  #!\n    return x if x.dim() == 2 else x[None]\n",
    ),
    "requires-grad": (
        "tensor 'self.table' requires_grad mismatch. expected requires_grad=0",
        "return self.table * x  #!",
    ),
    "aliased": ('Duplicate tensors found: ["x", "n"]', "def f(x, n):  #!\n    x.add_(n)\n"),
    "parameter-or-tensor": (
        "expected type of 'self.w' to be a tensor type, ' but found <class 'torch.nn.parameter.Parameter'>",
        "return self.w * x  #!",
    ),
    "device": (
        "tensor 'self.w' dispatch key set mismatch. expected DispatchKeySet(CPU, BackendSelect), actual "
        "DispatchKeySet(CUDA, BackendSelect)",
        "return self.w * x  #!",
    ),
    "inference-mode": (
        "tensor 'x' dispatch key set mismatch. expected DispatchKeySet(CPU, BackendSelect), actual "
        "DispatchKeySet(CUDA, BackendSelect)",
        "def f(x):  #!\n    return x\n",
    ),
    "grad-mode": ("GLOBAL_STATE changed: grad_mode", "def f(x):  #!\n    with torch.no_grad():\n        g(x)\n"),
    "autocast": (
        "GLOBAL_STATE changed: autocast(cpu)_enabled",
        "def f(x):  #!\n    with torch.autocast('cpu'):\n        g(x)\n",
    ),
    "train-and-eval": ("self.training == True", "self.layer.eval()\nreturn x if self.training else -x  #!"),
    "deterministic-flag": (
        "GLOBAL_STATE changed: deterministic_algorithms",
        "def f(x):  #!\n    torch.use_deterministic_algorithms(True)\n",
    ),
    "torch-setting": ("GLOBAL_STATE changed: default_dtype", "def f(x):  #!\n    torch.set_default_dtype(x.dtype)\n"),
    "integer-argument": ("n == 3", "for _ in range(n):  #!\n    x = x.sin()"),
    "float-argument": ("n == 0.5", "return F.dropout(x, n)  #!"),
    "text-argument": ("n == 'sin'", "return self.heads[n](x)  #!"),
    "another-function": ("___check_obj_id(n.__code__, N), type=<class 'code'>", "return self.apply(n, x)  #!"),
    "filled-by-first-call": (
        "self.mask is None",
        "if self.mask is None:  #!\n    self.mask = make(x.shape[1])\nreturn x",
    ),
    "optional-argument": ("n is None", "if n is None:  #!\n    return x\nreturn self.cross(x, n)"),
    "configuration-object": ("n.depth == 3", "for _ in range(n.depth):  #!\n    x = x.sin()"),
    "global-changed": ("G['depth'] == 2", "return self.layers[depth](x)  #!"),
    "value-across-break": ("n == 3", "return x * n  #!"),
    "dictionary-keys": ("len(self.extra) != 1", "return sum(self.extra.values()) + x  #!"),
    "counter": (
        "self.calls == 1",
        "class M(nn.Module):\n    def forward(self, x):\n        self.calls += 1  #!\n        name = f'{self.calls}'\n",
    ),
    "annealed-attribute": (
        "self.depth == 3",
        "class M(nn.Module):\n    def f(self, x):\n        return g(x, range(self.depth))  #!\n",
    ),
    "static-shapes": (SIZE_0, "def f(x):  #!\n    return x\n"),
    "growing-list": ("len(n) == 1", "for layer in n:  #!\n    x = layer(x)"),
    "kept-activations": ("len(self.kept) == 1", "self.kept.append(x)  #!\nreturn x + self.kept[0]"),
}

SILENT = {
    "empty-first-call": "def f(self, x):  #!\n    return self.name\n",
    "other-method": "class M:\n    def g(self, x):  #!\n        pass\n\n    def forward(self, x):\n        self.g(x)\n",
    "recompile-limit-reached": "def f(self, x):\n    return self.layers[self.n](x)  #!\n",
}

# Causes whose own program does not show the line of the user's that advice depends on.
APPEAR = {
    "train-and-eval": ("self.training == True", "return x if self.training else -x  #!"),
    "empty-first-call": ("", "def f(self, x):  #!\n    return x if self.off else x.sin()\n"),
    "other-method": (
        "",
        "class M:\n    def g(self, x):  #!\n        return x.sin()\n\n    def forward(self, x):\n        return x\n",
    ),
    "recompile-limit-reached": ("self.n == 3", "class M:\n    def f(self, x):\n        return x * self.n  #!\n"),
}
