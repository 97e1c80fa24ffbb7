"""Teachers: models that say how likely they find what the policy has sampled, on servers or in this process.

Invariant: a log-probability is of the id that was sampled, in its place; where one is missing there is an error.

Axes: N tokens of a sample but the first, P prompt tokens, R response tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollfeed.config.api_key import ApiKey
from rollfeed.config.engine import OpenAISettings, Purpose, SGLangSettings
from rollfeed.config.teacher import TeacherServerKind, TeacherSettings
from rollfeed.engine.client.connecting import connect
from rollfeed.engine.client.dialect import Context, Dialect
from rollfeed.engine.dialects import VLLM, SGLang
from rollfeed.engine.http import Http
from rollfeed.errors import EngineError, EngineProtocolError, EngineUnavailableError
from rollfeed.protocols import Teacher, Tokenizer
from rollfeed.types import Sample

_log = logging.getLogger(__name__)

_LOWEST = -1000.0
"""No model finds a token less likely than that; one such number would be all that an update learns from."""
_PAUSE_SECONDS = 0.2
"""Before the second try; each further one waits twice as long."""
_PROBE = "The 3 quick-brown foxes (x_1, y) jumped\n\tover 42 \u00e9t\u00e9s: \u6570 \u2248 3.14;"
"""Words, digits, code, other scripts: what tokenizers differ in."""
_NUM_SLOTS = 16


class ServedTeacher(Teacher):
    """A teacher on servers, each of which has all of it.

    Entering it waits for every server, and refuses one that makes other tokens of a text than the policy's tokenizer.

    Raises:
        ConfigError: If the variable that should hold the key does not.
    """

    def __init__(self, settings: TeacherSettings, *, tokenizer: Tokenizer, context_length: int) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._context_length = context_length
        ApiKey.read(settings.api_key_env, setting="teacher.api_key_env")
        self._dialect = _dialect(settings)
        self._turns = asyncio.Semaphore(settings.concurrency)
        self._asked = Counter[str]()
        """Responses that each server scores now."""

    async def __aenter__(self) -> ServedTeacher:
        settings, dialect = self._settings, self._dialect
        async with AsyncExitStack() as stack:
            http = Http(
                api_key=dialect.api_key,
                max_connections=settings.concurrency,
                control_timeout_seconds=settings.timeout_seconds,
            )
            self._http = await stack.enter_async_context(http)
            # A server of vLLM samples a token of what it scores, which has to fit, too.
            dialect.open(Context(self._http, self._tokenizer, self._context_length + 1))
            try:
                found = (await connect(dialect)).found
                await asyncio.gather(*(self._compare_tokenizers(address) for address in found))
            except EngineError as error:
                raise type(error)(f"teacher.servers: {error}") from error
            self._versions = {address: each.policy_version or 0 for address, each in found.items()}
            self._entered = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._entered.aclose()

    async def check(self) -> None:
        """Have every server score a text. Raises EngineError if one does not."""
        ids = np.asarray(self._tokenizer.encode(_PROBE, add_special_tokens=False), np.int32)[: self._context_length]
        for address in self._versions:
            told = await self._scored(address, ids)
            if len(told) != len(ids) - 1 or not np.isfinite(told).all():
                raise EngineProtocolError(f"teacher.servers: {address}: it scores no text token by token")

    async def logprobs(self, sample: Sample) -> NDArray[np.float32]:
        """Return what a server says; see :class:`rollfeed.protocols.Teacher`.

        Raises:
            EngineUnavailableError: After every try, with why the last one failed.
        """
        if not _is_scored(sample):
            return np.zeros(sample.response_length, np.float32)
        tried: list[str] = []
        async with self._turns:
            while True:
                address = self._choose(tried)
                self._asked[address] += 1
                try:
                    return _of_response(sample, await self._scored(address, sample.token_ids))
                except EngineError as error:
                    tried.append(address)
                    if len(tried) == self._settings.max_tries:
                        times = f" (try {len(tried)})" if len(tried) > 1 else ""
                        raise EngineUnavailableError(f"teacher: {error}{times}") from error
                    _log.warning("teacher: %s", error)
                finally:
                    self._asked[address] -= 1
                await asyncio.sleep(_PAUSE_SECONDS * 2 ** (len(tried) - 1))

    def _choose(self, tried: list[str]) -> str:
        """Return the server that was tried least, and of those the one that scores fewest."""
        return min(self._versions, key=lambda address: (tried.count(address), self._asked[address]))

    async def _scored(self, address: str, token_ids: NDArray[np.int32]) -> NDArray[np.float64]:
        told = await self._dialect.score(address, [token_ids], policy_version=self._versions[address])
        if told is None:
            raise EngineProtocolError(f"{address}: it does not score texts of {len(token_ids)} tokens")
        return told

    async def _compare_tokenizers(self, address: str) -> None:
        """Refuse a server of which it is known that it has another tokenizer."""
        ends = self._tokenizer.decode(list(self._tokenizer.eos_token_ids), skip_special_tokens=False)
        text = _PROBE + ends
        body: dict[str, Any] = {"prompt": text, "add_special_tokens": False}
        if self._settings.model is not None:
            body["model"] = self._settings.model
        told = (await self._http.control("POST", f"{address}/tokenize", body)).json().get("tokens")
        if not isinstance(told, list) and self._settings.server_kind is TeacherServerKind.SGLANG:
            told = await self._tokenised_in_scoring(address, text)
        if not isinstance(told, list):
            _log.warning("teacher: %s does not tell how it tokenises: it was not compared with the policy", address)
            return
        ways = [self._tokenizer.encode(text, add_special_tokens=special).tolist() for special in (False, True)]
        if told not in ways:
            raise EngineProtocolError(
                f"{address}: it makes other tokens of a text than the policy's tokenizer ({told[:8]}... and "
                f"{ways[0][:8]}...): its log-probabilities would be of other tokens; choose a teacher with the same one"
            )

    async def _tokenised_in_scoring(self, address: str, text: str) -> list[int] | None:
        ask = {"max_new_tokens": 0, "temperature": 1.0}
        body = {"text": text, "sampling_params": ask, "return_logprob": True, "logprob_start_len": 0}
        meta = (await self._http.control("POST", f"{address}/generate", body)).json().get("meta_info")
        entries = meta.get("input_token_logprobs") if isinstance(meta, dict) else None
        return [entry[1] for entry in entries] if isinstance(entries, list) else None


class EmbeddedTeacher(Teacher):
    """A teacher that the embedded engine computes in this process, in a thread of its own.

    It says what it says at ``temperature``; ``deterministic`` is as of the embedded engine.
    """

    def __init__(
        self,
        checkpoint: Path,
        settings: TeacherSettings,
        *,
        tokenizer: Tokenizer,
        context_length: int,
        temperature: float,
        deterministic: bool = False,
    ) -> None:
        self._checkpoint, self._settings, self._tokenizer = checkpoint, settings, tokenizer
        self._context_length, self._temperature = context_length, temperature
        self._deterministic = deterministic
        self._turns = asyncio.Semaphore(settings.concurrency)

    async def __aenter__(self) -> EmbeddedTeacher:
        # It brings torch.
        from rollfeed.engine.local import create_local_engine

        self._engine = await asyncio.to_thread(
            create_local_engine,
            checkpoint=self._checkpoint,
            tokenizer=self._tokenizer,
            threads=self._settings.threads,
            num_slots=_NUM_SLOTS,
            context_length=self._context_length,
            deterministic=self._deterministic,
            device=self._settings.device,
        )
        await self._engine.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._engine.__aexit__(*exc_info)

    async def logprobs(self, sample: Sample) -> NDArray[np.float32]:
        """Return what the model says; see :class:`rollfeed.protocols.Teacher`."""
        if not _is_scored(sample):
            return np.zeros(sample.response_length, np.float32)
        async with self._turns:
            return _of_response(sample, await self._engine.score_tempered([sample.token_ids], self._temperature))


def _dialect(settings: TeacherSettings) -> Dialect:
    common = {
        "api_key_env": settings.api_key_env,
        "startup_timeout_seconds": settings.startup_timeout_seconds,
        "update_timeout_seconds": settings.timeout_seconds,  # within which texts are scored
    }
    if settings.server_kind is TeacherServerKind.SGLANG:
        return SGLang(SGLangSettings.model_validate({"workers": settings.servers, **common}))
    given = {"base_url": settings.servers, "model": settings.model, "purpose": Purpose.EVALUATION, **common}
    return VLLM(OpenAISettings.model_validate(given))


def _is_scored(sample: Sample) -> bool:
    """Return whether a sample has trained tokens. Raises EngineProtocolError if a teacher cannot see all of it."""
    if sample.images:
        raise EngineProtocolError("the teacher takes text only, and the sample has pictures")
    return bool(sample.loss_mask.any())


def _of_response(sample: Sample, logprobs_N: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the part of a whole sample's log-probabilities that is of its response, ``(R,)``.

    Raises:
        EngineProtocolError: If they are of another number of tokens, or one of a trained token is none.
    """
    if len(logprobs_N) != len(sample.token_ids) - 1:
        raise EngineProtocolError(f"{len(logprobs_N)} log-probabilities for {len(sample.token_ids) - 1} tokens")
    whole = np.concatenate([[np.nan], logprobs_N])[sample.prompt_length :]
    is_one = (whole >= _LOWEST) & (whole <= 1e-3)  # not so either where it is NaN
    if bad := np.flatnonzero(~is_one & (sample.loss_mask != 0)).tolist():
        raise EngineProtocolError(
            f"response token {bad[0]} has the log-probability {whole[bad[0]]}, which is none: it cannot be learned from"
        )
    return np.where(is_one, whole, 0.0).astype(np.float32)
