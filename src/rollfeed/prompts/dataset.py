"""A prompt file: read whole, checked, rendered, tokenised and filtered by length, and a source of its prompts.

Invariants: the order depends on the seed, the epoch and the file only; every prompt is tokenised once, when the file is
loaded; what a run began with is what it goes on with.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rollfeed.conversations import AnsweredPrompt
from rollfeed.conversations.picture_places import needed
from rollfeed.errors import ConfigError, DataError
from rollfeed.prompts.files import PromptFile, RawRow, missing_column, open_prompt_file
from rollfeed.prompts.rows import ColumnKeys, RowFields, read_fields
from rollfeed.protocols import PromptRenderer, PromptSource, Rendered
from rollfeed.seeds import derive_seed
from rollfeed.types import Prompt
from rollfeed.types.text import well_formed

RowCheck: TypeAlias = Callable[[Prompt], str | None]
"""Why a row is of no use that could be read, such as a label that its grader cannot compare with; or None."""
Learn: TypeAlias = Callable[[Prompt], AnsweredPrompt]
"""What is learned of a row that has its answer; raises ValueError where nothing is."""


@dataclass(slots=True, kw_only=True)
class LoadedPrompts:
    """The usable prompts of a file in its order, and what was left out."""

    name: str
    prompts: list[Prompt] = field(default_factory=list)
    """Their ids are ``name/row``, the row counted from 0 over the whole file."""
    num_over_length: int = 0
    """Prompts over ``rollout_max_prompt_len`` tokens."""
    shortest_over_length: int | None = None
    """Tokens of the shortest of them."""
    num_bad_rows: int = 0
    """Rows that cannot be read or used."""
    first_bad_row: str | None = None
    """What was wrong with it, with file and line."""
    has_answers: bool = False
    """Whether rows have what is to be said, and are learned as they stand."""

    def refuse(self, where: str, error: object, *, is_skipped: bool) -> None:
        """Count a row that cannot be used. Raises DataError unless it is to be skipped."""
        problem = f"{where}: {error}"
        if not is_skipped:
            raise DataError(f"{problem}; mend the row, or set skip_bad_rows = true")
        self.num_bad_rows += 1
        self.first_bad_row = self.first_bad_row or problem


def load_prompts(
    path: str,
    *,
    renderer: PromptRenderer,
    name: str | None = None,
    keys: ColumnKeys | None = None,
    apply_chat_template: bool = True,
    skip_bad_rows: bool = False,
    check_row: RowCheck | None = None,
    learn: Learn | None = None,
    split: str | None = None,
    no_images: str | None = None,
) -> LoadedPrompts:
    """Read a prompt file, so that a mistake in it shows before anything else starts.

    Args:
        path: As :func:`rollfeed.prompts.files.open_prompt_file` takes it; ``path@[start:stop]`` is a slice.
        renderer: Makes token ids, holds the length limit, and has what loads pictures, whose paths are relative to the
            file.
        name: Names the source in prompt ids; by default the file's stem, or the folder's name.
        keys: Which column holds what.
        apply_chat_template: Render through the chat template; False takes texts as they are.
        skip_bad_rows: Count and skip rows that cannot be read or used.
        check_row: Says why a row cannot be used that could be read.
        learn: Says what is learned of a row that has its answer, whose whole length then counts.
        split: Of a folder or a data set of the hub that has several.
        no_images: Why what answers takes no pictures; rows that have any are refused then.

    Raises:
        DataError: If the file or a row cannot be used, or no prompt is left.
        ConfigError: If the model has no chat template but one is to be applied, rows have pictures that nothing takes,
            or ``check_row`` raises it.
    """
    keys = keys or ColumnKeys()
    file = open_prompt_file(path, columns={column for _, column in keys.named()}, split=split)
    if apply_chat_template:
        renderer.check_template()  # a missing one is no fault of a row
    loaded = LoadedPrompts(name=name or well_formed(file.name), has_answers=learn is not None)
    records = _parsed(file.rows, loaded, skip_bad_rows)
    for raw, record in _with_columns(file, keys, records):
        if no_images is not None and any(record.get(key) for key in (keys.image_key, keys.video_key) if key):
            raise ConfigError(f"{file.path}: {loaded.name}/{raw.number} has images, and {no_images}")
        try:
            row = read_fields(record, keys, is_chat=apply_chat_template)
            where = f"{loaded.name}/{raw.number}"
            prompt, token_ids = _make_prompt(row, renderer, where, file.path.parent, apply_chat_template, learn)
        except ValueError as error:
            loaded.refuse(raw.where, error, is_skipped=skip_bad_rows)
            continue
        if not renderer.fits(token_ids):
            loaded.num_over_length += 1
            shortest, length = loaded.shortest_over_length, len(token_ids)
            loaded.shortest_over_length = length if shortest is None else min(shortest, length)
        elif check_row is not None and (problem := check_row(prompt)) is not None:
            loaded.refuse(raw.where, problem, is_skipped=skip_bad_rows)
        else:
            loaded.prompts.append(prompt)
    _check_not_empty(str(file.path), loaded)
    return loaded


def _with_columns(
    file: PromptFile, keys: ColumnKeys, records: Iterable[tuple[RawRow, Mapping[str, Any]]]
) -> Iterable[tuple[RawRow, Mapping[str, Any]]]:
    """Return the rows of a file that has the columns. Raises DataError where it lacks one."""
    columns = file.columns
    if columns is None:
        records = list(records)
        columns = tuple(dict.fromkeys(column for _, record in records for column in record))
    for key, column in keys.named() if columns else ():
        if column not in columns:
            raise missing_column(file.path, key, column, columns)
    return records


def _parsed(
    rows: Iterable[RawRow], loaded: LoadedPrompts, skip_bad_rows: bool
) -> Iterator[tuple[RawRow, Mapping[str, Any]]]:
    for raw in rows:
        try:
            record = raw.read()
        except ValueError as error:
            loaded.refuse(raw.where, error, is_skipped=skip_bad_rows)
            continue
        yield raw, record


def _make_prompt(
    row: RowFields, renderer: PromptRenderer, prompt_id: str, folder: Path, is_chat: bool, learn: Learn | None
) -> tuple[Prompt, NDArray[np.int32]]:
    """Return the prompt, and the tokens that have to fit."""
    if learn is None or not is_chat:
        rendered = renderer.render(
            row.content,
            apply_chat_template=is_chat,
            tools=row.tools,
            images=[needed(renderer.loader).load(each, folder=folder) for each in row.images],
            videos=[needed(renderer.loader).load_video(each, folder=folder) for each in row.videos],
            folder=folder,
        )
    else:
        messages = ({"role": "user", "content": row.content},) if isinstance(row.content, str) else row.content
        rendered = Rendered("", np.empty(0, np.int32), messages, row.tools)
    prompt = Prompt(
        prompt_id=prompt_id,
        source=prompt_id.rpartition("/")[0],
        **rendered._asdict(),
        label=row.label,
        metadata=row.metadata,
    )
    if learn is None:
        return prompt, prompt.token_ids
    learned = learn(prompt)
    return learned.prompt, learned.token_ids


def _check_not_empty(path: str, loaded: LoadedPrompts) -> None:
    if loaded.num_over_length and not loaded.prompts:
        what, limit = ("conversation", "context_length") if loaded.has_answers else ("prompt", "rollout_max_prompt_len")
        raise DataError(
            f"{path}: every {what} ({loaded.num_over_length}) is longer than {limit}; "
            f"the shortest has {loaded.shortest_over_length} tokens: raise the limit or shorten the {what}s"
        )
    if not loaded.prompts:
        raise DataError(f"{path}: no row can be used, {loaded.num_bad_rows} are bad; the first: {loaded.first_bad_row}")


class DatasetSource(PromptSource):
    """Hands out the prompts of a file, epoch after epoch.

    With ``rollout_shuffle`` each epoch is shuffled anew, by (seed, epoch); without ``num_epoch`` it never ends.
    """

    def __init__(
        self, loaded: LoadedPrompts, *, seed: int, rollout_shuffle: bool = False, num_epoch: int | None = None
    ) -> None:
        self.loaded = loaded
        self.name = loaded.name
        self.prompts: Sequence[Prompt] = loaded.prompts
        """Those of an epoch, in the order of the file."""
        self._seed = seed
        self._rollout_shuffle = rollout_shuffle
        self._num_epoch = num_epoch
        self._content_digest = _digest(loaded)
        self._go_to(0, 0)

    def __len__(self) -> int:
        """Return the number of prompts in an epoch."""
        return len(self.prompts)

    @property
    def is_endless(self) -> bool:
        """Whether it starts over for ever."""
        return self._num_epoch is None

    async def draw(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts, over the epoch's end where needed; fewer only after the last epoch."""
        drawn: list[Prompt] = []
        while len(drawn) < count and (self._num_epoch is None or self._epoch < self._num_epoch):
            index = self._order[self._cursor]
            if self._asks(index):
                prompt = self.prompts[index]
                drawn.append(replace(prompt, prompt_id=f"{prompt.prompt_id}@e{self._epoch}"))
            if self._cursor + 1 < len(self.prompts):
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
        for key, ours in self._identity().items():
            if state.get(key) != ours:
                also = "the file, or the model's tokenizer or chat template, has changed: "
                raise ConfigError(
                    f"data set {self.name}: {key} is {ours!r}, but the run began with {state.get(key)!r}: "
                    f"{also if key == 'content_digest' else ''}restore the file and the settings, or start a new run"
                )
        self._go_to(state["epoch"], state["cursor"])

    def _asks(self, index: int) -> bool:
        """Whether the row whose turn it is is asked in this epoch."""
        return True

    def _go_to(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._order = list(range(len(self.prompts)))
        if self._rollout_shuffle:
            Random(derive_seed(self._seed, "shuffle", epoch)).shuffle(self._order)

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": len(self.prompts),
            "shuffle_seed": self._seed if self._rollout_shuffle else None,
            "content_digest": self._content_digest,
        }


def _digest(loaded: LoadedPrompts) -> str:
    """Return a digest of all that a rollout gets to see, row numbers included."""
    digest = blake2b(digest_size=16)
    for prompt in loaded.prompts:
        seen = [prompt.prompt_id, prompt.text, prompt.label, prompt.metadata, prompt.tools]
        seen.append([picture.content_hash for picture in prompt.images])
        digest.update(json.dumps([*seen, prompt.messages] if loaded.has_answers else seen, sort_keys=True).encode())
    return digest.hexdigest()
