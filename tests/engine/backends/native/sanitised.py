"""Drive the native kernels, built with sanitizers, by random models, slots, lengths, kept keys and chunks.

A process of its own, with the sanitizer's library loaded first; any finding ends it with a report and exit code 1.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from random import Random

import numpy as np
import torch

from rollfeed.engine.backends.architecture import Architecture
from rollfeed.engine.backends.native import library
from rollfeed.engine.backends.native.model import NativeModel, quantised_refusal
from rollfeed.engine.backends.native.places import NativeWeights
from rollfeed.engine.backends.sampling import RowSettings

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]


def use_sanitised(folder: Path) -> None:
    """Have the kernels compiled with sanitizers, and loaded instead of the usual ones."""
    made = folder / "kernels.so"
    flags = [flag for flag in library._FLAGS if flag != "-O3"]
    command = [library._compiler(), *flags, "-O1", *SANITIZERS, "-march=native", str(library._SOURCES / "rollfeed.c")]
    subprocess.run([*command, "-lm", "-o", str(made)], check=True)
    library._compiled = lambda _compiler: made


def random_architecture(random: Random) -> Architecture:
    head_dim = 2 * random.randrange(1, 40)
    num_kv_heads = random.choice([1, 2, 3])
    quantisable = random.random() < 0.4
    unit = 32 if quantisable else random.choice([1, 2, 8])
    if quantisable:
        head_dim = 32
    return Architecture.from_config(
        {
            "model_type": random.choice(["llama", "qwen2", "qwen3"]),
            "vocab_size": random.randrange(2, 700),
            "hidden_size": unit * random.randrange(1, 6 if quantisable else 40),
            "intermediate_size": unit * random.randrange(1, 6 if quantisable else 60),
            "num_hidden_layers": random.randrange(1, 4),
            "num_attention_heads": num_kv_heads * random.choice([1, 2, 3, 4, 7]),
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "attention_bias": random.random() < 0.5,
            "mlp_bias": random.random() < 0.3,
            "tie_word_embeddings": random.random() < 0.5,
        }
    )


def settings_of(random: Random, num_rows: int, vocab_size: int) -> RowSettings:
    def each(kinds: list[float], dtype: type) -> np.ndarray:
        return np.array([random.choice(kinds) for _ in range(num_rows)], dtype)

    return RowSettings(
        each([0.0, 1e-6, 0.3, 1.0, 1e30], np.float32),
        each([1, 2, vocab_size // 2 or 1, vocab_size], np.int64),
        each([1e-9, 0.1, 0.9, 1.0], np.float64),
        each([0.0, 0.5, 1.0 - 2.0**-53], np.float64),
    )


def drive(random: Random) -> None:
    """Make a model and do with it what a server's hours do, in any order."""
    architecture = random_architecture(random)
    num_slots, capacity = random.randrange(1, 6), 16 * random.randrange(1, 6)
    max_rows, max_threads = random.randrange(1, 50), random.randrange(1, 4)
    can_be_quantised = quantised_refusal(architecture) is None
    model = NativeModel(
        architecture,
        num_slots=num_slots,
        capacity=capacity,
        max_rows=max_rows,
        max_threads=max_threads,
        quantised=can_be_quantised and random.random() < 0.7,
    )
    weights = NativeWeights(model, architecture)
    for _ in range(random.randrange(1, 3)):
        tensors = {name: torch.randn(shape) * 0.2 for name, shape in weights.shapes.items()}
        if architecture.tied_head:
            del tensors["lm_head.weight"]
        weights.load(tensors, complete=True)
        lengths = [0] * num_slots
        for _ in range(random.randrange(4, 16)):
            model.set_threads(random.randrange(1, max_threads + 1))
            rows = []
            for slot in random.sample(range(num_slots), random.randrange(1, num_slots + 1)):
                count = random.randrange(capacity - lengths[slot] + 1)
                rows += [(slot, position) for position in range(lengths[slot], lengths[slot] + count)]
                lengths[slot] += count
            if rows:
                slots, positions = (np.array(column, np.int32) for column in zip(*rows, strict=True))
                tokens = np.array([random.randrange(architecture.vocab_size) for _ in rows], np.int32)
                hidden = model.forward(tokens, positions, slots)
                logits = model.logits(hidden[: random.randrange(1, len(rows) + 1)])
                if random.random() < 0.1:
                    logits[0, random.randrange(architecture.vocab_size)] = random.choice([float("nan"), float("inf")])
                if len(logits) <= max_rows:
                    model.draw(logits, settings_of(random, len(logits), architecture.vocab_size))
            donor, slot = random.randrange(num_slots), random.randrange(num_slots)
            if donor != slot and lengths[donor]:
                start = random.randrange(lengths[donor])
                end = random.randrange(start, lengths[donor] + 1)
                model.copy_positions(donor, slot, start, end)
                lengths[slot] = max(lengths[slot], end)
            if random.random() < 0.3:
                slot = random.randrange(num_slots)
                model.erase(slot)
                lengths[slot] = 0
        for name in random.sample(sorted(weights.shapes), 3):
            weights.read(name)
    model.take_milliseconds()
    model.close()


def main() -> None:
    folder, seconds, seed = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    use_sanitised(folder)
    torch.set_num_threads(1)
    ends_at, num_models = time.monotonic() + seconds, 0
    while time.monotonic() < ends_at:
        print(f"seed {seed + num_models}", flush=True)
        torch.manual_seed(seed + num_models)
        drive(Random(seed + num_models))
        num_models += 1
    print(f"{num_models} models without a finding", flush=True)


if __name__ == "__main__":
    main()
