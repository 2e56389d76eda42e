"""The list of entries against a Python list."""

from random import Random

from p2pstore.memory.entries import EntryList, unlink
from tests.unit.eviction_entries import entry


def test_it_holds_the_order_and_the_bytes_that_a_list_would() -> None:
    rng = Random(1)
    entries = [entry(number, bytes_=1 + number % 7) for number in range(40)]
    linked, model = EntryList(), list[int]()
    for _ in range(5000):
        number = rng.randrange(len(entries))
        if number in model:
            model.remove(number)
            unlink(entries[number])
            assert entries[number].within is None
        elif model and rng.random() < 0.5:
            place = rng.randrange(len(model))
            linked.insert_before(entries[number], entries[model[place]])
            model.insert(place, number)
        else:
            linked.append(entries[number])
            model.append(number)
        assert [each.slot for each in linked] == model
        assert linked.bytes == sum(entries[each].extent_bytes for each in model)
        assert all(entries[each].within is linked for each in model)


def test_an_entry_among_others_is_told_by_itself() -> None:
    linked = EntryList()
    entries = [entry(number) for number in range(3)]
    for each in entries:
        linked.append(each)
    assert "slot=1" in repr(entries[1])
    assert "slot=2" not in repr(entries[1])
