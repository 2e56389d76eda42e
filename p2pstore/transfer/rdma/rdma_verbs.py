"""RDMA devices through pyverbs. The only module that knows it.

pyverbs is optional and imported when a device is first asked for. This module keeps away from the rest:
two layouts of its constants; a completion channel without a descriptor (before version 59); objects that end the
process when they are closed twice, closed in the wrong order, or looked at after that. So everything here belongs to
a `Device`, which closes what it was asked to make, once, in the order that libibverbs wants.

Every call holds the interpreter lock: registering memory whose pages were never touched takes seconds per GiB. All of
this is for one thread.
"""

from __future__ import annotations

import enum
import errno
import importlib
import ipaddress
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple, TypeVar

from p2pstore.errors import ConfigError, Unavailable
from p2pstore.objects import format_bytes
from p2pstore.transfer.rdma.rdma_hardware import (
    interface_of,
    network_bits,
    port_bytes_per_second,
    port_is_active,
)
from p2pstore.transfer.rdma.rdma_rules import (
    MAX_OUTSTANDING_READS,
    RECEIVER_RETRY_COUNT,
    RETRY_COUNT,
    RETRY_TIMEOUT_EXPONENT,
    Endpoint,
    GidEntry,
    Path,
    choose_gid,
)

T = TypeVar("T")
logger = logging.getLogger("p2pstore.transfer")

PORT: Final = 1
HOP_LIMIT: Final = 64
MIN_RECEIVER_TIMER: Final = 12
"""0.64 ms; a queue pair that is only read from never uses it."""
MAX_GIDS: Final = 1024
SMALLEST_MTU_BYTES: Final = 128
"""The ibv_mtu of libibverbs counts doublings of it."""


@dataclass(frozen=True, slots=True)
class Verbs:
    """pyverbs, as far as it is used here."""

    constants: Any
    error: type[Exception]
    modules: dict[str, ModuleType]

    def __getitem__(self, name: str) -> Any:
        """A class or function, as `module.name`."""
        module, _, attribute = name.partition(".")
        return getattr(self.modules[module], attribute)


_loaded: list[Verbs] = []


def load_verbs() -> Verbs:
    """Import pyverbs. Raises `Unavailable` where it is not installed, or does not fit the system's libibverbs."""
    if not _loaded:
        guard = (
            logging.NullHandler()
        )  # pyverbs calls basicConfig, which does nothing when there is a handler
        root = logging.getLogger()
        root.addHandler(guard)
        try:
            import pyverbs.pyverbs_error

            names = ("device", "pd", "mr", "cq", "qp", "addr", "wr")
            modules = {name: importlib.import_module(f"pyverbs.{name}") for name in names}
            _loaded.append(Verbs(_constants(), pyverbs.pyverbs_error.PyverbsError, modules))
        except ImportError as error:
            raise Unavailable(
                f"rdma needs pyverbs ({error}): install python3-pyverbs of the distribution, for the same "
                "Python; pip's builds only against an rdma-core of its own version"
            ) from error
        finally:
            root.removeHandler(guard)
    return _loaded[0]


def _constants() -> Any:
    """All constants by name. Until version 57 they stand in one module, later in enum classes of another one."""
    try:
        return importlib.import_module("pyverbs.enums")
    except ImportError:
        module = importlib.import_module("pyverbs.libibverbs_enums")
    members: dict[str, Any] = {}
    for each in vars(module).values():
        if isinstance(each, type) and issubclass(each, enum.Enum):
            members.update(each.__members__)
    return SimpleNamespace(**members)


def device_names() -> list[str]:
    """The RDMA devices of this machine; none where there is no pyverbs, no driver or no device."""
    try:
        verbs = load_verbs()
    except Unavailable:
        return []
    try:
        return [each.name.decode() for each in verbs["device.get_device_list"]()]
    except verbs.error:  # no driver at all
        return []


class LinkDown(Unavailable):
    """A device's port is down: its cable, or its network interface."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """Limits of a device's port."""

    path_mtu_bytes: int
    max_message_bytes: int
    max_work_requests: int
    max_completions: int
    max_reads: int
    link_bytes_per_second: float
    """0 where it is not known."""


class Completion(NamedTuple):
    """A work request that ended; `status` is one of `rdma_rules.WorkStatus`, or unknown."""

    work_id: int
    status: int


