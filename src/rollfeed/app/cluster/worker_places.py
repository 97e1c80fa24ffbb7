"""The rollout workers of a run, as its process sees them: started, asked, told of, and started again when they die.

Invariants: an attempt ends once, with its group or because its worker has died; a worker has work only while it has
the weights that all others have.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

from rollfeed.app.cluster.orders import (
    Event,
    IsolationFound,
    JudgesAsked,
    LineLogged,
    Order,
    OutputWritten,
    TurnWritten,
    WorkerFacts,
    WorkerMetrics,
    pack,
    read_events,
)
from rollfeed.base.waiting import all_at_once
from rollfeed.cluster import Host, HostDiedError, Hosting, wanted_of_nodes
from rollfeed.config import ClusterSettings, RunSpec
from rollfeed.engine.client.counters import Counters
from rollfeed.errors import ConfigError, EngineUnavailableError, RollfeedError, RunFailedError, in_one_line
from rollfeed.protocols import Isolation, IsolationLevel, TurnJournal
from rollfeed.rewards.judging import JudgeCounts

_log = logging.getLogger(__name__)
_LONGEST_PAUSE_SECONDS = 30.0
_CLOSING_SECONDS = 20.0
_OUTPUT_SECONDS = 5.0
_WORKER = "rollfeed.app.inside_cluster.rollout_worker:RolloutWorker"
_COUNTS = frozenset(each.name for each in fields(Counters))
_REWARD_WORKER = "rollfeed.app.inside_cluster.reward_worker:RewardWorker"

SpecOf = Callable[[int, int], RunSpec]
"""Returns the run with the share of one worker, given its number and how many there are."""


class Attempt(Protocol):
    """An execution of a group, which is told of what happens in it."""

    def tell(self, event: Event) -> None:
        """Take an event of the attempt."""

    def lose(self, error: HostDiedError) -> None:
        """Take note that the worker has died."""


class WorkerPlace:
    """The place of one rollout worker, over all of its starts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.host: Host | None = None
        self.facts: WorkerFacts | None = None
        self.policy_version = 0
        self.is_live = False
        self.is_tried = asyncio.Event()
        self.problem: RollfeedError | None = None
        """Why it could not be started, the last time."""
        self.attempts: dict[int, Attempt] = {}
        self.num_calls = 0
        self.metrics: dict[str, float] = {}
        self._orders: list[Order] = []
        self._is_ordered = asyncio.Event()

    def begin(self) -> None:
        """Take work, and none of what was ordered of a worker before."""
        self._orders.clear()
        self.is_live = True

    def order(self, order: Order) -> None:
        """Send an order behind all earlier ones."""
        self._orders.append(order)
        self._is_ordered.set()

    async def send_orders(self, host: Host) -> None:
        """Send what is ordered, until the host dies."""
        while True:
            await self._is_ordered.wait()
            self._is_ordered.clear()
            packed = pack(self._orders)
            self._orders.clear()
            await host.call("take", packed)


