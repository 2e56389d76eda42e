"""Coroutines on the simulated kernel: when they go on, what they wait for, and how they end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from simulation.kernel import Kernel
from simulation.tasks import Answer, Task, sleep


def recorder(kernel: Kernel) -> tuple[list[tuple[float, str]], Callable[[str], None]]:
    """Events with their times, and a function that adds one."""
    seen: list[tuple[float, str]] = []
    return seen, lambda word: seen.append((kernel.now, word))


def test_a_task_begins_with_the_next_event_and_has_a_result_at_its_end() -> None:
    kernel = Kernel(1)
    seen, note = recorder(kernel)

    async def main() -> int:
        note("begun")
        await sleep(1.5)
        note("woken")
        return 7

    task = Task(kernel, main, lambda: note(f"ended with {task.result()}"))
    assert not seen
    kernel.run_until(1.0)
    assert not task.ended
    with pytest.raises(RuntimeError, match="has not ended"):
        task.result()
    kernel.run_until(9.0)
    assert seen == [(0.0, "begun"), (1.5, "woken"), (1.5, "ended with 7")]
    assert task.ended


# --- answers ---------------------------------------------------------------------------------


def waits(kernel: Kernel, *brought: float, timeout_seconds: float) -> tuple[float, bool]:
    """When a wait ended and how, for an answer that is brought at these times: as its own time."""
    answer = Answer[float]()
    for when in brought:
        kernel.at(when, lambda when=when: answer.bring(when))  # type: ignore[misc]  # as above

    async def main() -> tuple[float, bool]:
        came = await answer.wait(timeout_seconds)
        if came:
            assert answer.value == brought[0]
        return kernel.now, came

    task = Task(kernel, main)
    kernel.run_until(99.0)
    return task.result()


def test_a_wait_ends_when_the_answer_comes_or_its_time_is_over() -> None:
    assert waits(Kernel(1), 2.0, timeout_seconds=5.0) == (2.0, True)
    assert waits(Kernel(1), timeout_seconds=5.0) == (5.0, False)
    assert waits(Kernel(1), 6.0, timeout_seconds=5.0) == (5.0, False)
    assert waits(Kernel(1), 5.0, timeout_seconds=5.0) == (5.0, True)


# --- cancellation ----------------------------------------------------------------------------


def test_a_cancelled_task_runs_its_finally_blocks_and_nothing_else() -> None:
    kernel = Kernel(1)
    seen, note = recorder(kernel)
    answer = Answer[int]()

    async def main() -> None:
        try:
            await answer.wait(5.0)
            note("went on")
        except Exception:
            note("took it for an error")
        finally:
            note("let go")

    task = Task(kernel, main, lambda: note("said that it ended"))
    kernel.after(1.0, task.cancel)
    kernel.after(2.0, lambda: answer.bring(1))
    kernel.run_until(9.0)
    task.cancel()
    assert seen == [(1.0, "let go")]
    with pytest.raises(RuntimeError, match="was cancelled"):
        task.result()


@pytest.mark.parametrize("wait", [lambda: sleep(1.0), lambda: Answer[int]().wait(1.0)])
def test_a_task_that_waits_when_it_is_cancelled_is_an_error(
    wait: Callable[[], Awaitable[object]],
) -> None:
    kernel = Kernel(1)

    async def main() -> None:
        try:
            await wait()
        finally:
            await wait()

    task = Task(kernel, main)
    kernel.run_until(0.5)
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        task.cancel()
