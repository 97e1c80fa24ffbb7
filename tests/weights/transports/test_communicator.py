"""What can be said of NCCL without a GPU: what is called, by a library that keeps it."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollfeed.weights.transports import communicator as nccl
from rollfeed.weights.transports.communicator import Communicator, unique_id


class Library:
    """Answers each call with a code."""

    def __init__(self, **codes: int) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._codes = codes

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "ncclCommInitRank":
                arguments[0]._obj.value = 4096
            return self._codes.get(name, 0)

        return call

    def ncclGetErrorString(self, code: ctypes.c_int) -> bytes:  # noqa: N802
        return b"unhandled system error" if code.value == 2 else b"other"


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(cuda_stream=77, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", nullcontext)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(nccl, "_library", lambda: made)
    return made


def joined() -> Communicator:
    return Communicator(bytes(range(128)), num_ranks=3, rank=1, device=torch.device("cpu"))


def test_a_rank_joins_by_the_id_and_sends_bytes(library: Library) -> None:
    bytes_B = torch.arange(10, dtype=torch.uint8)
    communicator = joined()
    communicator.broadcast(bytes_B)
    (name, (_, num_ranks, group, rank)), (broadcast, told) = library.calls
    assert (name, num_ranks.value, rank.value, bytes(group)) == ("ncclCommInitRank", 3, 1, bytes(range(128)))
    values = [each.value for each in told]
    assert (broadcast, values) == (
        "ncclBroadcast",
        [bytes_B.data_ptr(), bytes_B.data_ptr(), 10, 1, 0, 4096, 77],
    )


def test_a_rank_that_has_left_sends_no_more(library: Library) -> None:
    communicator = joined()
    communicator.leave()
    communicator.leave()
    assert [name for name, _ in library.calls] == ["ncclCommInitRank", "ncclCommAbort"]
    with pytest.raises(RuntimeError, match="has left its group"):
        communicator.try_out()


def test_a_group_that_nccl_cannot_end_is_left_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_library", lambda: Library(ncclCommAbort=2))
    communicator = joined()
    communicator.leave()
    with pytest.raises(RuntimeError, match="has left its group"):
        communicator.try_out()


def test_what_fails_says_what_nccl_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_library", lambda: Library(ncclCommInitRank=2))
    with pytest.raises(RuntimeError, match="ncclCommInitRank: unhandled system error"):
        joined()
    with pytest.raises(RuntimeError, match="have 128 bytes, and this has 3"):
        Communicator(b"abc", num_ranks=2, rank=0, device=torch.device("cpu"))


def test_without_nccl_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_LIBRARY", "libno-such-nccl.so.2")
    nccl._library.cache_clear()
    with pytest.raises(RuntimeError, match="install PyTorch for CUDA"):
        unique_id()
    nccl._library.cache_clear()
