"""slime's tokenizer, loss masks, and small helpers."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rollfeed.compat.slime_plugins.shared_run import SlimeUseError, latest
from rollfeed.conversations import LossMaskType, conversation_tokens
from rollfeed.engine import resolve_checkpoint
from rollfeed.prompts import load_tokenizer as load_own_tokenizer
from rollfeed.protocols import Tokenizer

T = TypeVar("T")


def load_function(path: str) -> Any:
    """Return what ``module.name`` names."""
    return latest().load(path)


class SingletonMeta(type):
    """The type of classes that have one object: that of the first call."""

    _made: dict[type, Any] = {}  # noqa: RUF012 - of the metaclass, as its users expect

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return the class's object."""
        if cls not in cls._made:
            cls._made[cls] = super().__call__(*args, **kwargs)
        return cls._made[cls]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, in a loop and a thread of its own, and return its result."""
    done: Future[T] = Future()
    context = contextvars.copy_context()

    def complete() -> None:
        try:
            done.set_result(asyncio.run(work))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=context.run, args=(complete,), name="slime run", daemon=True).start()
    return done.result()


class SlimeTokenizer:
    """A tokenizer as slime's plug-ins call one; what else a transformers tokenizer has is asked of that."""

    def __init__(self, own: Tokenizer) -> None:
        self.own = own

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True, **others: Any) -> dict[str, Any]:
        """Return ``input_ids`` and ``attention_mask`` of a text, or a list of each for several."""
        if others.pop("return_tensors", None) is not None:
            raise SlimeUseError("tokenizer(..., return_tensors=...): lists are returned here, no tensors")
        if not isinstance(text, str):
            ids = [self.encode(each, add_special_tokens=add_special_tokens) for each in text]
            return {"input_ids": ids, "attention_mask": [[1] * len(each) for each in ids]}
        one = self.encode(text, add_special_tokens=add_special_tokens)
        return {"input_ids": one, "attention_mask": [1] * len(one)}

    def encode(self, text: str, *, add_special_tokens: bool = True, **others: Any) -> list[int]:
        """Return token ids."""
        del others
        return list(map(int, self.own.encode(text, add_special_tokens=add_special_tokens)))

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **others: Any) -> str:
        """Return text."""
        del others
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.own.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any = None,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> Any:
        """Return the rendered text, or its token ids."""
        unknown = {"return_tensors", "return_dict", "continue_final_message"} & variables.keys()
        if unknown:
            raise SlimeUseError(f"apply_chat_template({sorted(unknown)[0]}=...) is not supplied")
        variables.pop("add_special_tokens", None)
        text = self.own.render_chat(
            messages, tools=tools, template_kwargs=variables, add_generation_prompt=add_generation_prompt
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    @property
    def eos_token_id(self) -> int | None:
        """The first of the ids that end a response."""
        return next(iter(self.own.eos_token_ids), None)

    def __getattr__(self, name: str) -> Any:
        inner = vars(self).get("own")
        found = getattr(inner, "_tokenizer", None)
        if name.startswith("__") or found is None:
            raise AttributeError(f"the tokenizer has no {name!r}")
        return getattr(found, name)


def load_tokenizer(name_or_path: str, **options: Any) -> SlimeTokenizer:
    """Return the run's tokenizer where its checkpoint is named; else that of another folder."""
    run_ = latest()
    if run_.tokenizer is not None and name_or_path == run_.args.hf_checkpoint:
        return SlimeTokenizer(run_.tokenizer)
    folder: Path = resolve_checkpoint(name_or_path, with_weights=False)
    return SlimeTokenizer(load_own_tokenizer(folder, trust_remote_code=bool(options.get("trust_remote_code"))))


def load_processor(name_or_path: str, **options: Any) -> None:
    """Return None: images are expanded by what serves them."""
    del name_or_path, options


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what a processor would be called with."""
    return dict(multimodal_inputs or {})


def encode_image_for_rollout_engine(image: Any) -> Any:
    """Return an image as the engine takes it: paths and addresses as they are.

    Raises:
        SlimeUseError: If it is another object.
    """
    if not isinstance(image, str):
        raise SlimeUseError(f"encode_image_for_rollout_engine: a {type(image).__name__}; give a path or an address")
    return image


class MultiTurnLossMaskGenerator:
    """Tokens of conversations, and which of them are learned, of one full render of the chat template."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        if not isinstance(tokenizer, SlimeTokenizer):
            raise SlimeUseError("MultiTurnLossMaskGenerator: give it the tokenizer that load_tokenizer returns")
        self.tokenizer = tokenizer
        known = {"qwen3_5": LossMaskType.QWEN3, **{each.value: each for each in LossMaskType}}
        if tokenizer_type not in known:
            raise SlimeUseError(f"MultiTurnLossMaskGenerator: no type {tokenizer_type!r}; there are {', '.join(known)}")
        self._mask_type = known[tokenizer_type]

    def get_loss_mask(self, messages: Any, tools: Any = None) -> tuple[list[int], list[int]]:
        """Return token ids, and 1 for each that is learned."""
        ids, mask = conversation_tokens(self.tokenizer.own, messages, tools=tools, mask_type=self._mask_type)
        return ids.tolist(), mask.astype(int).tolist()

    def get_response_lengths(self, loss_masks: Sequence[Sequence[int]]) -> list[int]:
        """Return the number of tokens from the first learned one to the end, each."""
        return [len(mask) - list(mask).index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: Sequence[int], loss_masks: Sequence[int]) -> list[str]:
        """Return the pieces of text that are learned."""
        pieces: list[list[int]] = []
        for position, (token, weight) in enumerate(zip(token_ids, loss_masks, strict=True)):
            if weight and position and loss_masks[position - 1]:
                pieces[-1].append(token)
            elif weight:
                pieces.append([token])
        return [self.tokenizer.decode(piece) for piece in pieces]
