"""A client that never raises into an engine: circuit breaker, bounded lookups, reconnects to a restarted peer."""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, TypeVar, cast

from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.errors import ConfigError, DeadlineExceeded, StoreClosed
from p2pstore.integrations.retention import Retention, retention
from p2pstore.objects import MAX_KEY_BYTES
from p2pstore.results import ItemResult, KeyPage
from p2pstore.routing import worth_fetching

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

LOG: Final = logging.getLogger("p2pstore.integrations")
PAUSE_SECONDS: Final = 1.0
"""Pause between two probes of a peer that does not answer."""
START_SECONDS: Final = 1.0
"""Wait for the peer in the constructor."""
CLOSE_SECONDS: Final = 1.0
"""Wait for the worker's end in `close`."""
ANSWER_SECONDS: Final = 0.1
"""Deadline of an open lookup. The key counts as missing afterwards."""
PATIENCE_SECONDS: Final = 0.1
"""Time that the peer has for the answer to a probe, before the calls that wait for it fail."""
POLL_SECONDS: Final = 0.001
"""Interval at which an engine's own thread looks for the answer."""
KEPT_SECONDS: Final = 0.25
"""Time for which an answer is good after it was read first: one request looks up its keys again and again."""
CHECK_SECONDS: Final = 1.0
"""Pause between two checks of what this engine believes to be in the pool."""
MAX_LOOKUPS: Final = 65_536
MAX_BATCH: Final = 4096
MAX_CHORES: Final = 64
QUIET_SECONDS: Final = 10.0
KEPT_BYTES: Final = 900
"""Of a text that is too long for a key, its beginning that the key keeps: for people, and listings by prefix."""
_KEY_PERSON: Final = b"p2pstore.engine"
PROBE_KEY: Final = "p2pstore engine/"
NAME_BYTES: Final = 12
PAGE_KEYS: Final = 10_000


def legal_key(text: str) -> str:
    """The key that stands for a text of any length and content: the text itself where it can be a key, else its
    beginning and its BLAKE2b-256, which no two texts share in practice. The same text always gives the same key."""
    packed = text.encode("utf-8", "surrogatepass")
    if 0 < len(packed) <= MAX_KEY_BYTES and _is_utf8(packed):
        return text
    digest = hashlib.blake2b(packed, digest_size=32, person=_KEY_PERSON).hexdigest()
    return f"{packed[:KEPT_BYTES].decode('utf-8', 'ignore')}#{digest}"


def _is_utf8(packed: bytes) -> bool:
    try:
        packed.decode()
    except UnicodeDecodeError:
        return False
    return True


def pages_of_keys(client: BlockingClient) -> Iterator[KeyPage]:
    """All keys of the namespace, a page at a time. Raises what the client raises."""
    after, more = "", True
    while more:
        page = client.list_keys(after=after, limit=PAGE_KEYS)
        yield page
        more = page.more and bool(page.keys)
        after = page.keys[-1].key if page.keys else ""


def leading(answers: Sequence[bool | None]) -> int:
    return next((number for number, each in enumerate(answers) if not each), len(answers))


def miss_on_error(missing: Callable[..., Any]) -> Callable[[F], F]:
    """Have a method of a plug-in never raise into its engine: whatever fails, it returns what it returns where nothing
    is found (`missing`, which is called with the same arguments), and the log says so. A cache's failure is a miss."""

    def decorate(method: F) -> F:
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def harmless_async(self: Any, *args: Any, **options: Any) -> Any:
                try:
                    return await method(self, *args, **options)
                except Exception as error:
                    _say_failed(self, method, error)
                    return missing(self, *args, **options)

            return cast(F, harmless_async)

        @functools.wraps(method)
        def harmless(self: Any, *args: Any, **options: Any) -> Any:
            try:
                return method(self, *args, **options)
            except Exception as error:
                _say_failed(self, method, error)
                return missing(self, *args, **options)

        return cast(F, harmless)

    return decorate


def _say_failed(plugin: Any, method: Callable[..., Any], error: Exception) -> None:
    """Log what a plug-in's method failed by; where, in the debug log."""
    LOG.debug("%s failed", method.__name__, exc_info=error)
    plugin._client.warn(f"{method.__name__} failed, which counts as a miss: {error!r}")


class Breaker:
    """Whether the local peer is worth a call. Closed: yes. Open: no call is made but the worker's probe, which closes
    it again. It begins open, with a probe due at once: the first connection. Times in seconds."""

    def __init__(self) -> None:
        self.closed = False
        self._probe_at = 0.0

    def trip(self, now: float) -> None:
        """A call failed in a way that a hung or absent peer explains: open, and probe at once."""
        if self.closed:
            self.closed = False
            self._probe_at = now

    def probed(self, now: float, *, answered: bool) -> None:
        self.closed = answered
        self._probe_at = now + PAUSE_SECONDS

    def probe_in(self, now: float) -> float | None:
        """Seconds until a probe is due; None while closed."""
        return None if self.closed else max(0.0, self._probe_at - now)