class RolloutWorkers:
    """Keeps rollout workers up from :meth:`open` to :meth:`close`; belongs to one event loop."""

    def __init__(
        self, hosting: Hosting, settings: ClusterSettings, *, spec_of: SpecOf, num_workers: int | None
    ) -> None:
        self.journal = TurnJournal()
        """Keeps what workers' rollouts do in their turns."""
        self.on_isolation: Callable[[Isolation], None] | None = None
        self.judge_counts = JudgeCounts()
        """Given what judges of workers were asked."""
        self.printed: Path | None = None
        """The file that gets what functions print in workers, with the log beside it; by default it is lost."""
        self.places: tuple[WorkerPlace, ...] = ()
        self.policy_version = 0
        self.num_lost = 0
        """Workers that have died."""
        self.num_run_again = 0
        """Groups that were answered again because of that."""
        self.lost_counts: dict[str, float] = {}
        """Of the engines of workers that have died."""
        self.updating = asyncio.Lock()
        """Held while weights change, and while a worker joins."""
        self.update: Any = None
        """Stands for the newest weights, where they are not those that workers start with."""
        self._hosting = hosting
        self._settings = settings
        self._spec_of = spec_of
        self._num_workers = num_workers
        self._numbers = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._reward_hosts: list[Host] = []
        self._is_changed = asyncio.Event()

    async def open(self) -> None:
        """Start all workers, and return when they are ready, or those that are ready in time.

        Raises:
            ConfigError: If there is no such cluster, or no worker has what the run needs.
            RunFailedError: If the cluster has no room for them.
            EngineUnavailableError: If none is ready in time.
        """
        await self._hosting.__aenter__()
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    async def _open(self) -> None:
        number = self._num_workers or self._hosting.num_nodes
        await self._hosting.reserve(number)
        settings = self._spec_of(0, number).settings.reward
        for _ in range(self._settings.reward_workers):
            self._reward_hosts.append(await self._hosting.start(_REWARD_WORKER, settings, place=None))
        self.places = tuple(map(WorkerPlace, range(number)))
        self._tasks = [
            asyncio.create_task(self._keep_up(place), name=f"worker {place.number}") for place in self.places
        ]
        self._tasks += [asyncio.create_task(self._follow_output(host), name=host.name) for host in self._reward_hosts]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.startup_timeout_seconds):
                for place in self.places:
                    await place.is_tried.wait()
                while not (self._has_live or self._is_hopeless):
                    await self._changed()
        self.policy_version = max((each.policy_version for each in self.places if each.is_live), default=0)
        for place in self.places:
            if place not in self.live:
                _log.warning("cluster: rollout worker %d is not ready: %s", place.number, self._why(place))
        if not self.live:
            raise self._nobody()

    async def close(self) -> None:
        """End all workers, and what they have started."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        hosts = [place.host for place in self.places if place.host is not None]
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSING_SECONDS):
                for each in (hosts, self._reward_hosts):
                    await asyncio.gather(*(self._take_output(host, "close") for host in each), return_exceptions=True)
        await self._hosting.__aexit__()

    @property
    def live(self) -> list[WorkerPlace]:
        """Workers that may have work."""
        return [each for each in self.places if each.is_live and each.policy_version == self.policy_version]

    def next_attempt(self) -> int:
        """Return the number of a new attempt."""
        return next(self._numbers)

    async def pick(self) -> WorkerPlace:
        """Return the least busy worker; where none is left, wait for one to come back.

        Raises:
            EngineUnavailableError: If none does in time.
        """
        try:
            async with asyncio.timeout(self._settings.startup_timeout_seconds):
                while not self.live:
                    await self._changed()
        except TimeoutError:
            raise self._nobody() from None
        return min(self.live, key=lambda place: (len(place.attempts) + place.num_calls, place.number))

    async def call(self, place: WorkerPlace, method: str, *args: Any) -> Any:
        """Call a method of a worker; one that has died, or does not answer in time, is no longer live.

        Raises:
            HostDiedError: If it has died, or is taken for dead.
        """
        host = place.host
        assert host is not None
        place.num_calls += 1
        try:
            return await self._ask(host, method, *args)
        except HostDiedError:
            self._drop(place, host)
            raise
        finally:
            place.num_calls -= 1

    async def _ask(self, host: Host, method: str, *args: Any) -> Any:
        # A request takes as long as its engine lets it; who makes none notices a worker that hangs.
        seconds = None if method == "generate" else self._settings.answer_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                return await host.call(method, *args)
        except TimeoutError:
            raise HostDiedError(
                f"{host.name} has not answered {method!r} within cluster.answer_timeout_seconds = {seconds:g}"
            ) from None

    def drop(self, place: WorkerPlace) -> None:
        """Kill a worker, in whose place another is started."""
        assert place.host is not None
        self._drop(place, place.host)

    def share(self, value: Any) -> Any:
        """Return what stands for a large value in calls."""
        return self._hosting.share(value)

    def _drop(self, place: WorkerPlace, host: Host) -> None:
        if place.host is host:
            place.is_live = False
        host.kill()

    def _why(self, place: WorkerPlace) -> object:
        if place.is_live:
            return f"its servers have weights of version {place.policy_version}, others {self.policy_version}"
        return place.problem or "it has not answered in time; it may join later"

    @property
    def _has_live(self) -> bool:
        return any(place.is_live for place in self.places)

    @property
    def _is_hopeless(self) -> bool:
        """Whether all workers stay out."""
        return all(isinstance(place.problem, ConfigError) for place in self.places)

    async def _changed(self) -> None:
        """Return when a worker has been started, or has not, since the last call."""
        await self._is_changed.wait()
        self._is_changed.clear()

    def _nobody(self) -> RollfeedError:
        problems = [each.problem for each in self.places if each.problem is not None]
        if self._is_hopeless:
            return problems[0]
        seconds = self._settings.startup_timeout_seconds
        why = problems[0] if problems else "they have not answered"
        return EngineUnavailableError(
            f"none of {len(self.places)} rollout workers was ready within cluster.startup_timeout_seconds = "
            f"{seconds:g}: {why}"
        )

    async def _keep_up(self, place: WorkerPlace) -> None:
        """Start a worker, serve it until it dies, and again."""
        pause = 1.0
        while True:
            try:
                host = await self._start(place)
            except Exception as raised:  # Ray raises many kinds; the place is tried again
                error = raised if isinstance(raised, RollfeedError) else RunFailedError(in_one_line(raised))
                place.problem = error
                place.is_tried.set()
                self._is_changed.set()
                _log.warning("cluster: rollout worker %d cannot be started: %s", place.number, error)
                if place.host is not None:
                    place.host.kill()
                if isinstance(error, ConfigError):
                    return  # another start would find the same
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                continue
            pause, place.problem = 1.0, None
            died = await self._serve(place, host)
            self.num_lost += 1
            _log.warning("cluster: %s is lost, another is started: %s", host.name, died)

    async def _start(self, place: WorkerPlace) -> Host:
        spec = self._spec_of(place.number, len(self.places))
        place.host = host = await self._hosting.start(_WORKER, spec, self._reward_hosts, place=place.number)
        facts: WorkerFacts = await host.call("open", wanted_of_nodes())
        async with self.updating:
            place.facts, place.policy_version = facts, facts.policy_version
            if self.update is not None and facts.policy_version != self.policy_version:
                await self._ask(host, "apply", self.update)
                place.policy_version = self.policy_version
            place.begin()
        place.is_tried.set()
        self._is_changed.set()
        return host

    async def _serve(self, place: WorkerPlace, host: Host) -> HostDiedError:
        """Take a worker's events until it dies; return why."""
        try:
            # Neither goes on without the other: a worker that takes no orders has no use.
            await all_at_once([place.send_orders(host), self._take_events(place, host)])
        except Exception as error:  # whatever it is, nobody may wait for this worker
            died = error if isinstance(error, HostDiedError) else HostDiedError(f"{host.name}: {in_one_line(error)}")
        self._drop(place, host)
        last, place.metrics = place.metrics, {}
        for name in _COUNTS & last.keys():
            self.lost_counts[name] = self.lost_counts.get(name, 0.0) + last[name]
        attempts, place.attempts = place.attempts, {}
        for attempt in attempts.values():
            attempt.lose(died)
        return died

    async def _take_events(self, place: WorkerPlace, host: Host) -> None:
        num_taken = 0
        while True:
            events = read_events(await self._ask(host, "poll", num_taken))
            if await self._take(place, events):
                await self.journal.flush()
            num_taken += len(events)

    async def _take(self, place: WorkerPlace, events: Sequence[Event]) -> bool:
        """Tell everybody concerned; return whether turns are to be on the disk before the worker goes on."""
        has_turns = False
        for event in events:
            match event:
                case WorkerMetrics(values):
                    place.metrics = values
                case IsolationFound(level, network_cut, files_hidden, detail):
                    if self.on_isolation is not None:
                        found = IsolationLevel(level)
                        self.on_isolation(
                            Isolation(level=found, network_cut=network_cut, files_hidden=files_hidden, detail=detail)
                        )
                case JudgesAsked(counts):
                    self.judge_counts.add(counts)
                case OutputWritten() | LineLogged():
                    self._keep(event, f"rollout worker {place.number}")
                case _:
                    has_turns |= isinstance(event, TurnWritten)
                    if (attempt := place.attempts.get(event.attempt)) is not None:
                        attempt.tell(event)
        return has_turns

    async def _follow_output(self, host: Host) -> None:
        """Take what a reward worker has printed, now and then; one that has died is started again by its hosting."""
        while True:
            await asyncio.sleep(_OUTPUT_SECONDS)
            with suppress(HostDiedError):
                await self._take_output(host, "output")

    async def _take_output(self, host: Host, method: str) -> None:
        for event in read_events(await self._ask(host, method)):
            self._keep(event, host.name)

    def _keep(self, event: Event, name: str) -> None:
        """Put what a worker has printed or logged where it would be in a run without a cluster."""
        if isinstance(event, LineLogged):
            logging.getLogger(event.logger).log(event.level, "%s: %s", name, event.text)
        elif isinstance(event, OutputWritten) and self.printed is not None:
            with suppress(OSError), self.printed.with_name(event.name).open("ab") as file:
                file.write(event.lines)
