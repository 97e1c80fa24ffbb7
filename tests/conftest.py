"""What many tests need: a tiny real checkpoint (a Llama of 50,000 random weights); what processes are left."""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from hypothesis import settings

import rollfeed.engine.local  # noqa: F401 - before torch, which it tells not to spin on a busy machine

settings.register_profile("untimed", settings(deadline=None))  # a busy machine fails no test
settings.load_profile("untimed")

# Whoever started the tests, with nohup or behind a shell's back: signals of theirs do what they do at a terminal.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

SLOW = ("integration", "benchmarks", "app", "cli", "engine", "training", "sandbox")
"""Folders whose files are begun first: a process that begins a long one last ends alone."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = Path(__file__).parent
    order = {folder: place for place, folder in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path.relative_to(tests).parts[0], len(SLOW)))


@pytest.fixture(scope="module", autouse=True)
def nothing_stays_imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget what a file of tests has imported from users' folders: the next one may have others of these names."""
    tests = Path(__file__).parent
    folders = (tests, tests.parent / "examples", tmp_path_factory.getbasetemp())
    before = set(sys.modules)
    yield
    for name in sys.modules.keys() - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and not name.startswith("tests.") and any(Path(file).is_relative_to(folder) for folder in folders):
            del sys.modules[name]
    if (registry := sys.modules.get("rollfeed.environments.registry")) is not None:
        registry.named_by_path.clear()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(special + alphabet)}
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
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=vocabulary["<|im_end|>"],
        bos_token_id=vocabulary["<|im_start|>"],
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    return folder


class ForkedCommand:
    """A command in a process and group of its own, forked from one that has imported PyTorch and all of ours already.

    The import takes up to ten seconds of a processor, and many tests kill what they have started.
    """

    _COMMAND = """
import os, sys
os.setsid()
os.dup2(output.fileno(), 1)
os.dup2(output.fileno(), 2)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
from rollfeed.cli.main import entry_point
sys.argv = ["rollfeed", *words]
entry_point()
"""

    def __init__(self, forks: ForkServerContext, words: list[str]) -> None:
        reader, writer = forks.Pipe(duplex=False)
        given = {"output": writer, "folder": os.getcwd(), "environment": dict(os.environ), "words": words}
        self._process = forks.Process(target=exec, args=(self._COMMAND, given))
        self._process.start()
        writer.close()
        with reader:
            self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8")
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.poll()

    def read(self) -> str:
        """Return what it says until its end, which is waited for."""
        said = self.stdout.read()
        self.wait()
        return said

    def send_signal(self, number: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.poll() is None:  # of one that has ended, the number may be another's by now
            self._process.kill()

    def close(self) -> None:
        self.kill()
        self.wait()
        self.stdout.close()
        self._process.close()


@pytest.fixture(scope="session")
def fork_rollfeed() -> Callable[..., ForkedCommand]:
    """Return a function that starts a command in its own process, and leaves it to the caller."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(
        [
            "rollfeed.engine.local",  # before torch
            "rollfeed.app.training.loop",
            "rollfeed.training.trainer",
            "rollfeed.cli.train",
            "rollfeed.cli.bench",
            "rollfeed.report.picture",
            "transformers.masking_utils",
            "transformers.modeling_utils",
            "torch._dynamo",
        ]
    )
    return lambda *arguments: ForkedCommand(forks, [str(argument) for argument in arguments])


@pytest.fixture
def start_rollfeed(fork_rollfeed: Callable[..., ForkedCommand]) -> Iterator[Callable[..., ForkedCommand]]:
    """Return a function that starts a command in its own process; what still runs at the end is killed."""
    started: list[ForkedCommand] = []

    def start(*arguments: str | Path) -> ForkedCommand:
        started.append(fork_rollfeed(*arguments))
        return started[-1]

    yield start
    for command in started:
        command.close()


def descendants() -> set[int]:
    """Return this process's, the dead that nobody waited for included."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text(errors="replace")
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found: set[int] = set()
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        found |= level
    return found


@pytest.fixture
def processes() -> Callable[[], set[int]]:
    """Return the function that lists the descendants of this process, the dead that nobody waited for included."""
    return descendants


@pytest.fixture
async def pass_seconds() -> AsyncIterator[Callable[[float], None]]:
    """Return the function that makes the clock of the running loop jump: what waits for others for long expires."""
    loop = asyncio.get_running_loop()
    time_of_loop, passed = loop.time, 0.0

    def jump(seconds: float) -> None:
        nonlocal passed
        passed += seconds

    loop.time = lambda: time_of_loop() + passed  # type: ignore[method-assign]
    yield jump
    del loop.time


@pytest.fixture
def leaves_no_process() -> Iterator[None]:
    """Fail the test when it leaves a process; name it before the fixtures that have to end theirs."""
    before = descendants()
    yield
    for _ in range(3000):  # killed ones take a moment to go, and nothing here is told of it
        if not descendants() - before:
            return
        time.sleep(0.02)
    assert descendants() - before == set()
