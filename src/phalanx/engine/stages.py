"""A rank as part of a pipeline: the layers it loads, and the hidden states it receives and sends.

Every rank of a stage receives the whole input of the stage and computes its whole output. Does not know sockets
(`dist/stage_link.py`), how a model is cut (`model/loading/stage_cut.py`), or what a plan means.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np
from msgspec import Struct

from phalanx.config import ActivationDtype, EngineConfig
from phalanx.dist.stage_frames import Frame
from phalanx.dist.stage_link import StageConnections
from phalanx.dist.topology import Room, Topology, split_layers
from phalanx.engine.link import Link
from phalanx.model.device_memory import read_memory
from phalanx.model.loading.stage_cut import LayerCosts
from phalanx.model.loading.stage_parts import parts_of
from phalanx.model.runner import Runner
from phalanx.sched.plan import Forward, RowOp, Step
from phalanx.types import LinkStats

log = logging.getLogger("phalanx.load")

LATE = 1.1  # times a step's limit: later than `dist/stall.py`, which names the rank that did not reach the step


class _FreeMemory(Struct, frozen=True, kw_only=True):
    """A rank's device, and the bytes of its memory that are free; ranks on one device report the same memory."""

    host: str
    device: str
    free: int


def layer_choice(
    config: EngineConfig, topology: Topology, link: Link, guard: int
) -> Callable[[LayerCosts], tuple[int, int]] | None:
    """A function that chooses this stage's layers, equally on all its ranks; None with one stage.

    Args:
        guard: bytes of this rank's memory that stay free.
    """
    if topology.n_stages == 1:
        return None

    def choose(costs: LayerCosts) -> tuple[int, int]:
        machine = read_memory()
        spots = link.share(_FreeMemory(host=link.host, device=machine.device, free=machine.available - guard))
        split = split_layers(topology, parts_of(costs), _rooms(spots), config.pp_split)
        stage = topology.place(link.rank).stage
        layers = split[stage]
        log.info(
            "stage %d, the last is %d: layers %d to %d", stage, topology.n_stages - 1, layers.start, layers.stop - 1
        )
        return layers.start, layers.stop

    return choose


def _rooms(spots: Sequence[_FreeMemory]) -> list[Room]:
    """Memory for each rank's weights: an equal share of its device's."""
    rooms = []
    for rank, spot in enumerate(spots):
        beside = [other.free for other in spots if (other.host, other.device) == (spot.host, spot.device)]
        rooms.append(Room(f"rank {rank} on {spot.host}", max(0, min(beside) // len(beside))))
    return rooms


class StagedRunner:
    """A runner that receives its input from the previous stage and sends its output to the next.

    With one stage it only forwards calls to the runner.

    Args:
        number: of the stage; 0 has the embedding.
        hidden_dtype: dtype of the hidden states sent between stages, equal in all of them (`wire_dtype`).
    """

    def __init__(self, runner: Runner, number: int, connections: StageConnections, hidden_dtype: str) -> None:
        self.runner = runner
        self.number = number
        self._receiver = connections.receiver
        self._senders = connections.senders
        self._dtype = hidden_dtype
        if self._senders:
            runner.outgoing = self._outgoing
        self._step = 0
        self._forwards = 0  # executed in this step so far
        self.waited_s = 0.0
        """Seconds that this step has waited for hidden states of the previous stage."""
        self._waited_before_s = 0.0  # in earlier steps; those before the first one are not counted

    def links(self) -> list[LinkStats]:
        """This rank's figures of its connections to other stages."""
        senders = [sender.stats() for sender in self._senders]
        if self._receiver is None:
            return senders
        return [*senders, self._receiver.stats(self._waited_before_s + (self.waited_s if self._step else 0.0))]

    def expect(self, step: Step, limit_s: float) -> None:
        """Announce this step's inputs to the receiver, which reads them in advance; a late one is an error."""
        self._announce(step.id, 0, step.forwards, limit_s)

    def begin(self, step: int) -> None:
        """See `Runner.begin`."""
        self._waited_before_s += self.waited_s if self._step else 0.0
        self._step, self._forwards, self.waited_s = step, 0, 0.0
        self.runner.begin(step)

    def apply(self, ops: Sequence[RowOp]) -> None:
        """See `Runner.apply`."""
        self.runner.apply(ops)

    def forward(self, forward: Forward, kv_len: Sequence[int]) -> mx.array | None:
        """See `Runner.forward`: logits in the last stage, None in others.

        Raises:
            StageLinkError: the input did not arrive, or belongs to another forward.
        """
        index, self._forwards = self._forwards, self._forwards + 1
        output = self.runner.forward(forward, kv_len, self._receive(forward))
        stage = self.runner.stage
        if stage is None or not stage.has_hidden_output:
            return output
        assert output is not None
        self._send(self._frame(self._step, index, forward), output)
        return None

    def forward_alone(self, forward: Forward, kv_len: Sequence[int], limit_s: float) -> mx.array | None:
        """A forward outside any plan, for the self-test: announces its own input."""
        self._announce(self._step, self._forwards, [forward], limit_s)
        return self.forward(forward, kv_len)

    def _announce(self, step: int, first: int, forwards: Sequence[Forward], limit_s: float) -> None:
        if self._receiver is not None and forwards:
            frames = [self._frame(step, first + i, forward) for i, forward in enumerate(forwards)]
            self._receiver.expect(frames, LATE * limit_s)

    def _frame(self, step: int, index: int, forward: Forward) -> Frame:
        stage = self.runner.stage
        assert stage is not None
        rows, tokens = (sum(forward.valid), 1) if forward.packed else (len(forward.seqs), len(forward.tokens[0]))
        return Frame(step, index, 0, self._dtype, (rows, tokens, stage.width))

    def _receive(self, forward: Forward) -> mx.array | None:
        if self._receiver is None:
            return None
        shape = self._frame(0, 0, forward).shape
        began = time.perf_counter()
        data = self._receiver.take()
        self.waited_s += time.perf_counter() - began
        return from_bytes(data, self._dtype, shape).astype(self.runner.dtype)

    def _outgoing(self, hidden: mx.array) -> mx.array:
        """A stage's output in the dtype of the link; as uint16 where numpy lacks the dtype. Lazy."""
        hidden = hidden.astype(getattr(mx, self._dtype))
        return mx.contiguous(hidden).view(mx.uint16) if hidden.dtype.size == 2 else hidden

    def _send(self, frame: Frame, output: mx.array) -> None:
        data = to_bytes(output)
        for sender in self._senders:
            sender.send(frame, data)


def wire_dtype(asked: ActivationDtype, runner: Runner, link: Link) -> str:
    """The dtype of hidden states between stages. `model`: that of the last stage (rank 0), as stages may differ."""
    return link.share(str(runner.dtype).removeprefix("mlx.core."))[0] if asked == "model" else asked


def to_bytes(array: mx.array) -> bytes:
    """The elements of an evaluated array in C order; numpy must have its dtype."""
    return np.array(array, copy=False).tobytes()


def from_bytes(data: bytes | bytearray, dtype: str, shape: tuple[int, ...]) -> mx.array:
    """Hidden states [*shape] from bytes; evaluated, except for the view as bfloat16, which numpy lacks."""
    if dtype == "bfloat16":
        return mx.array(np.frombuffer(data, np.uint16).reshape(shape)).view(mx.bfloat16)
    return mx.array(np.frombuffer(data, dtype).reshape(shape))
