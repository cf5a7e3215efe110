"""llama.cpp behind a pipe: one JSON command per line in, one JSON answer per line out. For `cpu.py`.

{"context": C, "tokens": N, "rows": R}   feed R rows of C random tokens, then decode N greedy tokens of each
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
import sys
import time

import llama_cpp as llama
import numpy as np

BATCH = 512


class Engine:
    """A model and its context, through the library's own C functions."""

    def __init__(self, path: str, threads: int, context: int, rows: int) -> None:
        llama.llama_backend_init()
        parameters = llama.llama_model_default_params()
        self.model = llama.llama_model_load_from_file(path.encode(), parameters)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        settings = llama.llama_context_default_params()
        settings.n_ctx = context * rows
        settings.n_batch = settings.n_ubatch = BATCH
        settings.n_seq_max = rows
        settings.n_threads = settings.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, settings)
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.batch = llama.llama_batch_init(BATCH, 0, 1)

    def feed(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """Compute (token, position, row, wants logits) entries, up to BATCH of them."""
        self.batch.n_tokens = len(tokens)
        for i, (token, position, row, wanted) in enumerate(tokens):
            self.batch.token[i], self.batch.pos[i] = token, position
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = row
            self.batch.logits[i] = wanted
        if status := llama.llama_decode(self.context, self.batch):
            raise SystemExit(f"llama_decode failed with {status}")

    def greedy(self, index: int) -> int:
        """The most likely token after entry `index` of the last batch."""
        logits = llama.llama_get_logits_ith(self.context, index)
        array = np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self.vocab,))
        return int(array.argmax())

    def run(self, context: int, tokens: int, rows: int) -> dict[str, float]:
        """Seconds for the prompts of all rows, and for decoding them together."""
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        draw = random.Random(context * 1000 + rows)
        last = []
        started = time.perf_counter()
        for row in range(rows):
            for start in range(0, context, BATCH):
                stop = min(context, start + BATCH)
                entries = [(draw.randrange(300, self.vocab), i, row, i == context - 1) for i in range(start, stop)]
                self.feed(entries)
            last.append(self.greedy(len(entries) - 1))
        prompt_s = time.perf_counter() - started
        started = time.perf_counter()
        for i in range(tokens):
            self.feed([(last[row], context + i, row, True) for row in range(rows)])
            last = [self.greedy(row) for row in range(rows)]
        return {"prompt_s": prompt_s, "decode_s": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    options = parser.parse_args()
    engine = Engine(options.model, options.threads, options.context, options.rows)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(engine.run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
