from __future__ import annotations

import numpy as np
import pytest
import torch

from rollfeed.training.scoring import DrawnFrom, score_tokens


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_gradient_of_scored_tokens_is_exact(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    places, targets = torch.tensor([0, 0, 2, 3, 0]), torch.tensor([1, 1, 6, 0, 5])

    def score(x: torch.Tensor) -> torch.Tensor:
        return score_tokens(x, place_T=places, target_T=targets, temperature=temperature)[0]

    assert torch.autograd.gradcheck(score, logits)
    expected = torch.log_softmax(logits / temperature, -1)[places, targets]
    torch.testing.assert_close(score(logits), expected)


def test_impossible_tokens_bring_no_entropy() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    logprobs, entropy = score_tokens(logits, place_T=torch.tensor([0]), target_T=torch.tensor([1]), temperature=1.0)
    assert logprobs.item() == pytest.approx(-np.log(2))
    assert entropy.item() == pytest.approx(np.log(2))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_drawn_from_a_part_of_the_vocabulary_are_scored_among_it(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    places, targets = torch.tensor([0, 0, 2, 3, 0]), torch.tensor([1, 1, 6, 0, 5])
    # Two tokens of one place, drawn from different parts; one from its own token alone; the others from everything.
    parts = {0: [1, 2], 3: [0], 4: [5, 1, 6]}
    drawn_from = DrawnFrom(
        torch.tensor([token for token, ids in parts.items() for _ in ids]),
        torch.tensor([each for ids in parts.values() for each in ids]),
    )

    def score(x: torch.Tensor) -> torch.Tensor:
        return score_tokens(x, place_T=places, target_T=targets, temperature=temperature, drawn_from=drawn_from)[0]

    assert torch.autograd.gradcheck(score, logits)
    for token, value in enumerate(score(logits)):
        scaled = logits[places[token]].detach() / temperature
        among = scaled[parts.get(token, list(range(7)))]
        torch.testing.assert_close(value.detach(), scaled[targets[token]] - torch.logsumexp(among, 0))
    gradient = torch.autograd.grad(score(logits)[[0, 3]].sum(), logits)[0]
    assert gradient[0, [0, 3, 4, 5, 6]].abs().max() == 0
    assert gradient[3].abs().max() == 0
