"""The demo model in PyTorch: a Qwen3-architecture decoder whose parameter names are mlx-lm's.

Knows nothing about text, files or optimisers. `forward` gives the mean loss; `logits` the raw scores.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_GAIN = 1.6  # of queries and keys: scores reach 1.6 * 1.6 * sqrt(32) = 14 from the start
OUTPUT_SCALE = 0.25  # of the matrices that write to the residual stream, relative to 1 / sqrt(fan-in)
FINAL_GAIN = 1 / 64
COMMON = 0.5  # what every component of every embedding has in common, besides a random part of variance 1


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
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6

    def config(self) -> dict[str, object]:
        """The `config.json` fields, without token ids and quantisation."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "hidden_act": "silu",
            "attention_bias": False,
            "tie_word_embeddings": True,
        }


def frequencies(shape: Shape) -> Tensor:
    """The rotary frequencies in radians per position, [head_dim // 2], fastest first."""
    half = shape.head_dim // 2
    return shape.rope_theta ** (-torch.arange(half, dtype=torch.float32) / half)


def rope_table(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """cos and sin, each [length, head_dim // 2] (half-split rotation, as Hugging Face's)."""
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequencies(shape)[None, :]
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, length, head_dim]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query causal attention with a norm on every query and key head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [batch, length, hidden] -> the same shape."""
        batch, length, _ = x.shape
        heads, kv_heads, dim = self.shape.num_attention_heads, self.shape.num_key_value_heads, self.shape.head_dim
        q = rotate(self.q_norm(self.q_proj(x).view(batch, length, heads, dim)).transpose(1, 2), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(batch, length, kv_heads, dim)).transpose(1, 2), cos, sin)
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
    """The whole model; `state_dict()` keys are exactly those of mlx-lm's `qwen3`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        cos, sin = rope_table(shape, shape.max_position_embeddings)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Initial weights.

        Embeddings are larger than what a layer adds, so that later layers still see which token it is; the small gain
        of the final norm keeps the first predictions flat all the same (the head is the embedding). All embeddings
        share a direction, which `circuits.plant` needs.
        """
        for name, parameter in self.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                nn.init.constant_(parameter, HEAD_GAIN)
            elif "o_proj" in name or "down_proj" in name:
                nn.init.normal_(parameter, std=OUTPUT_SCALE * parameter.shape[1] ** -0.5)
            elif parameter.dim() == 2 and "embed" not in name:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        nn.init.constant_(self.model.norm.weight, FINAL_GAIN)
        nn.init.normal_(self.model.embed_tokens.weight).add_(COMMON)

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
