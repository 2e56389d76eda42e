"""Each holder's share of a byte budget, and the choice of the one to end when it is exceeded."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from p2pstore.runtime.byte_budget import Account, ByteBudget, Owner


def opened(budget: ByteBudget, host: str, member: bytes = b"m") -> tuple[Account, list[str]]:
    """An account that closes when it is to end, as connections do; and why it was."""
    reasons: list[str] = []

    def end(why: str) -> None:
        reasons.append(why)
        account.close()

    account = budget.open(Owner(host, member), end)
    return account, reasons


def test_an_owner_with_its_share_has_no_room_until_it_holds_less() -> None:
    budget = ByteBudget(100, 40, 0)
    first, _ = opened(budget, "a")
    second, _ = opened(budget, "a")
    other, _ = opened(budget, "b")
    woken: list[str] = []
    assert first.has_plenty
    first.hold(30)
    assert not first.has_plenty
    assert other.has_plenty
    assert second.has_room
    second.hold(10)
    assert not first.has_room
    assert not second.has_room
    assert other.has_room
    first.when_room(lambda: woken.append("first"))
    first.release(0)
    other.hold(5)
    other.release(5)
    assert not woken
    second.close()
    assert woken == ["first"]
    assert first.has_room


def test_who_does_not_wait_any_more_is_not_woken() -> None:
    budget = ByteBudget(100, 40, 0)
    account, _ = opened(budget, "a")
    woken: list[int] = []

    def wake() -> None:
        woken.append(1)

    account.hold(50)
    account.when_room(wake)
    account.give_up(wake)
    account.release(50)
    assert not woken


def test_of_the_largest_host_the_largest_owner_goes_whoever_took_the_last_byte() -> None:
    budget = ByteBudget(100, 1000, 0)
    one_of_many = [opened(budget, "crowd", bytes([number])) for number in range(4)]
    for number, (account, _) in enumerate(one_of_many):
        account.hold(15 + number)
    single, single_reasons = opened(budget, "alone")
    single.hold(33)  # more than any of the crowd, but the crowd has 66 together
    assert budget.held_bytes == 99
    late, late_reasons = opened(budget, "late")
    late.hold(2)
    assert [bool(reasons) for _, reasons in one_of_many] == [False, False, False, True]
    assert not single_reasons
    assert not late_reasons
    assert budget.held_bytes == 83
    assert budget.ended == 1


def test_who_holds_too_much_alone_goes_itself() -> None:
    budget = ByteBudget(100, 40, 0)
    account, reasons = opened(budget, "a")
    account.hold(101)
    assert reasons
    assert "the most of all" in reasons[0]
    assert budget.held_bytes == 0
    account.hold(50)  # its last tasks end
    account.release(20)
    assert budget.held_bytes == 0


def test_one_that_takes_its_time_to_end_is_not_ended_twice() -> None:
    budget = ByteBudget(100, 1000, 0)
    told: list[str] = []
    slow = budget.open(Owner("a", b""), told.append)
    slow.hold(110)
    other, reasons = opened(budget, "b")
    other.hold(90)
    slow.hold(5)
    assert len(told) == 1
    assert not reasons
    assert not other.has_room  # the ending one still holds its bytes
    slow.close()
    assert other.has_room
    assert budget.held_bytes == 90


@given(st.integers(0, 2**32))
def test_books_are_kept(seed: int) -> None:
    """Whatever happens in whatever order: no more than the limit is held by those that go on."""
    rng = Random(seed)
    budget = ByteBudget(1000, 250, 0)
    accounts = [opened(budget, f"h{n % 3}", bytes([n % 5]))[0] for n in range(9)]
    for _ in range(200):
        account = rng.choice(accounts)
        match rng.randrange(5):
            case 0 | 1:
                account.hold(rng.randrange(300))
            case 2 | 3:
                account.release(rng.randint(0, account.held_bytes))
            case _:
                account.close()
                accounts[accounts.index(account)] = opened(budget, account.owner.host)[0]
        assert budget.held_bytes == sum(each.held_bytes for each in accounts) <= 1000
        for each in accounts:
            own = sum(other.held_bytes for other in accounts if other.owner == each.owner)
            assert each.has_room == (own < 250)
    for account in accounts:
        account.close()
    assert budget.held_bytes == 0
    assert not budget._of_host
    assert not budget._of_owner
    assert not budget._accounts


def test_a_little_of_each_account_does_not_count() -> None:
    budget = ByteBudget(100, 40, 10)
    account, reasons = opened(budget, "a")
    for change, counted in ((8, 0), (4, 2), (-1, 1), (20, 21), (-25, 0), (-6, 0)):
        account.hold(change)
        assert budget.held_bytes == account.counted_bytes == counted
    account.hold(111)
    assert reasons
    assert budget.held_bytes == 0