class Lookups:
    """Questions about keys that shared memory leaves open. A scheduler asks again until the answer or the deadline.

    The first question past its deadline marks the peer as late: until its next answer no other question waits.
    Schedulers call `look_up`, the worker the rest. No lock: a scheduler would wait for it. Each step is atomic, and a
    race only asks twice."""

    def __init__(self) -> None:
        self._asked_at: dict[str, float] = {}
        self._answers: dict[str, tuple[bool, float]] = {}
        """By key, oldest first: the answer, and the time until which it is good."""
        self._late = False
        self.wanted: deque[str] = deque()
        """Keys to ask the peer about."""

    def look_up(self, key: str, now: float) -> bool | None:
        """Whether the key is there; None: the question is open."""
        there, until = self._answers.get(key, (False, 0.0))
        if now < until:
            if until == math.inf:
                self._answers[key] = there, now + KEPT_SECONDS
            return there
        asked_at = self._asked_at.get(key)
        if asked_at is None:
            if self._late or len(self._asked_at) >= MAX_LOOKUPS:
                return False
            self._asked_at[key] = now
            self.wanted.append(key)
        elif now >= asked_at + ANSWER_SECONDS:
            self._late = True
        return False if self._late else None

    def take(self) -> list[str]:
        return [self.wanted.popleft() for _ in range(min(len(self.wanted), MAX_BATCH))]

    def answered(self, keys: Sequence[str], there: Sequence[bool]) -> None:
        for key, is_there in zip(keys, there, strict=True):
            self._answers.pop(key, None)
            self._answers[key] = is_there, math.inf
            self._asked_at.pop(key, None)
        while len(self._answers) > MAX_LOOKUPS:
            self._answers.pop(next(iter(self._answers)), None)
        self._late = False


