"""GPT-2 of transformers, tiny, beside a port to JAX written by hand."""

import re
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

HEADS, WIDTH, LENGTH, VOCABULARY = 4, 16, 6, 50


def on_torch(model):
    def loss(model, tokens, targets):
        logits = model(input_ids=tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return model.eval(), loss


def gpt2_torch():
    torch.manual_seed(0)
    return on_torch(
        GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=WIDTH, n_layer=2, n_head=HEADS))
    )


def names():
    return {}


def inputs():
    generator = np.random.default_rng(0)
    return [tuple(generator.integers(0, VOCABULARY, (2, LENGTH)) for _ in range(2)) for _ in range(2)]


def tree_of(model, names=MappingProxyType({})):
    """Zeros of the shapes of a torch model, under the paths of a map."""
    tree = {}
    for name, parameter in model.named_parameters():
        hits = [m.expand(to) for pattern, to in names.items() if (m := re.fullmatch(pattern, name))]
        path = hits[0] if hits else name.replace(".", "/")
        shape = tuple(parameter.shape)[::-1] if path.endswith(".T") else tuple(parameter.shape)
        *folders, last = path.removesuffix(".T").split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = jnp.zeros(shape)
    return tree


def attention(q, k, v):
    """Causal attention of (batch, position, head, size)."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    seen = np.tril(np.ones((q.shape[1], q.shape[1]), bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), -1)
    return jnp.einsum("bhts,bshd->bthd", weights, v).reshape(*q.shape[:2], -1)


def cross_entropy(logits, targets):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def gpt2_jax(eps=1e-5, tanh=True):
    def norm(x, p):
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + eps) * p["weight"] + p["bias"]

    def linear(x, p):
        return x @ p["weight"] + p["bias"]

    def loss(params, tokens, targets):
        model = params["transformer"]
        x = model["wte"]["weight"][tokens] + model["wpe"]["weight"][: tokens.shape[1]]
        for _, block in sorted(model["h"].items()):
            qkv = linear(norm(x, block["ln_1"]), block["attn"]["c_attn"]).reshape(*tokens.shape, 3, HEADS, -1)
            x = x + linear(attention(*(qkv[:, :, part] for part in range(3))), block["attn"]["c_proj"])
            hidden = jax.nn.gelu(linear(norm(x, block["ln_2"]), block["mlp"]["c_fc"]), approximate=tanh)
            x = x + linear(hidden, block["mlp"]["c_proj"])
        return cross_entropy(norm(x, model["ln_f"]) @ model["wte"]["weight"].T, targets)

    return tree_of(gpt2_torch()[0]), loss


def gpt2_exact_gelu_jax():
    return gpt2_jax(tanh=False)
