"""A prompt file as a source of prompts.

Invariants: the order depends on the seed, the epoch and the file only; every prompt is tokenised once, when
the source is made; what a run began with is what it goes on with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from random import Random
from typing import Any

from rollfeed.errors import ConfigError
from rollfeed.prompts.loader import PromptLoader, RowCheck
from rollfeed.prompts.rows import ColumnKeys
from rollfeed.protocols import PromptRenderer, PromptSource
from rollfeed.seeds import derive_seed
from rollfeed.types import Prompt


class DatasetSource(PromptSource):
    """Hands out the prompts of a file, epoch after epoch.

    Everything is read, checked and tokenised when the source is made, so that a mistake shows before
    anything else starts.

    Args:
        path: A ``.jsonl`` or ``.parquet`` file, or a slice of it: ``path@[start:stop]``.
        renderer: Makes token ids, and holds the length limit.
        seed: Of the shuffle; used with ``rollout_shuffle``.
        name: Names the source in prompt ids; by default the file's stem.
        keys: Which column holds what.
        apply_chat_template: Render through the chat template; False takes texts as they are.
        rollout_shuffle: Shuffle anew each epoch, by (seed, epoch).
        num_epoch: End after this many epochs; None never ends.
        skip_bad_rows: Count and skip rows that cannot be read or used.
        check_row: Says why a row cannot be used that could be read.

    Raises:
        DataError: If the file or a row cannot be used, or no prompt is left.
        ConfigError: If the model has no chat template but one is to be applied.
    """

    def __init__(
        self,
        path: str,
        *,
        renderer: PromptRenderer,
        seed: int,
        name: str | None = None,
        keys: ColumnKeys | None = None,
        apply_chat_template: bool = True,
        rollout_shuffle: bool = False,
        num_epoch: int | None = None,
        skip_bad_rows: bool = False,
        check_row: RowCheck | None = None,
    ) -> None:
        loader = PromptLoader(
            renderer=renderer,
            keys=keys or ColumnKeys(),
            apply_chat_template=apply_chat_template,
            skip_bad_rows=skip_bad_rows,
            check_row=check_row,
        )
        loaded = loader.load(path, name=name)
        self.name = loaded.name
        self.num_over_length = loaded.num_over_length
        """Prompts left out because they are over ``rollout_max_prompt_len`` tokens."""
        self.num_bad_rows = loaded.num_bad_rows
        """Rows left out because they cannot be read or used."""
        self.first_bad_row = loaded.first_bad_row
        """What was wrong with the first of them, with file and line."""
        self._prompts = loaded.prompts
        self._seed = seed
        self._rollout_shuffle = rollout_shuffle
        self._num_epoch = num_epoch
        self._content_digest = _digest(loaded.prompts)
        self._go_to(0, 0)

    def __len__(self) -> int:
        """Return the number of prompts in an epoch."""
        return len(self._prompts)

    @property
    def is_endless(self) -> bool:
        """Whether it starts over for ever."""
        return self._num_epoch is None

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Those of an epoch, in the order of the file."""
        return self._prompts

    async def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts, over the epoch's end where needed; fewer only after the last epoch."""
        drawn: list[Prompt] = []
        while len(drawn) < count and (self._num_epoch is None or self._epoch < self._num_epoch):
            prompt = self._prompts[self._order[self._cursor]]
            drawn.append(replace(prompt, prompt_id=f"{prompt.prompt_id}@e{self._epoch}"))
            if self._cursor + 1 < len(self._prompts):
                self._cursor += 1
            else:
                self._go_to(self._epoch + 1, 0)
        return drawn

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and cursor, and what they belong to."""
        return {**self._identity(), "epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that :meth:`state_dict` returned.

        Raises:
            ConfigError: If the prompts or their order are not those of the run that returned it.
        """
        ours = self._identity()
        for key in ("num_rows", "shuffle_seed"):
            if state.get(key) != ours[key]:
                raise ConfigError(
                    f"data set {self.name}: {key} is {ours[key]!r}, but the run began with {state.get(key)!r}: "
                    "restore the file and the settings, or start a new run"
                )
        if state.get("content_digest") != ours["content_digest"]:
            raise ConfigError(
                f"data set {self.name}: content_digest is {ours['content_digest']!r}, but the run began with "
                f"{state.get('content_digest')!r}: the file, or the model's tokenizer or chat template, has changed: "
                "restore the file and the settings, or start a new run"
            )
        self._go_to(state["epoch"], state["cursor"])

    def _go_to(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._order = list(range(len(self._prompts)))
        if self._rollout_shuffle:
            Random(derive_seed(self._seed, "shuffle", epoch)).shuffle(self._order)

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": len(self._prompts),
            "content_digest": self._content_digest,
            "shuffle_seed": self._seed if self._rollout_shuffle else None,
        }


def _digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest of all that a rollout gets to see, row numbers included."""
    digest = blake2b(digest_size=16)
    for prompt in prompts:
        seen = [prompt.prompt_id, prompt.text, prompt.label, prompt.metadata, prompt.tools, prompt.images]
        digest.update(json.dumps(seen, sort_keys=True).encode())
    return digest.hexdigest()
