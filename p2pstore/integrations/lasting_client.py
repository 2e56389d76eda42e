"""A client for engines that run for weeks: the peer may be restarted, and a cache that is away is only a miss."""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar, cast

from p2pstore import blocking
from p2pstore.blocking import BlockingClient
from p2pstore.errors import ConfigError, P2PStoreError, StoreClosed
from p2pstore.objects import MAX_KEY_BYTES

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

LOG: Final = logging.getLogger("p2pstore.integrations")
RETRY_SECONDS: Final = 1.0
QUIET_SECONDS: Final = 10.0
KEPT_BYTES: Final = 900
"""Of a text that is too long for a key, its beginning that the key keeps: for people, and listings by prefix."""
_KEY_PERSON: Final = b"p2pstore.engine"
PROBE_KEY: Final = "p2pstore hash probe/"


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


def or_else(missing: Callable[..., Any]) -> Callable[[F], F]:
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
    plugin._client.say(f"{method.__name__} failed, which counts as a miss: {error!r}")


class LastingClient:
    """Calls to this machine's peer that never raise, whatever fails. Any thread may make them.

    `weight_version` is the namespace: what one version of a model's weights computed is of no use to another, so every
    engine has to say which one it runs. Raises `ConfigError` without it, and what `blocking.connect` raises.
    """

    def __init__(
        self, weight_version: Any, socket: str | None = None, *, timeout: float = 5.0
    ) -> None:
        if not isinstance(weight_version, str) or not weight_version.strip():
            raise ConfigError(
                f"weight_version is {weight_version!r}: name the model and the version of its weights as text, such as "
                "'llama-3.1-8b@v1'; engines share a cache only under the same name"
            )
        self._timeout = timeout
        self._lock = threading.Lock()
        self._retry_at = 0.0
        self._quiet_until: dict[str, float] = {}
        self._client = blocking.connect(socket, namespace=weight_version, timeout=timeout)
        self._closed = False

    def call(self, what: Callable[[BlockingClient], T], otherwise: T) -> T:
        """The result of the call, or `otherwise` when the store fails; the log says so. When the peer was restarted,
        the call is made once more, to the new one."""
        for attempt in range(2):
            client = self._client
            try:
                return what(client)
            except StoreClosed as error:
                if attempt or not self._reconnect(client):
                    self.say(str(error))
                    return otherwise
            except Exception as error:  # the engine goes on, whatever it is
                self.say(str(error) or repr(error))
                return otherwise
        return otherwise

    def say(self, text: str) -> None:
        """Say it in the log, the same thing every ten seconds at most."""
        now = time.monotonic()
        if now >= self._quiet_until.get(text, 0.0):
            if len(self._quiet_until) > 100:
                self._quiet_until.clear()
            self._quiet_until[text] = now + QUIET_SECONDS
            LOG.warning("%s", text)

    def say_unknown(self, given: Iterable[str], known: Sequence[str]) -> None:
        """Say in the log which of the settings that were given mean nothing here."""
        for name in sorted(set(given) - set(known)):
            near = difflib.get_close_matches(name, known, n=1)
            meant = f": did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
            LOG.warning("there is no setting %r, so it changes nothing%s", name, meant)

    def close(self) -> None:
        """Disconnect; may be called twice. Calls then give what they give when the store fails."""
        with self._lock:
            self._closed = True
            self._client.close()

    def _reconnect(self, lost: BlockingClient) -> bool:
        """Connect to the peer that took the lost one's place, once a second at most. Whether there is one."""
        with self._lock:
            if self._closed:
                return False
            if self._client is not lost:
                return True
            if time.monotonic() < self._retry_at:
                return False
            self._retry_at = time.monotonic() + RETRY_SECONDS
            try:
                self._client = blocking.connect(
                    lost.socket_path, namespace=lost.namespace, timeout=self._timeout
                )
            except (P2PStoreError, OSError):
                return False
            lost.close()
            return True

    # --- hashes ------------------------------------------------------------------------------

    def hashes_agree(self, engine: str, hashed: Any) -> bool:
        """Whether the other engines of this kind and weight version make the same hashes of the same tokens. `hashed`
        is what this one makes of something fixed. The first engine leaves its own as an object; an engine that
        finds another one logs that no block will ever match, and why."""
        value = repr(hashed).encode()
        key = PROBE_KEY + engine
        self.call(lambda client: client.put(key, value, pin="soft"), None)
        found = self.call(lambda client: client.get(key), value)
        if found == value:
            return True
        LOG.error(
            "this %s engine hashes blocks otherwise than those that share its cache (PYTHONHASHSEED is %r here): no "
            "block of one will ever be found by another. Start all of them with the same PYTHONHASHSEED, and the same "
            "hash algorithm",
            engine,
            os.environ.get("PYTHONHASHSEED"),
        )
        return False
