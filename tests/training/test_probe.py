"""What the trainer says of the texts of a probe: as an engine with its weights does, and without a trace in them."""

import numpy as np
import pytest
import torch

from rollfeed.training.probe import choose_texts, rounding_by_name, score_texts

TEXTS = [np.arange(10, 50, dtype=np.int32), np.array([7, 9], np.int32), np.arange(90, 60, -1, dtype=np.int32)]


def expected(model) -> np.ndarray:
    with torch.no_grad():
        logprobs = [model(torch.tensor(text[None].astype(np.int64))).logits[0].log_softmax(-1) for text in TEXTS]
    return np.concatenate(
        [rows[np.arange(len(text) - 1), text[1:]].numpy() for rows, text in zip(logprobs, TEXTS, strict=True)]
    )


def to_bf16(module: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
    return weight.bfloat16().float()


@pytest.mark.parametrize("micro_batch_tokens", [2, 64, 4096])
def test_texts_are_scored_before_any_temperature(make_trainer, micro_batch_tokens) -> None:
    policy = make_trainer().policy
    policy._temperature = 0.5
    scored = score_texts(policy, TEXTS, rounding=None, micro_batch_tokens=micro_batch_tokens)
    np.testing.assert_allclose(scored, expected(policy.model), atol=1e-5)


def test_texts_are_scored_in_fp32_whatever_training_computes_in(make_trainer) -> None:
    policy = make_trainer(precision="bf16").policy
    scored = score_texts(policy, TEXTS, rounding=None, micro_batch_tokens=64)
    np.testing.assert_allclose(scored, expected(policy.model), atol=1e-5)


def test_rounded_weights_are_rounded_everywhere_and_exact_again_afterwards(make_trainer) -> None:
    model = make_trainer().policy.model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    scored = score_texts(make_trainer().policy, TEXTS, rounding=to_bf16, micro_batch_tokens=64)
    policy = make_trainer().policy
    again = score_texts(policy, TEXTS, rounding=to_bf16, micro_batch_tokens=64)
    np.testing.assert_array_equal(scored, again)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.copy_(parameter.bfloat16())
    np.testing.assert_allclose(scored, expected(policy.model), atol=1e-5)
    assert np.abs(scored - expected(model)).max() > 1e-3


def test_weights_are_exact_again_after_a_pass_that_fails(make_trainer) -> None:
    policy = make_trainer().policy
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}

    def fail_late(module: torch.nn.Module, weight: torch.Tensor) -> torch.Tensor:
        if module is policy.model.model.norm:
            raise RuntimeError("no memory")
        return weight.bfloat16().float()

    with pytest.raises(RuntimeError, match="no memory"):
        score_texts(policy, TEXTS, rounding=fail_late, micro_batch_tokens=64)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.model.state_dict().items())
    np.testing.assert_allclose(
        score_texts(policy, TEXTS, rounding=None, micro_batch_tokens=64), expected(policy.model), atol=1e-5
    )


def test_texts_are_where_prompts_end_and_answers_begin_each_of_another_group(group_of, sample_of, batch_of) -> None:
    def group(number: int):
        prompt = [1, *range(50, 80), 100 + number]
        return group_of(
            number,
            [
                [
                    sample_of(
                        prompt,
                        range(200 + 20 * member, 210 + 30 * member),
                        group_index=number,
                        index=2 * number + member,
                        rollout_id=2 * number + member,
                    )
                ]
                for member in range(2)
            ],
        )

    batch = batch_of([group(number) for number in range(3)], [0.0] * 6)
    texts = choose_texts(batch, num_texts=4, num_tokens=16)
    assert [text.tolist()[:1] for text in texts] == [[1]] * 4
    assert all(len(text) == 16 for text in texts)
    assert [int(text[text < 200].max()) for text in texts] == [100, 101, 102, 100]
    assert all((text >= 200).sum() >= 7 for text in texts)
    everything = choose_texts(batch, num_texts=100, num_tokens=1000)
    assert len(everything) == 6
    assert len(everything[0]) == len(batch.samples[0].token_ids)


def test_weights_are_rounded_by_the_names_of_the_checkpoint(make_trainer) -> None:
    trainer = make_trainer()
    policy, name = trainer.policy, "model.layers.1.mlp.up_proj.weight"

    def rounded(given: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2 if given == name else tensor

    rounding = rounding_by_name(trainer.weights(), rounded)
    scored = score_texts(policy, TEXTS, rounding=rounding, micro_batch_tokens=64)
    before = expected(policy.model)
    with torch.no_grad():
        policy.model.model.layers[1].mlp.up_proj.weight.mul_(2)
    np.testing.assert_allclose(scored, expected(policy.model), atol=1e-5)
    assert np.abs(scored - before).max() > 1e-3