class QuietLog:
    """Warnings for people: the same text every ten seconds at most."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._quiet_until: dict[str, float] = {}

    def warn(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._quiet_until.get(text, 0.0):
            if len(self._quiet_until) > 100:
                self._quiet_until.clear()
            self._quiet_until[text] = now + QUIET_SECONDS
            self._log.warning("%s", text)


class EngineClient:
    """Calls to this machine's peer that never raise, whatever fails. Any thread may make them.

    `weight_version` is the namespace: what one version of a model's weights computed is of no use to another, so every
    engine has to say which one it runs. Raises `ConfigError` without it. A worker thread connects, now or when the
    peer comes, asks what lookups leave open, and probes a peer that does not answer. A call fails as soon as the peer
    hangs; until it answers, only what lies in its memory is found.
    """

    def __init__(self, weight_version: Any, socket: str | None = None, *, timeout: float = 5.0) -> None:
        if not isinstance(weight_version, str) or not weight_version.strip():
            raise ConfigError(
                f"weight_version is {weight_version!r}: name the model and the version of its weights as text, such as "
                "'llama-3.1-8b@v1'; engines share a cache only under the same name"
            )
        self._open = functools.partial(blocking.connect, namespace=weight_version, timeout=timeout)
        self._socket = socket
        self._client: BlockingClient | None = None
        self._wake = threading.Condition()
        self._breaker = Breaker()
        self._lookups = Lookups()
        self._chores: deque[Callable[[BlockingClient], None]] = deque(maxlen=MAX_CHORES)
        self._check_at = 0.0
        self.warn = QuietLog(LOG).warn
        self._absence_said = False
        self._closed = False
        self._probed_once = threading.Event()
        self._worker = threading.Thread(target=self._work, name="p2pstore-engine", daemon=True)
        self._worker.start()
        self._probed_once.wait(START_SECONDS)

    def call(self, what: Callable[[BlockingClient], T], otherwise: T) -> T:
        """The result of the call, or `otherwise` when the store fails; the log says so. It waits for the peer, so it is
        not for a scheduler's thread."""
        client = self._client
        if client is None:
            return otherwise
        try:
            result = what(client)
        except Exception as error:  # the engine goes on, whatever it is
            self.warn(str(error) or repr(error))
            self._trip_by(error)
            return otherwise
        if isinstance(result, list):
            self._trip_by(*(getattr(each, "error", None) for each in result))
        return result

    def read(self, items: Sequence[tuple[str, memoryview]]) -> list[bool]:
        """Read objects into the memory beside their keys; for each whether all of it came."""
        failed: list[ItemResult[int]] = []
        results = self.call(lambda client: client.get_many_into(items), failed)
        came = zip(results, items, strict=False)
        return [each.value == len(view) for each, (_, view) in came] or [False] * len(items)

    def put(self, items: Sequence[tuple[str, Any]], ttl: float | None = None) -> list[bool]:
        """Put objects; for each whether it is there now."""
        failed: list[ItemResult[Any]] = []
        results = self.call(lambda client: client.put_many(items, ttl=ttl), failed)
        return [each.ok for each in results] or [False] * len(items)

    @property
    def answers(self) -> bool:
        """Whether the peer answers, as far as is known."""
        return self._breaker.closed

    def look_up(self, keys: Sequence[str]) -> list[bool | None]:
        """Whether these objects are there. Never waits and never asks: for a scheduler's thread. None: the worker asks
        the peer; look up again, which within `ANSWER_SECONDS` gives the answer or False."""
        client = self._client
        if client is None:
            return [False] * len(keys)
        try:
            known = client.contains_many_nowait(keys)
        except Exception as error:
            self.warn(str(error) or repr(error))
            self._trip_by(error)
            return [False] * len(keys)
        if None not in known:
            return known
        if not self._breaker.closed:
            return [bool(each) for each in known]
        now = time.monotonic()
        answers = [
            self._lookups.look_up(key, now) if is_there is None else is_there
            for key, is_there in zip(keys, known, strict=True)
        ]
        if self._lookups.wanted:
            self._notify()
        return answers

    def look_up_soon(self, keys: Sequence[str]) -> list[bool]:
        """`look_up`, again and again where it leaves questions open, for `ANSWER_SECONDS` at most: for an engine's own
        threads, whose caller cannot ask again."""
        answers = self.look_up(keys)
        until = time.monotonic() + ANSWER_SECONDS
        while None in answers and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            left = [number for number, each in enumerate(answers) if each is None]
            again = self.look_up([keys[number] for number in left])
            for number, answer in zip(left, again, strict=True):
                answers[number] = answer
        return [bool(each) for each in answers]

    def run_in_worker(self, chore: Callable[[BlockingClient], None]) -> None:
        """Have the worker make this call, once a peer answers. Of more than `MAX_CHORES` the oldest are dropped."""
        self._chores.append(chore)
        self._notify()

    def now_and_then(self, check: Callable[[BlockingClient], None]) -> None:
        """`run_in_worker`, once in `CHECK_SECONDS`, and only while the peer answers."""
        now = time.monotonic()
        if now >= self._check_at and self.answers:
            self._check_at = now + CHECK_SECONDS
            self.run_in_worker(check)

    def warn_unknown(self, given: Iterable[str], known: Sequence[str]) -> None:
        """Log which of the given settings mean nothing here."""
        for name in sorted(set(given) - set(known)):
            near = difflib.get_close_matches(name, known, n=1)
            meant = f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
            LOG.warning("there is no setting %r, so it changes nothing%s", name, meant)

    def retention(self, parameters: Any, hints: Any = None, prefix: str = "") -> Retention:
        """How long the blocks of a request should be kept: see `retention`."""
        return retention(parameters, hints, self.warn, prefix)

    def close(self) -> None:
        """Disconnect; may be called twice. Calls then give what they give when the store fails."""
        with self._wake:
            self._closed = True
            client, self._client = self._client, None
            self._wake.notify()
        if client is not None:
            client.close()
        if threading.current_thread() is not self._worker:
            self._worker.join(CLOSE_SECONDS)

    def compare_hashes(self, engine: str, hashed: Any, **layout: Any) -> None:
        """Have the worker find out whether engines of this kind and weight version can find each other's blocks.
        `hashed` is what this one makes of something fixed, by the function and the seed in use; `layout` whatever
        else must be the same. The first engine leaves its own as an object; an engine that finds another one logs
        what differs."""
        facts = {"hashes": repr(hashed), **layout}
        self.run_in_worker(functools.partial(_compare, engine, facts))

    def _trip_by(self, *errors: Any) -> None:
        """Trip the breaker when one of these errors is that of a peer that is gone or hangs."""
        if any(isinstance(error, DeadlineExceeded | StoreClosed) for error in errors):
            self._breaker.trip(time.monotonic())
            self._notify()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    # --- the worker ----------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closed:
            if self._breaker.probe_in(time.monotonic()) == 0:
                self._probe()
            keys = self._lookups.take()
            if keys:
                self._lookups.answered(keys, self.call(_asking(keys), [False] * len(keys)))
            while self._chores and self._breaker.closed:
                self.call(self._chores.popleft(), None)
            with self._wake:
                self._wake.wait_for(self._has_work, self._breaker.probe_in(time.monotonic()))

    def _has_work(self) -> bool:
        due = self._breaker.probe_in(time.monotonic())
        waits = bool(self._chores) if due is None else due == 0
        return self._closed or waits or bool(self._lookups.wanted)

    def _probe(self) -> None:
        """Ask the peer for something small, or connect to the one that took its place."""
        client, answered = self._client, False
        try:
            if client is not None:
                try:
                    client.hear(PAUSE_SECONDS)
                except StoreClosed:
                    client.close()
                    self._socket, client = client.socket_path, None
            if client is None:
                client = self._open(self._socket)
                client.fail_fast(PATIENCE_SECONDS)
            answered = True
        except Exception as error:  # the next probe may fare better
            if not self._absence_said:
                LOG.warning("until the peer answers nothing is found in the pool: %s", error)
                self._absence_said = True
        with self._wake:
            self._client = None if self._closed else client
        if self._closed and client is not None:
            client.close()
        self._breaker.probed(time.monotonic(), answered=answered)
        if answered and self._absence_said:
            LOG.warning("the peer answers: the pool is in use")
            self._absence_said = False
        self._probed_once.set()


