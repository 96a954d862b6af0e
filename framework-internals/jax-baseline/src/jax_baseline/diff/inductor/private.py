"""All uses of private parts of Inductor in this package.

- ``torch._inductor.codecache.PyCodeCache.write(source_code, extra)`` receives every generated module.
- ``torch._inductor.config.post_grad_custom_post_pass`` receives the graph before Inductor schedules it.
- ``torch._inductor.config.trace.provenance_tracking_level = 1`` adds a comment above each launch:
  ``# [Provenance debug handles] kernel:7``.
- ``torch._dynamo.config.allow_rnn`` lets Dynamo trace recurrent layers.
- ``torch._inductor.debug._inductor_triton_kernel_to_post_grad_node_info`` maps ``kernel:7`` to nodes of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def observe_inductor(
    on_graph: Callable[[torch.fx.Graph], None], rewrite: Callable[[str, Mapping[str, list[str]]], str]
) -> Iterator[None]:
    """Disable Inductor's caches, and pass every graph and every generated module to the caller.

    ``rewrite`` receives the source of a generated module and, by launch, the names of graph nodes, and returns the
    source to load.

    Raises:
        RuntimeError: If this version of torch has moved a private part.
    """
    config, functorch_config, cache, provenance = _parts()
    write = cache.write.__func__

    def rewriting_write(cls: Any, source_code: str, extra: str = "") -> Any:
        if "def call(" in source_code and "async_compile" in source_code:
            source_code = rewrite(source_code, {name: list(nodes) for name, nodes in provenance().items()})
        return write(cls, source_code, extra)

    settings = {
        "post_grad_custom_post_pass": on_graph,
        "trace.provenance_tracking_level": 1,
        "fx_graph_cache": False,
        "autotune_local_cache": True,
        # A CUDA graph replays recorded launches, which the hooks cannot observe.
        "triton.cudagraphs": False,
    }
    hooked = patch.object(cache, "write", classmethod(rewriting_write))
    with hooked, config.patch(settings), functorch_config.patch(enable_autograd_cache=False), _rnn_compiled():
        yield


def _rnn_compiled() -> AbstractContextManager[object]:
    """Let Dynamo trace ``torch.nn.GRU`` and its kin, which it leaves to eager mode by default."""
    from torch._dynamo import config

    patched: AbstractContextManager[object] = config.patch(allow_rnn=True)
    return patched


def _parts() -> tuple[Any, Any, Any, Callable[[], Mapping[str, list[str]]]]:
    try:
        import torch._inductor.config as config
        from torch._functorch import config as functorch_config
        from torch._inductor import debug
        from torch._inductor.codecache import PyCodeCache

        missing = [
            name
            for owner, name in (
                (config, "post_grad_custom_post_pass"),
                (config.trace, "provenance_tracking_level"),
                (PyCodeCache, "write"),
                (debug, "_inductor_triton_kernel_to_post_grad_node_info"),
            )
            if not hasattr(owner, name)
        ]
    except ImportError as error:
        raise RuntimeError(_moved(f"private part ({error})")) from error
    if missing:
        raise RuntimeError(_moved(", ".join(missing)))
    return config, functorch_config, PyCodeCache, lambda: debug._inductor_triton_kernel_to_post_grad_node_info


def _moved(missing: str) -> str:
    return (
        f"jax_baseline.diff.inductor.private found no {missing} in torch {torch.__version__}; "
        "install torch 2.11 or 2.13, which are tested"
    )
