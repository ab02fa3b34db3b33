"""Models by their dimensions alone, for random weights."""

from __future__ import annotations

from typing import Final, Literal

Shape = Literal["8b"]
SHAPES: Final[dict[Shape, dict[str, object]]] = {
    "8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2,
    },
}  # fmt: skip
"""8b: that of Llama 3.1 8B."""
