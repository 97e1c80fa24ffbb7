"""slime's data sources as prompt sources of ours."""

from __future__ import annotations

import base64
import inspect
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollfeed.compat.slime_plugins.adapters import in_groups
from rollfeed.compat.slime_plugins.read_back import slime_sample
from rollfeed.compat.slime_plugins.shared_run import SlimeRun
from rollfeed.compat.slime_plugins.slime_paths import GENERATE_PATH, REWARD_FN, SLIME
from rollfeed.compat.slime_plugins.supplied import sample_class
from rollfeed.errors import PluginError
from rollfeed.faults import complaint, name_of
from rollfeed.protocols import PromptSource, Tokenizer
from rollfeed.types import Group, Prompt

KEY = "plugins.prompt_source"


class SlimeSource(PromptSource):
    """A class made with ``args`` that has ``get_samples(n)``; or a function of the number of groups.

    Its state is the files that its ``save`` writes below ``args.save``; where it writes none, it is brought to its
    position by drawing as many groups again.

    Args:
        factory: The class, or the function.
        run: Whose arguments it is given.
        tokenizer: The policy's.
    """

    def __init__(self, factory: Any, run: SlimeRun, tokenizer: Tokenizer) -> None:
        self._run, self._tokenizer, self._factory, self._num_drawn = run, tokenizer, factory, 0
        self.__wrapped__ = factory
        run.tokenizer = tokenizer
        self._folder = Path(tempfile.mkdtemp(prefix="slime-source-"))
        vars(run.args).update(save=str(self._folder), load=str(self._folder))
        is_class = inspect.isclass(factory)
        self._source: Any = factory(run.args) if is_class else None
        self._get: Any = factory if self._source is None else getattr(self._source, "get_samples", None)
        if not callable(self._get):
            raise PluginError(f"{KEY}: {name_of(factory)} has no get_samples(num_samples)")
        path = run.args.rollout_all_samples_process_path
        self._process = None if path is None else run.load(path)

    def __del__(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    async def draw(self, count: int) -> Sequence[Prompt]:
        """Return the prompts of the next groups."""
        groups = self._get(count)
        if not isinstance(groups, list) or len(groups) > count or not all(isinstance(each, list) for each in groups):
            told = f"returned {groups!r:.80} for {count} groups; it must return a list of groups of samples"
            raise complaint(KEY, self._factory, told)
        prompts = [self._prompt(group, self._num_drawn + number) for number, group in enumerate(groups)]
        self._num_drawn += len(prompts)
        return prompts

    def _prompt(self, group: list[Any], number: int) -> Prompt:
        size, name = self._run.args.n_samples_per_prompt, name_of(self._factory)
        if len(group) != size or not all(hasattr(each, "prompt") for each in group):
            told = f"gave a group of {len(group)} samples, n_samples_per_prompt is {size}"
            raise complaint(KEY, self._factory, told)
        first = group[0]
        same = ("prompt", "label", GENERATE_PATH, "custom_rm_path")
        if any(getattr(each, name, None) != getattr(first, name, None) for each in group for name in same):
            raise complaint(
                KEY, self._factory, "gave a group whose samples have different prompts, labels or functions"
            )
        if not first.prompt:
            raise complaint(KEY, self._factory, "gave a sample without a prompt")
        if any((first.multimodal_inputs or {}).values()):
            raise complaint(KEY, self._factory, "gave a sample with pictures: bring them by [[prompts.datasets]]")
        metadata = dict(first.metadata or {})
        tools = metadata.pop("tools", None)
        if path := getattr(first, GENERATE_PATH, None):
            metadata[GENERATE_PATH] = path
        if path := getattr(first, "custom_rm_path", None):
            metadata[REWARD_FN] = f"{SLIME}{path}"
        messages = None if isinstance(first.prompt, str) else tuple(first.prompt)
        text = first.prompt if messages is None else self._tokenizer.render_chat(messages, tools=tools)
        return Prompt(
            prompt_id=f"{name}/{number}",
            source=name,
            text=text,
            token_ids=np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32),
            messages=messages,
            label=first.label,
            metadata=metadata,
            tools=None if tools is None else tuple(tools),
        )

    def learn(self, group: Group) -> None:
        """Hand a scored group to the function of ``rollout_all_samples_process_path``, where there is one."""
        if self._process is not None:
            made = [slime_sample(sample, group.prompt, sample_class()) for sample in group.samples]
            self._process(self._run.args, [in_groups(made)], self._source)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the files that the source writes."""
        save = getattr(self._source, "save", None)
        if callable(save):
            save(0)
        files = sorted(file for file in self._folder.rglob("*") if file.is_file())
        content = {str(file.relative_to(self._folder)): base64.b64encode(file.read_bytes()).decode() for file in files}
        return {"num_drawn": self._num_drawn, "files": content}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state that :meth:`state_dict` returned."""
        for name, content in state["files"].items():
            file = (self._folder / name).resolve()
            if not file.is_relative_to(self._folder.resolve()):
                raise PluginError(f"{KEY}: its state names a file {name!r} outside of its folder")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(base64.b64decode(content))
        if state["files"]:
            self._source.load(0)
        elif state["num_drawn"]:
            self._get(state["num_drawn"])
        self._num_drawn = state["num_drawn"]
