"""A prompt file read whole: checked, rendered, tokenised, and filtered by length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from rollfeed.errors import DataError
from rollfeed.prompts.files import RawRow, missing_column, open_prompt_file
from rollfeed.prompts.rows import ColumnKeys, RowFields, read_fields
from rollfeed.protocols import PromptRenderer
from rollfeed.types import Prompt
from rollfeed.types.text import well_formed

RowCheck: TypeAlias = Callable[[Prompt], str | None]
"""Why a row is of no use that could be read, such as a label that its grader cannot compare with; or None."""


@dataclass(slots=True, kw_only=True)
class LoadedPrompts:
    """The usable prompts of a file in its order, and what was left out."""

    name: str
    prompts: list[Prompt] = field(default_factory=list)
    """Their ids are ``name/row``, the row counted from 0 over the whole file."""
    num_over_length: int = 0
    shortest_over_length: int | None = None
    """Tokens of the shortest prompt over the limit."""
    num_bad_rows: int = 0
    first_bad_row: str | None = None
    """What was wrong with it, with file and line."""


class PromptLoader:
    """Reads prompt files by one set of settings."""

    def __init__(
        self,
        *,
        renderer: PromptRenderer,
        keys: ColumnKeys,
        apply_chat_template: bool,
        skip_bad_rows: bool,
        check_row: RowCheck | None = None,
    ) -> None:
        self._renderer = renderer
        self._keys = keys
        self._apply_chat_template = apply_chat_template
        self._skip_bad_rows = skip_bad_rows
        self._check_row = check_row

    def load(self, path: str, *, name: str | None) -> LoadedPrompts:
        """Read ``path`` or ``path@[start:stop]``; the name is by default the file's stem.

        Raises:
            DataError: If the file or a row cannot be used, or no prompt is left.
            ConfigError: If the model has no chat template but one is to be applied, or ``check_row`` raises it.
        """
        if self._apply_chat_template:
            self._renderer.check_template()  # a missing one is no fault of a row
        file = open_prompt_file(path, columns=self._keys.named().values())
        loaded = LoadedPrompts(name=name or well_formed(file.path.stem))
        records: Iterable[tuple[RawRow, Mapping[str, Any]]] = self._parse(file.rows, loaded)
        columns = file.columns
        if columns is None:
            records = list(records)
            columns = tuple(dict.fromkeys(column for _, record in records for column in record))
        if columns:
            self._check_columns(file.path, columns)
        for raw, record in records:
            self._add(raw, record, loaded)
        self._check_not_empty(file.path, loaded)
        return loaded

    def _parse(self, rows: Iterable[RawRow], loaded: LoadedPrompts) -> Iterator[tuple[RawRow, Mapping[str, Any]]]:
        for raw in rows:
            try:
                record = raw.read()
            except ValueError as error:
                self._refuse(raw, error, loaded)
                continue
            yield raw, record

    def _add(self, raw: RawRow, record: Mapping[str, Any], loaded: LoadedPrompts) -> None:
        try:
            fields = read_fields(record, self._keys, is_chat=self._apply_chat_template)
            prompt = self._make_prompt(fields, name=loaded.name, number=raw.number)
        except ValueError as error:
            self._refuse(raw, error, loaded)
            return
        if self._renderer.fits(prompt.token_ids):
            problem = None if self._check_row is None else self._check_row(prompt)
            if problem is None:
                loaded.prompts.append(prompt)
            else:
                self._refuse(raw, ValueError(problem), loaded)
            return
        loaded.num_over_length += 1
        shortest = loaded.shortest_over_length
        loaded.shortest_over_length = min(shortest or len(prompt.token_ids), len(prompt.token_ids))

    def _make_prompt(self, row: RowFields, *, name: str, number: int) -> Prompt:
        text, token_ids = self._renderer.render(
            row.content,
            apply_chat_template=self._apply_chat_template,
            tools=row.tools,
            num_images=len(row.images),
        )
        messages = ({"role": "user", "content": row.content},) if isinstance(row.content, str) else row.content
        return Prompt(
            prompt_id=f"{name}/{number}",
            source=name,
            text=text,
            token_ids=token_ids,
            messages=messages if self._apply_chat_template else None,
            label=row.label,
            metadata=row.metadata,
            tools=row.tools,
            images=row.images,
        )

    def _refuse(self, raw: RawRow, error: ValueError, loaded: LoadedPrompts) -> None:
        problem = f"{raw.where}: {error}"
        if not self._skip_bad_rows:
            raise DataError(f"{problem}; mend the row, or set skip_bad_rows = true") from error
        loaded.num_bad_rows += 1
        loaded.first_bad_row = loaded.first_bad_row or problem

    def _check_columns(self, path: Path, columns: Sequence[str]) -> None:
        for key, column in self._keys.named().items():
            if column not in columns:
                raise missing_column(path, key, column, columns)

    def _check_not_empty(self, path: Path, loaded: LoadedPrompts) -> None:
        if loaded.prompts:
            return
        if loaded.num_over_length:
            raise DataError(
                f"{path}: every prompt ({loaded.num_over_length}) is longer than rollout_max_prompt_len; "
                f"the shortest has {loaded.shortest_over_length} tokens: raise the limit or shorten the prompts"
            )
        raise DataError(f"{path}: no row can be used, {loaded.num_bad_rows} are bad; the first: {loaded.first_bad_row}")
