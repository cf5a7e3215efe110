"""Gives a fresh network the two-layer circuit for copying (an induction head; Olsson et al., 2022) to start with.

Within the text and the time that this model gets, the circuit does not form by itself; training refines it. Layer 0
looks a fixed number of tokens back and notes which token stands there; layer 1 looks for the place whose note is the
current token and makes what stands there more likely. Knows nothing about training.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .network import Attention, Network, frequencies

GAIN = 2.0  # of the queries and keys in both layers
# Of a look back, over the fastest rotary frequencies. Chosen by random search so that with this gain, of 1,000 tokens,
# the one looked for gets 86 % of the attention.
ENERGY = (0.23, 0.20, 0.19, 0.22, 0.16)
DISTANCES = ((1, 2), (1, 3))  # looked back by the query heads of each of the first key heads of layer 0
CONSTANT = 1.0  # weight of the constant part of those queries and keys, against random weights of norm 1 per row
SLOW = 0.0025  # radians per position: below this a rotary frequency can compare tokens at any distance
NOTE = 3.0  # strength with which layer 0 writes the earlier token
COPY = 2.0  # strength with which layer 1 writes the found token
COPIERS = 2  # key heads of layer 1 that copy, each a part of the embedding
QUIET = 0.1  # what is left of the random weights in the queries and keys of the copiers


@torch.no_grad()
def plant(network: Network) -> None:
    """Change the initial weights of layers 0 and 1 in place."""
    shape = network.shape
    dim, group = shape.head_dim, shape.num_attention_heads // shape.num_key_value_heads
    first, second = (network.model.layers[i].self_attn for i in (0, 1))
    assert isinstance(first, Attention)
    assert isinstance(second, Attention)
    common = network.model.embed_tokens.weight.mean(0)
    # Orthonormal directions: the common one, `dim` for the note's content, `dim` for its place, `dim` for each copier.
    width = 1 + dim * (2 + COPIERS)
    start = torch.cat((common[:, None], torch.randn(shape.hidden_size, width - 1)), dim=1)
    basis = torch.linalg.qr(start)[0]
    identity, note, *copied = basis[:, 1:].split(dim, dim=1)

    for norm in (first.q_norm, first.k_norm, second.q_norm, second.k_norm):
        norm.weight.fill_(GAIN)
    for pair, distances in enumerate(DISTANCES):
        look_back(first.k_proj.weight, pair, 0, basis[:, 0], frequencies(shape))
        for i, distance in enumerate(distances):
            look_back(first.q_proj.weight, pair * group + i, distance, basis[:, 0], frequencies(shape))
    first.v_proj.weight[:dim] = identity.T
    first.o_proj.weight[:, :dim] = NOTE * note

    slow = (frequencies(shape) < SLOW).repeat(2)  # which dimensions of a head turn slowly
    for pair in range(COPIERS):
        keys, head = slice(pair * dim, (pair + 1) * dim), slice(pair * group * dim, (pair * group + 1) * dim)
        second.k_proj.weight[keys] *= QUIET
        second.q_proj.weight[head] *= QUIET
        second.k_proj.weight[keys][slow] += note.T[slow]
        second.q_proj.weight[head][slow] += identity.T[slow]
        second.v_proj.weight[keys] = copied[pair].T
        second.o_proj.weight[:, head] = COPY * copied[pair]


def look_back(weight: Tensor, head: int, distance: int, common: Tensor, frequency: Tensor) -> None:
    """Give the queries of a head (with distance 0: the keys) a constant part, turned back by the distance.

    It comes from what all embeddings have in common and lies on the fastest rotary frequencies.
    """
    half = len(frequency)
    energy = torch.zeros(half)
    energy[: len(ENERGY)] = torch.tensor(ENERGY)
    amplitude = CONSTANT * (energy * half).sqrt()
    angle = -frequency * distance
    constant = torch.cat((amplitude * angle.cos(), amplitude * angle.sin()))
    rows = weight[2 * half * head : 2 * half * (head + 1)]
    rows *= QUIET
    rows += torch.outer(constant, common)
