"""The simulator's foundations: virtual time in order, and a network that fails as it is told to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation import kernel as kernel_module
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


def test_what_is_due_in_the_past_runs_now_and_after_what_waits_already() -> None:
    kernel = Kernel(1)
    ran: list[str] = []

    def first() -> None:
        ran.append("first")
        kernel.at(0.5, lambda: ran.append(f"late at {kernel.now}"))

    kernel.at(2.0, first)
    kernel.at(2.0, lambda: ran.append("second"))
    kernel.run_until(3.0)
    assert ran == ["first", "second", "late at 2.0"]


def test_after_counts_from_now() -> None:
    kernel = Kernel(1)
    seen: list[float] = []
    kernel.after(1.0, lambda: kernel.after(0.5, lambda: seen.append(kernel.now)))
    kernel.run_until(10.0)
    assert seen == [1.5]


def test_it_runs_to_the_time_given_and_no_further() -> None:
    kernel = Kernel(1)
    seen: list[float] = []
    for when in (1.0, 2.0, 2.001):
        kernel.at(when, lambda: seen.append(kernel.now))
    kernel.run_until(2.0)
    assert (seen, kernel.now) == ([1.0, 2.0], 2.0)
    kernel.run_until(1.0)
    assert kernel.now == 2.0, "time does not go back"


def test_stopping_early_leaves_the_time_where_it_was() -> None:
    kernel = Kernel(1)
    seen: list[float] = []
    for when in (1.0, 2.0, 3.0):
        kernel.at(when, lambda: seen.append(kernel.now))
    kernel.run_until(10.0, stop=lambda: len(seen) == 2)
    assert kernel.now == 2.0


def test_a_simulation_that_does_not_rest_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_module, "MAX_EVENTS", 100)
    kernel = Kernel(1)

    def again() -> None:
        kernel.after(0.0, again)

    again()
    with pytest.raises(RuntimeError, match="rest"):
        kernel.run_until(1.0)


def test_the_trace_tells_times_words_and_order_apart() -> None:
    def traced(*events: tuple[float, str]) -> str:
        kernel = Kernel(1)
        for when, word in events:
            kernel.at(when, lambda word=word: kernel.trace(word))  # type: ignore[misc]  # default
        kernel.run_until(10.0)
        return kernel.trace_hash

    assert traced((1.0, "a"), (2.0, "b")) == traced((1.0, "a"), (2.0, "b"))
    hashes = {
        traced(),
        traced((1.0, "a"), (2.0, "b")),
        traced((1.0, "b"), (2.0, "a")),
        traced((1.0, "a"), (2.1, "b")),
        traced((1.0, "a")),
    }
    assert len(hashes) == 5


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


def test_without_faults_everything_arrives_once_and_in_time() -> None:
    net = network()
    seen = arrivals(net, 500)
    assert len(seen) == 500
    assert all(0.0002 - 1e-9 <= latency <= 0.001 + 1e-9 for latency in seen)
    assert max(seen) - min(seen) > 0.0005, "latencies vary"
    assert (net.messages, net.bytes_sent) == (500, 5000)


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_loss_has_its_rate(rate: float) -> None:
    seen = arrivals(network(Faults(loss=rate)), 4000)
    assert len(seen) / 4000 == pytest.approx(1.0 - rate, abs=0.03)


@pytest.mark.parametrize("rate", [0.0, 0.1, 1.0])
def test_duplication_has_its_rate(rate: float) -> None:
    seen = arrivals(network(Faults(duplication=rate)), 4000)
    assert len(seen) / 4000 == pytest.approx(1.0 + rate, abs=0.03)


def test_each_copy_of_a_message_is_lost_on_its_own() -> None:
    seen = arrivals(network(Faults(loss=0.5, duplication=1.0)), 4000)
    assert len(seen) / 4000 == pytest.approx(1.0, abs=0.05)


def test_some_messages_are_slow() -> None:
    seen = arrivals(network(Faults(slow=0.2, slow_latency=2.0)), 4000)
    slow = [latency for latency in seen if latency > 0.0011]
    assert len(slow) / 4000 == pytest.approx(0.2, abs=0.03)
    assert 1.8 < max(slow) <= 2.0
    assert sum(slow) / len(slow) == pytest.approx(1.0, abs=0.1)


def test_a_slow_message_is_overtaken() -> None:
    net = network(Faults(slow=0.3, slow_latency=1.0))
    order: list[int] = []
    for number in range(200):
        net.kernel.at(
            number * 0.01,
            lambda n=number: net.send(0, 1, 1, lambda: order.append(n)),  # type: ignore[misc]
        )
    net.kernel.run_until(10.0)
    assert sorted(order) == list(range(200))
    assert order != sorted(order)


def test_a_partition_cuts_every_link_between_groups_and_none_within() -> None:
    net = network()
    net.partition({0, 1}, {2}, {3})
    reached = {(a, b) for a in range(4) for b in range(4) if a != b and arrivals(net, 1, a, b)}
    assert reached == {(0, 1), (1, 0)}
    net.heal()
    assert all(arrivals(net, 1, a, b) for a in range(4) for b in range(4) if a != b)


def test_a_partition_may_be_one_way() -> None:
    net = network()
    net.blocked.add((0, 1))
    assert not arrivals(net, 1, 0, 1)
    assert arrivals(net, 1, 1, 0)


def test_what_is_under_way_when_the_link_is_cut_is_lost() -> None:
    net = network()
    seen: list[str] = []
    net.send(0, 1, 1, lambda: seen.append("arrived"))
    net.partition({0}, {1})
    net.kernel.run_until(1.0)
    assert not seen
    net.send(0, 1, 1, lambda: seen.append("arrived after healing"))
    net.heal()
    net.kernel.run_until(2.0)
    assert seen == ["arrived after healing"]


def test_the_same_seed_fails_alike_and_another_differently() -> None:
    def run(seed: int) -> tuple[list[float], str]:
        net = network(Faults(loss=0.2, duplication=0.2, slow=0.2), seed)
        return arrivals(net, 300), net.kernel.trace_hash

    assert run(5) == run(5)
    assert run(5)[0] != run(6)[0]


def test_faults_may_change_while_it_runs() -> None:
    net = network(Faults(loss=1.0))
    assert not arrivals(net, 20)
    net.faults = Faults()
    assert len(arrivals(net, 20)) == 20
