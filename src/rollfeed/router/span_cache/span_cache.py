"""Text in, exact tokens out: programs that speak text get the tokens that were sampled, as they were sampled.

Invariant: a sampled token stays what it was, with its log-probability and the version of its policy, in whatever text
it comes again; it is never tokenised anew, and no prompt takes its place.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from rollfeed.base.sglang_wire import RequestError
from rollfeed.engine.client.versions import NamedSpan, VersionNameError, read_spans, version_number
from rollfeed.errors import EngineProtocolError
from rollfeed.protocols import Tokenizer
from rollfeed.router.span_cache.alignment import TextAligner
from rollfeed.router.span_cache.span_tree import SpanTree
from rollfeed.router.span_cache.token_runs import ASKED, PROMPT, TokenRun
from rollfeed.types import VersionSpan
from rollfeed.types.text import well_formed

_BYTES_PER_TOKEN = 16
_LARGEST = float(np.finfo(np.float32).max)
_OTHER_INPUTS = ("input_embeds", "image_data", "video_data", "audio_data")
"""Fields of bodies whose prompts are more than text."""
_LOGPROB_FIELDS = tuple(
    f"{side}_{what}"
    for side in ("input", "output")
    for what in ("token_logprobs", "token_logprobs_length", "top_logprobs", "token_ids_logprobs")
)
"""Fields of ``meta_info`` that a server adds for ``return_logprob``."""


class SpanCacheUse(NamedTuple):
    """The content of a cache, and what it has done since it was made."""

    num_bytes: int
    num_tokens: int
    num_spans: int
    num_evicted_tokens: int
    num_rewritten: int
    """Prompts that came as text."""
    num_reused_tokens: int
    """Tokens of these that were in the cache."""
    num_kept: int
    """Replies."""
    num_not_kept: int
    """Replies that did not say exactly what was sampled."""


class RewrittenBody(dict[str, Any]):
    """A body that is forwarded in place of one with text, and what the cache has to know when the reply comes."""

    def __init__(self, body: Mapping[str, Any], prompts: list[list[TokenRun]]) -> None:
        super().__init__({name: value for name, value in body.items() if name != "text"})
        self.prompts = prompts
        self.wants_logprobs = body.get("return_logprob")
        ids = [b"".join(run.ids for run in runs) for runs in prompts]
        input_ids = [np.frombuffer(each, np.int32).tolist() for each in ids]
        self["input_ids"] = input_ids if isinstance(body["text"], list) else input_ids[0]
        self["return_logprob"] = True

    def prompt(self, index: int) -> list[TokenRun] | None:
        """Return the runs of one prompt; None if there are not so many."""
        return self.prompts[index] if index < len(self.prompts) else None


class SpanCache:
    """Tokens, log-probabilities, loss mask and versions of all that was sampled, found by the text that clients have.

    It may be used from several threads.

    Args:
        tokenizer: The policy's.
        num_tokens: The room, of 16 bytes a token with all that they need; what was used last stays.
        max_version_age: Versions after which what was not used is forgotten, however much room there is; None for
            any.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_tokens: int = 1 << 24, max_version_age: int | None = None) -> None:
        self._aligner = TextAligner(tokenizer)
        self._tree = SpanTree(max_bytes=_BYTES_PER_TOKEN * num_tokens)
        self._lock = threading.Lock()
        self._max_version_age = max_version_age
        self._num_rewritten = self._num_reused_tokens = self._num_kept = self._num_not_kept = 0

    def rewrite(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body that is forwarded in place of one of ``/generate``: token ids in place of its text.

        Sampled text keeps its tokens, and what follows it is tokenised alone. A body without text, or with more than
        text, is returned as it is.
        """
        texts = body.get("text")
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            return body
        if body.get("input_ids") is not None or any(body.get(name) for name in _OTHER_INPUTS):
            return body
        return RewrittenBody(body, [self._prompt(well_formed(text)) for text in texts])

    def keep(self, body: dict[str, Any], reply: dict[str, Any] | list[dict[str, Any]], *, policy_version: int) -> None:
        """Keep what a reply says was sampled, and take out of it what its client has not asked for.

        A reply that has no tokens with log-probabilities, or contradicts itself, is not kept; nor is an event of a
        stream that goes on, or that has only the newest tokens.

        Args:
            body: What was forwarded, as :meth:`rewrite` returned it.
            reply: Of a server; an event of a stream, or a list where the body asks for several.
            policy_version: Of the reply, where it does not say.
        """
        for position, each in enumerate(reply if isinstance(reply, list) else [reply]):
            if not isinstance(each, dict) or not isinstance(each.get("meta_info"), dict):
                continue
            sampling = body.get("sampling_params") or {}
            index = each.get("index")
            index = index if type(index) is int and index >= 0 else position
            if isinstance(sampling, dict):
                index //= sampling.get("n") or 1
            else:
                sampling = sampling[index] if index < len(sampling) else {}
            if each["meta_info"].get("finish_reason") is not None:
                self._keep_one(body, index, sampling, each, policy_version)
            if isinstance(body, RewrittenBody) and not _wanted(body.wants_logprobs, index):
                for name in _LOGPROB_FIELDS:
                    each["meta_info"].pop(name, None)

    def retrieve(self, text: Any) -> dict[str, Any]:
        """Return the reply of ``/retrieve_from_text``: the tokens of a text, and which of them were sampled.

        What is not known of its end is tokenised, and has a mask of 0: ``num_known_characters`` says where it begins.
        Beside slime's fields there are ``weight_versions``, as replies have them, of all sampled tokens.

        Raises:
            RequestError: If this is no text, or nothing of it was sampled.
        """
        if not isinstance(text, str) or not text:
            raise RequestError('give the text, prompt and responses together: {"text": "..."}')
        text = well_formed(text)
        runs, num_known = self._path(text, with_tail=True)
        if all(run.version == PROMPT for run in runs):
            raise RequestError(
                "nothing of this text is known to be sampled: it did not pass through here as it stands, or was "
                "forgotten since to make room",
                status=404,
            )
        num_known_tokens = sum(run.num_tokens for run in runs)
        if num_known < len(text):
            runs.append(self._aligner.prompt(text[num_known:], is_first=False))
        token_ids = np.frombuffer(b"".join(run.ids for run in runs), np.int32).tolist()
        loss_mask: list[int] = []
        versions: list[dict[str, Any]] = []
        for run in runs:
            start, is_sampled = len(loss_mask), run.version != PROMPT
            loss_mask += [int(is_sampled)] * run.num_tokens
            if is_sampled and versions and (versions[-1]["version"], versions[-1]["end"]) == (str(run.version), start):
                versions[-1]["end"] = len(loss_mask)
            elif is_sampled:
                versions.append({"version": str(run.version), "start": start, "end": len(loss_mask)})
        logprobs = b"".join(run.logprobs or bytes(len(run.ids)) for run in runs)
        return {
            "tokens": token_ids,
            "response": text,
            "loss_mask": loss_mask,
            "token_length": len(token_ids),
            "loss_mask_length": len(loss_mask),
            "rollout_logp": np.frombuffer(logprobs, np.float32).tolist(),
            "weight_versions": versions,
            "num_known_tokens": num_known_tokens,
            "num_known_characters": num_known,
        }

    def use(self) -> SpanCacheUse:
        tree = self._tree
        held = (tree.num_bytes, tree.num_tokens, tree.num_nodes, tree.num_evicted_tokens)
        return SpanCacheUse(*held, self._num_rewritten, self._num_reused_tokens, self._num_kept, self._num_not_kept)

    def _path(self, text: str, *, with_tail: bool, ids: bytes | None = None) -> tuple[list[TokenRun], int]:
        """Return the runs of a text's beginning that are known, and how many characters that is."""
        data = text.encode()
        with self._lock:
            found = self._tree.find(data, with_tail=with_tail, ids=ids)
            if found is None:
                return [], 0
            return self._tree.runs_to(found), len(data[: found.reach].decode())

    def _prompt(self, text: str) -> list[TokenRun]:
        runs, num_known = self._path(text, with_tail=False)
        with self._lock:
            self._num_rewritten += 1
            self._num_reused_tokens += sum(run.num_tokens for run in runs)
        if num_known < len(text):
            runs.append(self._aligner.prompt(text[num_known:], is_first=not runs))
        return _asked(runs)

    def _keep_one(
        self,
        body: dict[str, Any],
        index: int,
        sampling: Mapping[str, Any],
        reply: dict[str, Any],
        policy_version: int,
    ) -> None:
        tokens = _exact_tokens(reply)
        spans = () if tokens is None else _version_spans(reply["meta_info"], len(tokens), policy_version)
        prompt = None
        if tokens is not None and spans:
            prompt = body.prompt(index) if isinstance(body, RewrittenBody) else self._given_prompt(body, index)
        if tokens is None or prompt is None:
            self._num_not_kept += 1
            return
        text = reply.get("text")
        runs = self._aligner.reply(
            [token_id for _, token_id in tokens],
            np.array([logprob for logprob, _ in tokens], np.float32),
            well_formed(text) if isinstance(text, str) else None,
            spans,
            skip_special_tokens=sampling.get("skip_special_tokens") is not False,
        )
        with self._lock:
            self._num_kept += 1
            self._tree.insert([*prompt, *runs], policy_version=max(policy_version, spans[-1].policy_version))
            if self._max_version_age is not None:
                self._tree.forget_versions_before(self._tree.policy_version - self._max_version_age)

    def _given_prompt(self, body: dict[str, Any], index: int) -> list[TokenRun] | None:
        """Return the runs of a prompt that came as token ids; None if it is something else."""
        ids = body.get("input_ids")
        if isinstance(ids, list) and ids and isinstance(ids[0], list):
            ids = ids[index] if index < len(ids) else None
        if not isinstance(ids, list) or not ids or any(body.get(name) for name in _OTHER_INPUTS):
            return None
        text = self._aligner.given_ids(ids)
        runs, num_known = self._path(text, with_tail=False, ids=np.array(ids, np.int32).tobytes())
        num_tokens = sum(run.num_tokens for run in runs)
        if num_tokens < len(ids):
            runs.append(self._aligner.given(ids[num_tokens:], text[num_known:]))
        return _asked(runs)


def _asked(runs: list[TokenRun]) -> list[TokenRun]:
    runs[-1] = runs[-1]._replace(marks=runs[-1].marks | ASKED)
    return runs


def _wanted(wants_logprobs: Any, index: int) -> bool:
    if isinstance(wants_logprobs, list):
        return index < len(wants_logprobs) and bool(wants_logprobs[index])
    return bool(wants_logprobs)


def _exact_tokens(reply: Mapping[str, Any]) -> Sequence[tuple[float, int]] | None:
    """Return log-probability and id of each sampled token; None where that is not said, or there is none."""
    meta = reply["meta_info"]
    try:
        tokens = [(float(entry[0]), int(entry[1])) for entry in meta["output_token_logprobs"]]
    except (KeyError, TypeError, ValueError, IndexError):
        return None
    told_ids, num_told = reply.get("output_ids"), meta.get("completion_tokens")
    ids = [token_id for _, token_id in tokens]
    if told_ids not in (None, ids) or num_told not in (None, len(tokens)):
        return None
    if not all(abs(logprob) <= _LARGEST and 0 <= token_id < 1 << 31 for logprob, token_id in tokens):
        return None
    return tokens or None


def _version_spans(meta: Mapping[str, Any], num_tokens: int, policy_version: int) -> tuple[VersionSpan, ...]:
    """Return who sampled a reply's tokens; nothing where the server contradicts itself."""
    told = meta.get("weight_versions")
    try:
        if told is not None:
            return read_spans(msgspec.convert(told, list[NamedSpan]), num_tokens)
        name = meta.get("weight_version")
        version = policy_version if name is None else version_number(name)
    except VersionNameError:
        version = policy_version
    except (EngineProtocolError, msgspec.ValidationError):
        return ()
    return (VersionSpan(0, num_tokens, version),)