class FetchLimit:
    """Declines blocks that are expected to be there sooner when they are computed, which takes `seconds_per_token`. The
    worker asks for estimates, of all blocks together that a request looked up in one step of the scheduler."""

    def __init__(self, client: EngineClient, seconds_per_token: float) -> None:
        if not seconds_per_token > 0:
            raise ConfigError(
                f"max_fetch_seconds_per_token is {seconds_per_token!r}: it must be above 0"
            )
        self._client = client
        self._seconds_per_token = seconds_per_token
        self._verdicts: dict[str, dict[str, bool | float]] = {}
        """By request and key; before a verdict the time from which on the key is allowed without one."""
        self._gathered: dict[str, dict[str, int]] = {}
        """By request: tokens of the keys of this step."""

    def allows(self, request: str, key: str, tokens: int) -> bool | None:
        """Whether to fetch a block that is there. Never waits. None: look up again, as for `EngineClient.look_up`."""
        verdicts = self._verdicts.setdefault(request, {})
        verdict = verdicts.get(key)
        if verdict is None:
            verdicts[key] = time.monotonic() + ANSWER_SECONDS
            self._gathered.setdefault(request, {})[key] = tokens
            return None
        if isinstance(verdict, bool):
            return verdict
        return True if time.monotonic() >= verdict else None

    def ask(self) -> None:
        """A step of the scheduler has ended: have the worker ask for what it left open."""
        if self._gathered:
            gathered, self._gathered = self._gathered, {}
            self._client.run_in_worker(functools.partial(self._judge, gathered))

    def forget(self, request: str) -> None:
        self._verdicts.pop(request, None)

    def _judge(self, gathered: dict[str, dict[str, int]], client: BlockingClient) -> None:
        for request, tokens in gathered.items():
            verdicts = self._verdicts.get(request, {})
            prefill = [count * self._seconds_per_token for count in tokens.values()]
            fetched = worth_fetching(client.estimate(list(tokens)), prefill)
            verdicts.update((key, place < fetched) for place, key in enumerate(tokens))


def _asking(keys: list[str]) -> Callable[[BlockingClient], list[bool]]:
    return lambda client: client.contains_many(keys)


def digest_of(layout: dict[str, Any]) -> str:
    """The part of keys that stands for a layout of blocks: the same for engines whose blocks are alike."""
    packed = json.dumps(layout, sort_keys=True).encode()
    return hashlib.blake2b(packed, digest_size=NAME_BYTES).hexdigest()


def _compare(engine: str, facts: dict[str, Any], client: BlockingClient) -> None:
    key, ours = PROBE_KEY + engine, json.dumps(facts, sort_keys=True)
    client.put(key, ours.encode(), pin="soft")
    here, there = json.loads(ours), json.loads(client.get(key))
    differences = [
        f"{name} ({here.get(name)!r} here, {there.get(name)!r} there)"
        for name in sorted({*here, *there})
        if here.get(name) != there.get(name)
    ]
    if differences:
        seed = f"PYTHONHASHSEED is {os.environ.get('PYTHONHASHSEED')!r} here: "
        LOG.error(
            "this %s engine differs from those that share its cache in %s: no block of one will ever be found by "
            "another. %sengines share blocks with the same hash algorithm, seed, model and layout only",
            engine,
            ", ".join(differences),
            seed if here["hashes"] != there.get("hashes") else "",
        )
