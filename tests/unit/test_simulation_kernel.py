"""The simulator's foundations: virtual time in order, and a network that fails as it is told to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.kernel import Faults, FaultyNetwork, Kernel

# --- time ------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 20)))
def test_events_run_in_order_of_time_and_ties_in_order_of_calling(times: list[int]) -> None:
    kernel = Kernel(1)
    ran: list[tuple[int, int]] = []
    for number, when in enumerate(times):

        def action(number: int = number, when: int = when) -> None:
            assert kernel.now == when
            ran.append((when, number))

        kernel.at(when, action)
    kernel.run_until(30.0)
    assert ran == sorted((when, number) for number, when in enumerate(times))
    assert kernel.now == 30.0
    assert kernel.events == len(times)


# --- the network -----------------------------------------------------------------------------


def network(faults: Faults | None = None, seed: int = 1) -> FaultyNetwork:
    return FaultyNetwork(Kernel(seed), faults or Faults())


def arrivals(net: FaultyNetwork, count: int, source: int = 0, target: int = 1) -> list[float]:
    """Latencies of what arrives of `count` messages, one sent each second."""
    seen: list[float] = []
    kernel = net.kernel
    begin = kernel.now
    for number in range(count):
        sent_at = begin + number

        def send(sent_at: float = sent_at) -> None:
            net.send(source, target, 10, lambda: seen.append(kernel.now - sent_at))

        kernel.at(sent_at, send)
    kernel.run_until(begin + count + 10.0)
    return seen


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_loss_has_its_rate(rate: float) -> None:
    seen = arrivals(network(Faults(loss=rate)), 4000)
    assert len(seen) / 4000 == pytest.approx(1.0 - rate, abs=0.03)


def test_a_partition_cuts_every_link_between_groups_and_none_within() -> None:
    net = network()
    net.partition({0, 1}, {2}, {3})
    reached = {(a, b) for a in range(4) for b in range(4) if a != b and arrivals(net, 1, a, b)}
    assert reached == {(0, 1), (1, 0)}
    net.heal()
    assert all(arrivals(net, 1, a, b) for a in range(4) for b in range(4) if a != b)


def test_the_same_seed_fails_alike_and_another_differently() -> None:
    def run(seed: int) -> tuple[list[float], str]:
        net = network(Faults(loss=0.2, duplication=0.2, slow=0.2), seed)
        return arrivals(net, 300), net.kernel.trace_hash

    assert run(5) == run(5)
    assert run(5)[0] != run(6)[0]
