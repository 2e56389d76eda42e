"""Figures of `bench`: units, ratios, and the document that scripts share."""

from __future__ import annotations

import json

from mooncake_p2p.commands.bench import LEAST_SAMPLES, Figure, document, medians_in_turns


def test_a_figure_becomes_a_median_and_a_rate() -> None:
    median, rate = Figure("put, 1 B", 1000, 0.002, "copy", 0.001).results()
    assert (median.name, median.value, median.unit) == ("put, 1 B, median", 2000.0, "us")
    assert (median.against, median.baseline, median.ratio) == ("copy", 1000.0, 2.0)
    assert (rate.name, rate.unit, rate.ratio) == ("put, 1 B, rate", "GB/s", 0.5)
    assert abs(rate.value - 0.0005) < 1e-9
    (alone,) = Figure("contains", 0, 0.001).results()
    assert (alone.against, alone.baseline, alone.ratio) == ("", None, None)


def test_the_document_has_the_shape_of_the_scripts() -> None:
    made = json.loads(json.dumps(document([Figure("put", 8, 0.1, "copy", 0.1)])))
    assert set(made) == {"results", "machine"}
    wanted = {"name", "value", "unit", "against", "baseline", "ratio"}
    assert [set(each) for each in made["results"]] == [wanted, wanted]
    assert made["machine"]["cores"] > 0


def test_turns_alternate_and_the_first_does_not_count() -> None:
    order: list[str] = []

    def turn(name: str, first: float, later: float) -> float:
        order.append(name)
        return first if order.count(name) == 1 else later

    taken = medians_in_turns(lambda: turn("a", 99, 2), lambda: turn("b", 99, 1), seconds=0.0)
    assert taken == (2, 1)
    assert order == ["a", "b"] * (1 + LEAST_SAMPLES)
