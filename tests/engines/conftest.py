"""A small random model, what its logprobs should be, and runs of commands against real servers.

Axes: P prompt tokens, R response tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from rollfeed.prompts.tokenizer import LocalTokenizer, load_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTINGS = """
seed = 5

[model]
checkpoint = "{checkpoint}"

[[prompts.environments]]
id = "core/copy_text"

[rollout]
num_rollout = {num_rollout}
rollout_batch_size = 2
n_samples_per_prompt = 4

[sampling]
rollout_max_response_len = 24

[engine]
context_length = 512

[train]
checkpoint_interval = 1

[train.optimizer]
learning_rate = 1e-2

[reward]
override_environments = true

[plugins]
reward = "spread_reward:spread"
"""
REWARD = """
def spread(sample, prompt):
    return float(sample.response_token_ids.sum() % 7)
"""
Tensors = dict[str, NDArray[np.float32]]
Score = Callable[[Path | Tensors, NDArray[np.int32], NDArray[np.int32]], NDArray[np.float32]]


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 0.4 million random weights, the head tied, in sizes that real servers have kernels for."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("policy") / "small"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: number for number, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    bytes_only = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        additional_special_tokens=special,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=1024,
        eos_token_id=vocabulary["<|im_end|>"],
        bos_token_id=vocabulary["<|im_start|>"],
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(3.0)
        model.model.embed_tokens.weight[config.eos_token_id] = 0.0  # so that responses are as long as they may be
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(policy: Path) -> LocalTokenizer:
    return load_tokenizer(policy)


@pytest.fixture(scope="session")
def changed(policy: Path) -> Callable[[int], Tensors]:
    """Other weights, as far from the model's as from each other."""

    def change(number: int) -> Tensors:
        random = np.random.default_rng(number)
        tensors = {}
        for name, values in load_file(policy / "model.safetensors").items():
            noise = random.standard_normal(values.shape) * (0.3 if "embed" in name else 0.1)
            tensors[name] = (values + np.where(values.any(-1, keepdims=True), noise, 0.0)).astype(np.float32)
        return tensors

    return change


@pytest.fixture(scope="session")
def score(policy: Path) -> Score:
    """Logprobs of a response by transformers in fp32, given a checkpoint or the tensors that make one of the model."""
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(policy, dtype=torch.float32)
    original = {name: values.clone() for name, values in model.state_dict().items()}

    def forward(
        weights: Path | Tensors, prompt_P: NDArray[np.int32], response_R: NDArray[np.int32]
    ) -> NDArray[np.float32]:
        given = {} if isinstance(weights, Path) else {name: torch.tensor(each) for name, each in weights.items()}
        if given:
            given["lm_head.weight"] = given["model.embed_tokens.weight"]
        model.load_state_dict({**original, **given})
        ids = torch.tensor(np.concatenate([prompt_P, response_R])[None].astype(np.int64))
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, len(prompt_P) - 1 : -1].float(), dim=-1)
        return logprobs[torch.arange(len(response_R)), ids[0, len(prompt_P) :]].numpy()

    return forward


@pytest.fixture(scope="session")
def prompts() -> Callable[[int], list[NDArray[np.int32]]]:
    """Prompts that differ in their first token from all before, so that no cache has keys and values for them."""
    firsts = iter(range(100, 250))
    random = np.random.default_rng(0)

    def draw(count: int) -> list[NDArray[np.int32]]:
        return [np.array([next(firsts), *random.integers(60, 90, 7)], np.int32) for _ in range(count)]

    return draw


class Command:
    """A run directory, and commands that work in it."""

    def __init__(self, folder: Path, checkpoint: Path, options: Sequence[str]) -> None:
        self.out = folder / "run"
        self._folder = folder
        self._checkpoint = checkpoint
        self._options = options
        self._started: list[subprocess.Popen[str]] = []
        (folder / "spread_reward.py").write_text(REWARD)

    def start(self, name: str, *options: str, num_rollout: int) -> subprocess.Popen[str]:
        """Start ``rollfeed run`` or ``train``."""
        settings = self._folder / "settings.toml"
        settings.write_text(SETTINGS.format(checkpoint=self._checkpoint, num_rollout=num_rollout))
        words = [name, str(settings), "--out", str(self.out), *self._options, *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "rollfeed", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        self._started.append(process)
        return process

    def run(self, name: str, *options: str, num_rollout: int) -> tuple[int, str]:
        """Run one to its end; returns exit code and output."""
        process = self.start(name, *options, num_rollout=num_rollout)
        output, _ = process.communicate()
        return process.returncode, output

    def check(self, *options: str) -> tuple[int, dict[str, Any]]:
        """Check the settings as for a training that publishes; returns exit code and what it tells."""
        settings = self._folder / "settings.toml"
        settings.write_text(SETTINGS.format(checkpoint=self._checkpoint, num_rollout=2))
        words = ["check", str(settings), "--json", "--servers", *self._options, *options]
        ran = subprocess.run([sys.executable, "-m", "rollfeed", *words], capture_output=True, text=True)
        return ran.returncode, json.loads(ran.stdout)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Records of a file of the run directory, the whole ones."""
        path = self.out / name
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def rows(self) -> list[dict[str, Any]]:
        """Samples of all batches."""
        import pyarrow.parquet as pq

        return [
            row for path in sorted((self.out / "batches").glob("*.parquet")) for row in pq.read_table(path).to_pylist()
        ]

    def end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
                process.communicate()


@pytest.fixture
def command(tmp_path: Path, policy: Path) -> Iterator[Callable[..., Command]]:
    """Make a command for a server, given the settings that name it."""
    made: list[Command] = []

    def make(**settings: Any) -> Command:
        options = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        made.append(Command(tmp_path, policy, options))
        return made[-1]

    yield make
    for each in made:
        each.end()
