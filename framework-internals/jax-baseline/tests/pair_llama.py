"""Llama of transformers, tiny, beside a port to JAX written by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, WIDTH, LENGTH, VOCABULARY = 4, 16, 6, 50


def llama_torch():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=24, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()

    def loss(model, tokens, targets):
        logits = model(input_ids=tokens, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    return model, loss


def names():
    return {r"model\.layers\.(\d)\.(self_attn|mlp)\.(\w+)\.weight": r"model/layers/\1/\2/\3/kernel.T"}


def inputs():
    generator = np.random.default_rng(0)
    return [tuple(generator.integers(0, VOCABULARY, (2, LENGTH)) for _ in range(2)) for _ in range(2)]


def tree_of(model, names):
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


def llama_jax(base=10_000.0, eps=1e-6):
    def norm(x, p):
        return p["weight"] * x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + eps)

    def turned(x):
        half = x.shape[-1] // 2
        angles = np.arange(x.shape[1])[:, None] * base ** (-np.arange(half) / half)
        cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (np.cos, np.sin))
        first, second = x[..., :half], x[..., half:]
        return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1)

    def of_layer(x, p):
        q, k, v = (
            (x @ p[f"{name}_proj"]["kernel"]).reshape(*x.shape[:2], heads, -1)
            for name, heads in (("q", HEADS), ("k", 2), ("v", 2))
        )
        k, v = (jnp.repeat(one, HEADS // 2, 2) for one in (turned(k), v))
        return attention(turned(q), k, v) @ p["o_proj"]["kernel"]

    def loss(params, tokens, targets):
        model = params["model"]
        x = model["embed_tokens"]["weight"][tokens]
        for _, layer in sorted(model["layers"].items()):
            x = x + of_layer(norm(x, layer["input_layernorm"]), layer["self_attn"])
            h, p = norm(x, layer["post_attention_layernorm"]), layer["mlp"]
            gated = jax.nn.silu(h @ p["gate_proj"]["kernel"]) * (h @ p["up_proj"]["kernel"])
            x = x + gated @ p["down_proj"]["kernel"]
        return cross_entropy(norm(x, model["norm"]) @ params["lm_head"]["weight"].T, targets)

    return tree_of(llama_torch()[0], names()), loss


def llama_eps_jax():
    return llama_jax(eps=1e-5)
