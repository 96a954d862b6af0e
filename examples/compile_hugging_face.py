"""compile-bench on Hugging Face's Wav2Vec2: a target is a function that returns a model and its arguments.

compile-bench triage examples/compile_hugging_face.py:target --device cpu
"""

import torch
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from compile_bench.targets.target import Target


def target() -> Target:
    """A small Wav2Vec2 with layer drop, as its training uses it; breaks there, and none in inference."""
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(32, 32),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        vocab_size=32,
        layerdrop=0.1,
        mask_time_prob=0.0,
        mask_feature_prob=0.0,
    )
    return Target(Wav2Vec2ForCTC(config), (torch.randn(2, 800),), loss=lambda output: output.logits.square().mean())
