"""A fake router in a process of its own, and a checkpoint whose tokenizer knows its tokens."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.slime_caller import Source

from rollfeed.app.inside_slime import slime_process
from rollfeed.benchmarks.client import save_tokenizer
from rollfeed.testing.fake_sglang import start_fake_sglang


@pytest.fixture(scope="session")
def router() -> Iterator[str]:
    with asyncio.Runner() as runner:
        entered = start_fake_sglang(mode="zero", router="old", num_workers=2)
        fakes = runner.run(entered.__aenter__())
        assert fakes.address is not None
        yield fakes.address
        slime_process.end()
        runner.run(entered.__aexit__(None, None, None))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("characters")
    save_tokenizer(folder)
    return folder


@pytest.fixture
def source() -> Source:
    return Source()
