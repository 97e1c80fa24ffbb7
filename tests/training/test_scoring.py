"""Log-probabilities and entropies of tokens in chunks, beside those of whole logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rollfeed.model_files.heads import Head, HeadShape
from rollfeed.training.scoring import ChunkSizes, score_tokens
from rollfeed.types import SamplingMask

TOKENS, HIDDEN, VOCAB = 5, 3, 7
TARGETS = torch.tensor([1, 1, 6, 0, 5])
# Drawn from different parts, one from its own token alone; the others from everything.
PARTS = {0: [1, 2], 3: [0], 4: [5, 1, 6]}
MASK = SamplingMask.of([PARTS.get(token, []) for token in range(TOKENS)])
ALL = ChunkSizes(product=1 << 20, exponents=1 << 20, kept=1 << 20)
SMALL = {
    "a token at a time": ChunkSizes(product=1, exponents=1, kept=0),
    "pieces of pieces": ChunkSizes(product=3 * VOCAB, exponents=2 * VOCAB, kept=0),
    "the first are kept": ChunkSizes(product=2 * VOCAB, exponents=VOCAB, kept=2 * VOCAB),
    "all are kept": ALL,
}
SHAPES = [HeadShape(), HeadShape(scale=0.25), HeadShape(cap=2.0), HeadShape(scale=1.5, cap=3.0)]


def numbers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((TOKENS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    rows, weight, bias = (torch.randn(*size, generator=generator, dtype=torch.float64) for size in sizes)
    return rows.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def bent(product: torch.Tensor, shape: HeadShape) -> torch.Tensor:
    scaled = product * shape.scale
    return scaled if shape.cap is None else shape.cap * torch.tanh(scaled / shape.cap)


def plainly(logits: torch.Tensor, temperature: float, parts: dict[int, list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    scaled = logits / temperature
    among = [torch.logsumexp(row[parts.get(token, range(VOCAB))], 0) for token, row in enumerate(scaled)]
    logprobs = torch.log_softmax(scaled, -1)
    return scaled[range(TOKENS), TARGETS] - torch.stack(among), -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("sizes", SMALL.values(), ids=SMALL)
@pytest.mark.parametrize("mask", [None, MASK], ids=["everything", "parts"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_have_the_values_and_gradients_of_whole_logits(
    shape: HeadShape, mask: SamplingMask | None, sizes: ChunkSizes
) -> None:
    given = numbers()
    rows, weight, bias = given
    weights = torch.linspace(-1, 2, TOKENS, dtype=torch.float64), torch.linspace(1, -2, TOKENS, dtype=torch.float64)

    def gradients(scored: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return torch.autograd.grad((weights[0] * scored[0] + weights[1] * scored[1]).sum(), given)

    whole = plainly(bent(rows @ weight.T + bias, shape), 0.6, {} if mask is None else PARTS)
    found = score_tokens(
        rows, target_T=TARGETS, temperature=0.6, head=Head(weight, bias, shape), drawn_from=mask, sizes=sizes
    )
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(gradients(found), gradients(whole))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logits_are_scored_as_they_are_where_there_is_no_head(temperature: float) -> None:
    logits = torch.randn(TOKENS, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()

    def score(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes = ChunkSizes(product=2 * VOCAB, exponents=VOCAB, kept=0)
        return score_tokens(given, target_T=TARGETS, temperature=temperature, drawn_from=MASK, sizes=sizes)

    assert torch.autograd.gradcheck(score, logits)
    before = logits.detach().clone()
    torch.testing.assert_close(score(logits), plainly(logits, temperature, PARTS))
    assert torch.equal(logits, before)
    gradient = torch.autograd.grad(score(logits)[0][[0, 3]].sum(), logits)[0]
    assert gradient[0, [0, 3, 4, 5, 6]].abs().max() == 0
    assert gradient[3].abs().max() == 0


def test_a_second_way_back_computes_again_what_the_first_one_has_used_up() -> None:
    rows, weight, bias = numbers()
    head = Head(weight, bias, HeadShape())
    logprobs, _ = score_tokens(rows, target_T=TARGETS, temperature=1.0, head=head, sizes=ALL)
    first = torch.autograd.grad(logprobs.sum(), (rows, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(logprobs.sum(), (rows, weight)), first)


def test_frozen_heads_have_no_gradient() -> None:
    rows, weight, bias = numbers()
    head = Head(weight.detach(), bias, HeadShape())
    logprobs, _ = score_tokens(rows, target_T=TARGETS, temperature=1.0, head=head)
    torch.testing.assert_close(
        torch.autograd.grad(logprobs.sum(), (rows, bias)),
        torch.autograd.grad(plainly(rows @ weight.T + bias, 1.0, {})[0].sum(), (rows, bias)),
    )


def test_impossible_tokens_bring_no_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    logprobs, entropy = score_tokens(logits, target_T=torch.tensor([1]), temperature=1.0)
    assert logprobs.item() == pytest.approx(-np.log(2))
    assert entropy.item() == pytest.approx(np.log(2))
