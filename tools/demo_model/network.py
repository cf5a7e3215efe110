"""The demo model in PyTorch: a Llama-architecture decoder whose parameter names are mlx-lm's.

Knows nothing about text, files or optimisers. `forward` gives the mean loss; `logits` the raw scores.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the network, as `config.json` names them."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5

    def config(self) -> dict[str, object]:
        """The `config.json` fields, without token ids and quantisation."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        }


def rope_table(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, head_dim // 2] (half-split rotation, as Hugging Face's Llama)."""
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency[None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query causal attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, length, hidden] -> the same shape."""
        batch, length, _ = x.shape
        heads, kv_heads, dim = self.shape.num_attention_heads, self.shape.num_key_value_heads, self.shape.head_dim
        q = rotate(self.q_proj(x).view(batch, length, heads, dim).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(batch, length, kv_heads, dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, length, kv_heads, dim).transpose(1, 2)
        # Repeated here, not by SDPA's enable_gqa: that option leaves the CPU's flash kernel for a slow one.
        k = k.repeat_interleave(heads // kv_heads, dim=1)
        v = v.repeat_interleave(heads // kv_heads, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, heads * dim))
        return out


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, hidden] -> the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, length, hidden] -> the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers, final norm; the head is the embedding (tied)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Network(nn.Module):
    """The whole model; `state_dict()` keys are exactly those of mlx-lm's `llama`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = rope_table(shape, shape.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset()

    def reset(self) -> None:
        """Initial weights: small embeddings, fan-in scaled matrices, zero output projections."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            if "embed" in name:
                nn.init.normal_(parameter, std=0.02)
            elif "o_proj" in name or "down_proj" in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def hidden(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length] -> final hidden states [batch, length, hidden]."""
        length = tokens.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, tokens: Tensor) -> Tensor:
        """tokens [batch, length] -> scores [batch, length, vocabulary]."""
        return F.linear(self.hidden(tokens), self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor, counted: Tensor | None = None) -> Tensor:
        """Mean next-token loss (nats) over tokens [batch, length + 1], or over the targets counted [batch, length]."""
        hidden, targets = self.hidden(tokens[:, :-1]), tokens[:, 1:]
        if counted is not None:
            hidden, targets = hidden[counted], targets[counted]
        scores = F.linear(hidden, self.model.embed_tokens.weight)
        return F.cross_entropy(scores.flatten(0, -2), targets.flatten())