class ReadWork(NamedTuple):
    """A work request of one read."""

    work_id: int
    local_address: int
    length_bytes: int
    remote_address: int


class _Owned:
    """Something of a device, closed once."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self.closed = False

    def close(self) -> None:
        """Close; nothing when it is closed already."""
        if self.closed:
            return
        self.closed = True
        try:
            self._close()
        except load_verbs().error as error:
            logger.warning("an RDMA object did not close (%s): the device may be lost", error)


class Region(_Owned):
    """Registered memory. The keys are copies: those of pyverbs must not be looked at after closing."""

    def __init__(self, raw: Any, address: int, length_bytes: int) -> None:
        super().__init__(raw.close)
        self.address = address
        self.length_bytes = length_bytes
        self.local_key: int = raw.lkey
        self.remote_key: int = raw.rkey

    def holds(self, address: int, length_bytes: int) -> bool:
        """Whether all of that memory is inside."""
        end = self.address + self.length_bytes
        return self.address <= address and address + length_bytes <= end


class CompletionQueue(_Owned):
    """Where work requests end up, with a descriptor that is readable when there may be some after `arm`.

    All calls raise `Unavailable` when the device is lost.
    """

    def __init__(self, device: Device, channel: Any, queue: Any, descriptor: int) -> None:
        def close() -> None:
            queue.close()
            channel.close()

        super().__init__(close)
        self._device = device
        self._channel = channel
        self._queue = queue
        self.descriptor = descriptor

    def poll(self, count: int) -> list[Completion]:
        """Completions that are there, up to `count`."""
        _, found = self._device.attempt("polling", self._queue.poll, count)
        return [Completion(each.wr_id, int(each.status)) for each in found]

    def arm(self) -> None:
        """Make the descriptor readable with the next completion. Those that came before do not count: poll
        once more after it."""
        self._device.attempt("asking for events", self._queue.req_notify)

    def acknowledge(self) -> None:
        """Take the event that made the descriptor readable; nothing when there is none."""
        try:
            self._channel.get_cq_event(self._queue)
        except self._device.verbs.error as error:
            if getattr(error, "error_code", None) != errno.EAGAIN and "again" not in str(error).lower():
                raise Unavailable(
                    f"rdma device {self._device.name}: taking an event failed: {error}"
                ) from error
            return
        self._queue.ack_events(1)


class QueuePair(_Owned):
    """One end of a reliable connection."""

    def __init__(self, device: Device, raw: Any, packet_number: int, *, may_be_read: bool) -> None:
        super().__init__(raw.close)
        self._device = device
        self._raw = raw
        self._may_be_read = may_be_read
        self.number: int = raw.qp_num
        verbs, limits = device.verbs, device.limits
        self._part = verbs["wr.SGE"]
        self._request = partial(
            verbs["wr.SendWR"],
            opcode=verbs.constants.IBV_WR_RDMA_READ,
            num_sge=1,
            send_flags=verbs.constants.IBV_SEND_SIGNALED,
        )
        self.endpoint = Endpoint(
            self.number, packet_number, device.gid.gid, limits.path_mtu_bytes, limits.max_reads
        )

    def connect(self, other: Endpoint, path: Path) -> None:
        """Connect to the other end; it has to do the same. Raises `Unavailable` when there is no way to its
        address. May wait for the network to find its Ethernet address."""
        verbs, constants = self._device.verbs, self._device.verbs.constants
        route = verbs["addr.GlobalRoute"](
            dgid=verbs["addr.GID"](ipaddress.IPv6Address(other.gid).exploded),
            sgid_index=self._device.gid.index,
            hop_limit=HOP_LIMIT,
        )
        attributes = verbs["qp.QPAttr"](port_num=PORT)
        attributes.qp_access_flags = int(constants.IBV_ACCESS_REMOTE_READ) if self._may_be_read else 0
        attributes.pkey_index = 0
        attributes.path_mtu = (path.mtu_bytes // SMALLEST_MTU_BYTES).bit_length() - 1
        attributes.dest_qp_num = other.queue_pair
        attributes.rq_psn = other.packet_number
        attributes.sq_psn = self.endpoint.packet_number
        attributes.max_dest_rd_atomic = attributes.max_rd_atomic = path.reads
        attributes.min_rnr_timer = MIN_RECEIVER_TIMER
        attributes.ah_attr = verbs["addr.AHAttr"](gr=route, is_global=1, port_num=PORT, sl=0)
        attributes.timeout = RETRY_TIMEOUT_EXPONENT
        attributes.retry_cnt = RETRY_COUNT
        attributes.rnr_retry = RECEIVER_RETRY_COUNT
        self._device.attempt("connecting a queue pair", lambda: self._raw.to_rts(attributes))

    def read(self, works: Sequence[ReadWork], into: Region, remote_key: int) -> None:
        """Begin to read, in this order; a completion of each tells its end. The memory is the device's until then.
        The caller counts what is under way. Raises `Unavailable` when the device does not take all of them: some may
        have begun."""
        made: list[Any] = []
        first = None
        try:
            for work in reversed(works):
                made.append(self._part(work.local_address, work.length_bytes, into.local_key))
                first = self._request(wr_id=work.work_id, sg=[made[-1]], next_wr=first)
                made.append(first)
                first.set_wr_rdma(remote_key, work.remote_address)
            self._device.attempt("posting reads", self._raw.post_send, first)
        finally:  # their memory is not given back otherwise
            for each in made:
                each.close()

    def fail(self) -> None:
        """Stop: reads under way end as flushed."""
        attributes = self._device.verbs["qp.QPAttr"](port_num=PORT)
        attributes.qp_state = self._device.verbs.constants.IBV_QPS_ERR
        state = int(self._device.verbs.constants.IBV_QP_STATE)
        self._device.attempt("stopping a queue pair", lambda: self._raw.modify(attributes, state))


class Device:
    """An open RDMA device, and all that is made with it. Close it, or use it as a context manager.

    Raises `Unavailable` when it cannot be opened, its port is down, or it has no address that other machines
    reach.
    """

    def __init__(self, name: str) -> None:
        self.verbs = load_verbs()
        self.name = name
        self.closed = False
        self._queue_pairs: list[QueuePair] = []
        self._queues: list[CompletionQueue] = []
        self._regions: list[Region] = []
        self._context = self.attempt(
            "opening the device", lambda: self.verbs["device.Context"](name=name)
        )
        self._domain: Any = None
        try:
            self.limits, self.gid = self._look()
            self.interface = interface_of(name, PORT, self.gid.index)
            self.network_bits = network_bits(self.interface, self.gid.gid)
            self._domain = self.attempt(
                "making a protection domain", lambda: self.verbs["pd.PD"](self._context)
            )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def attempt(self, what: str, action: Callable[..., T], *arguments: Any) -> T:
        """The result of `action`. Raises `Unavailable` for what pyverbs raises."""
        try:
            return action(*arguments)
        except self.verbs.error as error:
            raise Unavailable(f"rdma device {self.name}: {what} failed: {error}") from error

    @property
    def is_active(self) -> bool:
        """Whether the port's link is up now."""
        return port_is_active(self.name, PORT)

    def check_link(self) -> None:
        """Raise `LinkDown` when nothing gets through the port now."""
        if not self.is_active:
            raise LinkDown(
                f"rdma device {self.name}: port {PORT} is not active: look at its cable and interface"
            )

    def _look(self) -> tuple[DeviceLimits, GidEntry]:
        attributes = self.attempt("asking for its limits", lambda: self._context.query_device())
        port = self.attempt("asking for its port", lambda: self._context.query_port(PORT))
        if int(port.state) != int(self.verbs.constants.IBV_PORT_ACTIVE):
            raise LinkDown(
                f"rdma device {self.name}: port {PORT} is not active: look at its cable and interface"
            )
        chosen = choose_gid(self.gids())
        if chosen is None:
            raise Unavailable(
                f"rdma device {self.name} has no RoCE v2 address that other machines reach: give its network "
                "interface an IP address (InfiniBand is not supported yet)"
            )
        limits = DeviceLimits(
            path_mtu_bytes=SMALLEST_MTU_BYTES << int(port.active_mtu),
            max_message_bytes=int(port.max_msg_sz),
            max_work_requests=int(attributes.max_qp_wr),
            max_completions=int(attributes.max_cqe),
            max_reads=max(
                1,
                min(
                    int(attributes.max_qp_rd_atom),
                    int(attributes.max_qp_init_rd_atom),
                    MAX_OUTSTANDING_READS,
                ),
            ),
            link_bytes_per_second=port_bytes_per_second(self.name, PORT),
        )
        return limits, chosen

    def gids(self) -> list[GidEntry]:
        """The addresses of the port."""
        rows = self.attempt("reading its addresses", lambda: self._context.query_gid_table(MAX_GIDS))
        return [
            GidEntry(row.gid_index, ipaddress.IPv6Address(row.gid_str()).packed, int(row.gid_type))
            for row in rows
            if row.port_num == PORT
        ]

    def register(self, address: int, length_bytes: int, *, remote_read: bool) -> Region:
        """Make memory known to the device; it must stay mapped, writable, until the region is closed.

        Raises `ConfigError` when this process may not lock that much memory, `Unavailable` for other reasons.
        """
        constants = self.verbs.constants
        access = int(constants.IBV_ACCESS_LOCAL_WRITE)
        if remote_read:
            access |= int(constants.IBV_ACCESS_REMOTE_READ)
        try:
            raw = self.verbs["mr.MR"](self._domain, length_bytes, access, address=address)
        except self.verbs.error as error:
            size = format_bytes(length_bytes)
            if getattr(error, "error_code", None) == errno.ENOMEM or "allocate" in str(error):
                raise ConfigError(
                    f"rdma device {self.name}: this process may not lock {size} of memory: raise `ulimit -l` "
                    "(LimitMEMLOCK= of a systemd unit, --ulimit memlock=-1 of a container)"
                ) from error
            raise Unavailable(
                f"rdma device {self.name}: registering {size} of memory failed: {error}"
            ) from error
        region = Region(raw, address, length_bytes)
        self._regions.append(region)
        return region

    def completion_queue(self, entries: int) -> CompletionQueue:
        """A queue for `entries` completions."""
        channel, descriptor = self._channel()
        try:
            queue = self.attempt(
                "making a completion queue",
                lambda: self.verbs["cq.CQ"](self._context, entries, None, channel, 0),
            )
        except BaseException:
            channel.close()
            raise
        made = CompletionQueue(self, channel, queue, descriptor)
        self._queues.append(made)
        return made

    def _channel(self) -> tuple[Any, int]:
        """A completion channel and its descriptor, which older versions of pyverbs do not tell."""
        before = _event_descriptors()
        channel = self.attempt(
            "making a completion channel", lambda: self.verbs["cq.CompChannel"](self._context)
        )
        descriptor = getattr(channel, "fd", None)
        if descriptor is None:
            (descriptor,) = _event_descriptors() - before
        os.set_blocking(descriptor, False)
        return channel, descriptor

    def queue_pair(
        self, completions: CompletionQueue, packet_number: int, *, requests: int, may_be_read: bool
    ) -> QueuePair:
        """A queue pair for up to `requests` requests under way, not connected yet. With `may_be_read`, the other
        end may read the memory that was registered for that."""
        capacity = self.verbs["qp.QPCap"](
            max_send_wr=requests, max_recv_wr=1, max_send_sge=1, max_recv_sge=1
        )
        settings = self.verbs["qp.QPInitAttr"](
            qp_type=self.verbs.constants.IBV_QPT_RC,
            scq=completions._queue,
            rcq=completions._queue,
            cap=capacity,
            sq_sig_all=0,
        )
        raw = self.attempt("making a queue pair", lambda: self.verbs["qp.QP"](self._domain, settings))
        self._queue_pairs = [each for each in self._queue_pairs if not each.closed]
        made = QueuePair(self, raw, packet_number, may_be_read=may_be_read)
        self._queue_pairs.append(made)
        return made

    def close(self) -> None:
        """Close everything made with this device, and the device. Nothing reads or writes memory after that."""
        if self.closed:
            return
        self.closed = True
        for each in (*self._queue_pairs, *self._queues, *self._regions):
            each.close()
        for raw in (self._domain, self._context):
            if raw is not None:
                _Owned(raw.close).close()


def _event_descriptors() -> set[int]:
    """Descriptors of this process that tell events of RDMA devices."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the one that lists the folder
            continue
        if target.endswith("[infinibandevent]"):
            found.add(int(name))
    return found
