"""Trains the demo model on the CPU within a wall-clock budget: Muon for the matrices, AdamW for the rest.

The learning rate warms up, stays, and decays linearly to zero; all of it is a function of the time used, so that a run
on a slower or busier machine is shorter in tokens but always finished. Checkpoints make an interrupted run resumable.

It runs as one single-threaded process per core, each on its own documents, that average their gradients once per step:
on a machine with other work, threads that wait for each other in every operation lose more than processes do.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tokenizers import Tokenizer
from torch import Tensor

from . import circuits, corpus, rows
from .network import Network, Shape

WARM_UP = 0.01  # of the time budget
DECAY = 0.40
MATRIX_RATE = 0.01
EMBEDDING_RATE = 0.02
VECTOR_RATE = 0.003
ALL_COUNT = 0.20  # until here every token counts in the loss, then only what follows from what was asked
SHORT = 0.30  # until here only rows of the shortest length


class Muon:
    """Momentum, orthogonalised by Newton-Schulz (Jordan et al., 2024), for the 2-D weights of the layers.

    Unlike `torch.optim.Muon` it works in float32 (this CPU emulates bfloat16) and divides the matrices among the
    processes, whose number must divide the number of matrices of every shape.
    """

    def __init__(self, parameters: Sequence[Tensor], momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter in parameters:
            groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.groups = list(groups.values())
        self.momentum, self.weight_decay = momentum, weight_decay
        size = dist.get_world_size()
        self.buffers = [torch.zeros(len(group) // size, *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update every parameter from its gradient."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            start = dist.get_rank() * len(buffer)
            gradient = torch.stack([p.grad for p in group[start : start + len(buffer)] if p.grad is not None])
            buffer.lerp_(gradient, 1 - self.momentum)
            mine = torch.stack([orthogonalise(matrix) for matrix in gradient.lerp_(buffer, self.momentum)])
            update = torch.empty(len(group), *buffer.shape[1:])
            dist.all_gather_single(update, mine)
            scale = max(1.0, buffer.shape[1] / buffer.shape[2]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.weight_decay).add_(change, alpha=-rate * scale)


def orthogonalise(matrix: Tensor, steps: int = 4) -> Tensor:
    """Roughly the nearest semi-orthogonal matrix: singular values end up in about 0.7 to 1.2.

    The iteration x -> (a + b x x' + c (x x')^2) x, with all steps but the last product done on the smaller x x'.
    """
    x: Tensor = matrix.mT.contiguous() if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    gram, product = x @ x.mT, torch.eye(len(x))
    for _ in range(steps):
        factor = torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        factor.diagonal().add_(3.4445)
        product, gram = factor @ product, factor @ (gram @ factor)
    x = product @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


def rate_at(progress: float) -> float:
    """The factor on both learning rates at this share of the time budget."""
    return max(0.0, min(progress / WARM_UP, 1.0, (1 - progress) / DECAY))


def repeated_at(progress: float) -> float:
    """The share of batches that are `rows.repeats`."""
    return 0.25 if progress < 0.1 else 0.05


def data(
    tokenizer: Tokenizer, options: argparse.Namespace, rank: int, progress: Sequence[float]
) -> Iterator[rows.Batch]:
    """The batches of one process; what they are depends on the last entry of `progress`."""
    share = options.batch_tokens // options.processes
    numbers = np.random.default_rng(options.seed + rank)
    for batch, counted in rows.batches(tokenizer, options.seed + rank, share, 20_000, options.processes):
        while numbers.random() < repeated_at(progress[-1]):
            yield rows.repeats(numbers, share // rows.LENGTHS[0], rows.LENGTHS[0], tokenizer.get_vocab_size())
        if progress[-1] < ALL_COUNT:
            counted[:] = True
        if progress[-1] >= SHORT or len(batch[0]) - 1 == rows.LENGTHS[0]:
            yield batch, counted


@torch.no_grad()
def held_out_loss(network: torch.nn.Module, tokenizer: Tokenizer, documents: int = 150) -> float:
    """Mean loss in nats per token on documents of the held-out seed, in rows of 256 and 1,024."""
    packed = rows.pack(rows.encode(tokenizer, corpus.HELD_OUT_SEED, documents))
    total = count = 0.0
    for length, size in ((256, 16), (1024, 4)):
        for i in range(0, len(packed[length]) - size + 1, size):
            batch = torch.from_numpy(packed[length][i : i + size].astype(np.int64))
            total += float(network(batch)) * batch.numel()
            count += batch.numel()
    return total / count


def save(path: Path, network: Network, adam: torch.optim.AdamW, step: int, tokens: int) -> None:
    """Write a checkpoint so that a crash never leaves half of one. Muon's momentum is left out: 20 steps restore it."""
    state = {"network": network.state_dict(), "adam": adam.state_dict()}
    torch.save({**state, "step": step, "tokens": tokens}, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def average_gradients(network: Network, progress: float) -> float:
    """Replace every gradient by its mean over the processes; returns the first process's progress."""
    parameters = list(network.parameters())
    mine = [p.grad.flatten() for p in parameters if p.grad is not None]
    told = torch.tensor([progress if dist.get_rank() == 0 else 0.0])
    flat = torch.cat([*mine, told])
    dist.all_reduce(flat)
    flat[:-1] /= dist.get_world_size()
    ends = np.cumsum([0] + [p.numel() for p in parameters]).tolist()
    pieces = [flat[start:end] for start, end in pairwise(ends)]
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    return float(flat[-1])


def worker(rank: int, options: argparse.Namespace) -> None:
    """One process of the training run."""
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    store = options.out / f"rendezvous.{os.getppid()}"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.processes)
    tokenizer = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json"))
    network = Network(Shape())
    circuits.plant(network)
    matrices = [p for n, p in network.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in network.named_parameters() if p.dim() != 2 or "embed" in n]
    muon = Muon(matrices)
    groups = [{"params": [p for p in others if p.dim() == 2], "rate": EMBEDDING_RATE},
              {"params": [p for p in others if p.dim() != 2], "rate": VECTOR_RATE}]  # fmt: skip
    adam = torch.optim.AdamW(groups, lr=VECTOR_RATE, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
    step = tokens = 0
    if options.start_from:
        state = torch.load(options.start_from, weights_only=True)
        network.load_state_dict(state["network"])
        adam.load_state_dict(state["adam"])
        step, tokens = state["step"], state["tokens"]
    for layer in network.model.layers:  # layer by layer: eight times less to compile than the whole network
        layer.compile(dynamic=False)

    started = saved = logged = time.monotonic()
    recent: dict[int, list[float]] = defaultdict(list)
    log = (options.out / "log.jsonl").open("a")
    share = options.batch_tokens // options.processes
    done = [options.progress]
    for batch, counted in data(tokenizer, options, rank, done):
        now = time.monotonic()
        loss = network(torch.from_numpy(batch), torch.from_numpy(counted))
        loss.backward()
        progress = options.progress + (1 - options.progress) * (now - started) / (options.minutes * 60)
        progress = average_gradients(network, progress)
        if progress >= 1:
            break
        done[-1] = progress
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        factor = rate_at(progress)
        muon.step(MATRIX_RATE * factor)
        for group in adam.param_groups:
            group["lr"] = group["rate"] * factor
        adam.step()
        network.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + share * options.processes
        recent[0 if batch.min() >= len(corpus.SPECIALS) else batch.shape[1] - 1].append(loss.item())
        if rank == 0 and step % 20 == 0:
            losses = {str(k): round(sum(v) / len(v), 4) for k, v in recent.items() if v}
            entry = {"step": step, "tokens": tokens, "progress": round(progress, 4), "loss": losses,
                     "seconds": round(now - started), "step_seconds": round((now - logged) / 20, 2)}  # fmt: skip
            print(json.dumps(entry), file=log, flush=True)
            logged, recent = now, defaultdict(list)
        if rank == 0 and now - saved > 120:
            save(options.out / "checkpoint.pt", network, adam, step, tokens)
            saved = now
    if rank == 0:
        save(options.out / "checkpoint.pt", network, adam, step, tokens)
        result = {"step": step, "tokens": tokens, "held_out": held_out_loss(network, tokenizer)}
        print(json.dumps(result), file=log, flush=True)
        print(json.dumps(result))
    dist.destroy_process_group()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoint.pt and log.jsonl")
    parser.add_argument("--minutes", type=float, default=83.0, help="wall-clock budget")
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens per step, all processes together")
    parser.add_argument("--seed", type=int, default=0, help="first corpus seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--start-from", type=Path, help="checkpoint to continue from")
    parser.add_argument("--progress", type=float, default=0.0, help="place in the schedule to begin at (0 to 1)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    mp.spawn(worker, args=(options,), nprocs=options.processes)  # type: ignore[attr-defined, no-untyped-call]


if __name__ == "__main__":
    main()
