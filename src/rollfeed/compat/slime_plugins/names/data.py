"""slime's data sets and data sources, for plug-ins that inherit from them."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from rollfeed.compat.slime_plugins.names.helpers import load_function, load_tokenizer
from rollfeed.compat.slime_plugins.names.slime_sample import SlimeSample
from rollfeed.compat.slime_plugins.shared_run import SlimeUseError
from rollfeed.errors import DataError
from rollfeed.prompts.files import open_prompt_file


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Give the rows of a JSONL or Parquet file, or of a slice ``path@[a:b]``.

    Raises:
        DataError: If it cannot be read, with file and line.
    """
    for row in open_prompt_file(path, columns=None).rows:
        try:
            yield row.read()
        except ValueError as error:
            raise DataError(f"{row.where}: {error}") from None


class Dataset:
    """The rows of a file as samples, in an order that depends on seed and epoch."""

    def __init__(
        self,
        path: str,
        tokenizer: Any = None,
        processor: Any = None,
        max_length: Any = None,
        *,
        prompt_key: str = "text",
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        multimodal_keys: Any = None,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
        seed: int = 42,
    ) -> None:
        if multimodal_keys:
            raise SlimeUseError("Dataset(multimodal_keys=...) is not supplied: name image_key of [[prompts.datasets]]")
        del processor
        self.origin_samples: list[SlimeSample] = []
        for row in read_file(path):
            prompt, metadata = row[prompt_key], row.get(metadata_key) or {}
            metadata = json.loads(metadata) if isinstance(metadata, str) else dict(metadata)
            tools = row.get(tool_key) if tool_key else None
            tools = json.loads(tools) if isinstance(tools, str) else tools
            if tools is not None:
                metadata["tools"] = list(tools)
            if apply_chat_template:
                messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
                variables = apply_chat_template_kwargs or {}
                prompt = tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=True, **variables
                )
            is_limited = max_length is not None and isinstance(prompt, str)
            if is_limited and len(tokenizer.encode(prompt, add_special_tokens=False)) > max_length:
                continue
            label = row.get(label_key) if label_key else None
            self.origin_samples.append(SlimeSample(prompt=prompt, label=label, metadata=metadata))
        self.samples, self.seed, self.epoch_id = self.origin_samples, seed, -1

    def shuffle(self, new_epoch_id: int) -> None:
        """Put the samples into an epoch's order."""
        if self.epoch_id != new_epoch_id:
            self.samples = Random(self.seed + new_epoch_id).sample(self.origin_samples, len(self.origin_samples))
            self.epoch_id = new_epoch_id

    def __getitem__(self, index: int) -> SlimeSample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


class DataSource(ABC):
    """Gives groups of samples, and takes some back."""

    @abstractmethod
    def get_samples(self, num_samples: int) -> list[list[SlimeSample]]:
        """Return so many groups."""

    def add_samples(self, samples: list[list[SlimeSample]]) -> None:
        """Take groups back."""
        raise SlimeUseError(f"{type(self).__name__} takes no samples back")

    def save(self, rollout_id: int) -> None:
        """Write the state below ``args.save``; by default nothing."""
        return None

    def load(self, rollout_id: int | None = None) -> None:
        """Read the state from below ``args.load``; by default nothing."""
        return None

    def __len__(self) -> int:
        return 0


class RolloutDataSource(DataSource):
    """The prompts of ``args.prompt_data``, epoch after epoch."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.epoch_id = self.sample_group_index = self.sample_index = self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self.dataset: Dataset | None = None
        if args.prompt_data is not None:
            self.dataset = Dataset(
                args.prompt_data,
                load_tokenizer(args.hf_checkpoint),
                max_length=args.rollout_max_prompt_len,
                prompt_key=args.input_key,
                label_key=args.label_key,
                metadata_key=args.metadata_key or "metadata",
                tool_key=args.tool_key,
                apply_chat_template=args.apply_chat_template,
                apply_chat_template_kwargs=args.apply_chat_template_kwargs,
                seed=args.rollout_seed,
            )
            if not len(self.dataset):
                raise DataError(f"{args.prompt_data}: no prompt that can be used")
            self._order()

    def get_samples(self, num_samples: int) -> list[list[SlimeSample]]:
        """Return so many groups, each with copies of one prompt."""
        return [self._group(self._next()) for _ in range(num_samples)]

    def _next(self) -> SlimeSample:
        if self.dataset is None:
            return SlimeSample()
        if self.sample_offset >= len(self.dataset):
            self.sample_offset, self.epoch_id = 0, self.epoch_id + 1
            self._order()
        self.sample_offset += 1
        return self.dataset[self.sample_offset - 1]

    def _group(self, prompt: SlimeSample) -> list[SlimeSample]:
        group = [copy.deepcopy(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
        self.sample_group_index += 1
        return group

    def _order(self) -> None:
        if self.dataset is not None and self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)

    _STATE = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")

    def _state_file(self, folder: str, rollout_id: int | None) -> Path:
        return Path(folder) / "rollout" / f"global_dataset_state_dict_{rollout_id}.json"

    def save(self, rollout_id: int) -> None:
        """Write the position below ``args.save``, as JSON."""
        file = self._state_file(self.args.save, rollout_id)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({name: getattr(self, name) for name in self._STATE}))

    def load(self, rollout_id: int | None = None) -> None:
        """Read the position from below ``args.load``, where there is one."""
        file = self._state_file(self.args.load, rollout_id)
        if file.exists():
            vars(self).update(json.loads(file.read_text()))
            self._order()

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)


def pop_first(args: Any, rollout_id: int | None, buffer: list[Any], num_samples: int) -> list[Any]:
    """Take the groups out of a buffer that have waited longest."""
    del args, rollout_id
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """With groups that were given back, which go first."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.buffer: list[list[SlimeSample]] = []
        path = args.buffer_filter_path
        self.buffer_filter = pop_first if path is None else load_function(path)

    def get_samples(self, num_samples: int) -> list[list[SlimeSample]]:
        """Return so many groups, those of the buffer first."""
        taken = self.buffer_filter(self.args, None, self.buffer, num_samples) if self.buffer and num_samples else []
        return taken + super().get_samples(num_samples - len(taken))

    def add_samples(self, samples: Sequence[list[SlimeSample]]) -> None:
        """Put groups into the buffer."""
        for group in samples:
            if len(group) != self.args.n_samples_per_prompt:
                raise SlimeUseError(
                    f"add_samples: a group of {len(group)}, n_samples_per_prompt is {self.args.n_samples_per_prompt}"
                )
            self.buffer.append(group)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Note something, to be saved."""
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        """Return what was noted."""
        return self.metadata

    def get_buffer_length(self) -> int:
        """Return how many groups wait."""
        return len(self.buffer)
