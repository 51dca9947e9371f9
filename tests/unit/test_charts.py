"""Charts drawn by the server: readable axes, forms that fit the data, one color for each cause, names as plain text."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from waypost.charts import (
    ColorNames,
    Mark,
    Range,
    Series,
    Span,
    TimeChart,
    TimeRange,
    color_of,
    count_axis,
    draw,
    draw_ranges,
    duration_axis,
    figure,
    format_duration,
    format_short,
    histogram,
    spans,
    sparkline,
    styles,
    time_ticks,
)
from waypost.charts.axes import DAY, HOUR, MINUTE, SECOND
from waypost.charts.colors import NAMED
from waypost.charts.time_chart import lines, steps

pytestmark = pytest.mark.promise("SPARK-7", "FACE-3")

START = 1_772_366_400_000  # 2026-03-01 12:00 UTC
MARKUP = '"><script>hit()</script>&'
#: The panels that charts are drawn on, in light and dark pages.
PANELS = {False: "#ffffff", True: "#171d24"}


def chart(count: int, *series: Series, step: int = MINUTE, **options: object) -> TimeChart:
    return TimeChart("Flow", TimeRange(START, step, count), series, **options)  # type: ignore[arg-type]


def line(values: list[float | None], name: str = "done") -> Series:
    return Series(name, color_of(name), values, "text")


# ---- axes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [SECOND, 90 * SECOND, 14 * MINUTE, 3 * HOUR, 5 * DAY, 90 * DAY, 9_000 * DAY])
def test_times_are_few_and_distinct_at_any_length(length: int) -> None:
    found = time_ticks(START, START + length)
    assert 1 <= len(found) <= 8
    assert len({text for _, text in found}) == len(found)
    assert all(START <= at <= START + length for at, _ in found)


def test_times_have_seconds_below_a_quarter_of_an_hour_and_days_at_midnight() -> None:
    assert time_ticks(START, START + 3 * MINUTE)[1][1] == "12:00:30"
    assert time_ticks(START, START + 2 * HOUR)[1][1] == "12:30"
    assert "2 Mar" in [text for _, text in time_ticks(START, START + DAY)]
    weeks = time_ticks(START, START + 40 * DAY)
    assert all((at // DAY - 4) % 7 == 0 for at, _ in weeks), "Mondays"
    assert [text for _, text in time_ticks(START, START + 90 * DAY)] == ["15 Mar", "1 Apr", "15 Apr", "1 May", "15 May"]
    year = [text for _, text in time_ticks(START, START + 365 * DAY)]
    assert year == ["1 May", "1 Jul", "1 Sep", "1 Nov", "2027", "1 Mar"]


@pytest.mark.parametrize("largest", [0.02, 0.3, 1, 3, 17, 99, 1_234, 5e6])
def test_numbers_have_two_to_five_readable_lines(largest: float) -> None:
    axis = count_axis(largest, whole=False)
    assert 2 <= len(axis.ticks) <= 5
    assert all(re.fullmatch(r"[\d,.]+[kMG]?", text) for _, text in axis.ticks)
    assert axis.place(0) == 0
    assert 0.9 < axis.place(largest) <= 1


def test_no_line_is_between_two_whole_messages() -> None:
    assert [value for value, _ in count_axis(2).ticks] == [1, 2]
    assert count_axis(0).ticks == ()


@pytest.mark.parametrize("largest", [2, 900, 7 * SECOND, 50 * MINUTE, 30 * HOUR, 80 * DAY])
def test_durations_are_logarithmic_only_where_the_spread_needs_it(largest: float) -> None:
    narrow, wide = duration_axis(largest / 5, largest), duration_axis(largest / 100_000, largest)
    assert (narrow.is_log, wide.is_log) == (False, True)
    for axis in (narrow, wide):
        assert (1 if axis.is_log else 2) <= len(axis.ticks) <= 5
        places = [axis.place(value) for value, _ in axis.ticks]
        assert places == sorted(set(places))
        assert axis.place(largest) > 0.9
    assert wide.place(largest / 100_000) < 0.25


def test_durations_and_large_numbers_are_written_as_people_read_them() -> None:
    given = (None, 0, 0.5, 7, 999, 1_500, 41_000, MINUTE, 150 * SECOND, HOUR, 3 * HOUR, 9 * DAY)
    assert [format_duration(one) for one in given] == [
        "–", "0", "< 1 ms", "7 ms", "999 ms", "1.5 s", "41 s", "1 min", "2.5 min", "1 h", "3 h", "9 d",
    ]  # fmt: skip
    assert [format_short(one) for one in (0.25, 3, 9_999, 12_000, 2_500_000)] == ["0.25", "3", "9,999", "12k", "2.5M"]


# ---- forms -----------------------------------------------------------------------------------------------------------


def test_few_points_are_bars_more_are_steps_and_many_are_lines() -> None:
    forms = [chart(count, line([1.0] * count)).drawn_as for count in (3, 90, 400)]
    assert forms == ["bars", "steps", "lines"]
    assert chart(3, line([1.0] * 3), unit="duration").drawn_as == "steps"


def test_a_gap_parts_a_line_and_a_single_point_stays_visible() -> None:
    axis = count_axis(8)
    values = [1.0, None, 4.0, 8.0, None]
    for draw_line in (lines, steps):
        drawn = draw_line(values, axis, 100)
        assert drawn.count("M") == 2
        assert re.match(r"M0 [\d.]+h200", drawn)


def test_stacks_end_at_the_sum_of_their_parts() -> None:
    stacked = chart(2, line([3.0, 0.0], "retried"), line([1.0, 2.0], "dead"), kind="stacked")
    assert stacked.most == 4
    tall = [float(value) for value in re.findall(r"v-([\d.]+)", draw(stacked))]
    assert tall[0] + tall[1] == pytest.approx(stacked.axis().place(4) * 120, abs=1)


@pytest.mark.parametrize("kind", ["auto", "lines", "steps", "bars", "stacked", "band"])
@pytest.mark.parametrize("count", [1, 2, 300])
def test_every_form_is_a_drawing_with_a_title_and_the_texts_of_its_points(kind: str, count: int) -> None:
    series = line([float(number % 7) or None for number in range(count)]), line([9.0] * count, "dead")
    text = figure(chart(count, *series, kind=kind, marks=[Mark(START, "paused")]), heading="orders")
    root = ElementTree.fromstring(text)
    drawing = root.find(".//svg[@role='img']")
    assert drawing is not None
    assert drawing.findtext("title") == "Flow of orders: done text, dead text"
    assert "12:00 UTC: " in text
    assert text.count('class="area"') <= 50
    assert "<title>paused</title>" in text
    assert "nan" not in text


def test_a_chart_without_values_is_drawn_without_lines() -> None:
    for kind in ("auto", "stacked", "band"):
        root = ElementTree.fromstring(draw(chart(5, line([None] * 5), line([None] * 5, "dead"), kind=kind)))
        assert root.findall(".//path") == []


def test_names_are_plain_text_in_every_drawing() -> None:
    series = Series(MARKUP, color_of(MARKUP), [1.0, 2.0], MARKUP)
    drawings = [
        figure(chart(2, series, marks=[Mark(START, MARKUP)], note=MARKUP), heading=MARKUP),
        sparkline({"c-done": [1, 2]}, MARKUP),
        spans([Span(0, 1, "c-done", MARKUP)], MARKUP),
        histogram([0, 1, 10], [0.5, 0.25, 0.25], "c-wait", MARKUP),
        draw_ranges(MARKUP, MARKUP, [Range(MARKUP, 5, 4, 6, "c-wait")], 7),
    ]
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        assert not [element for element in root.iter() if element.tag.endswith("script")]
        assert MARKUP in "".join(root.itertext())


def test_a_sparkline_has_an_outline_for_each_run_of_values_and_none_for_nothing() -> None:
    assert sparkline({"c-done": [0, 0], "c-dead": [0, 0]}, "nothing") == ""
    drawn = sparkline({"c-done": [1, 2, 0, 1], "c-dead": [0, 0, 0, 0]}, "done 4", line=[1, 1, 0, 2], line_color="c-p50")
    assert drawn.count("z") == 2
    assert "c-dead" not in drawn
    assert "<title>done 4</title>" in drawn


def test_short_spans_stay_visible_and_none_passes_the_end() -> None:
    drawn = spans([Span(0.0, 0.00001, "c-done", "short"), Span(1.0, 1.0, "c-dead", "last")], "spans")
    found = [(float(x), float(width)) for x, width in re.findall(r'x="([\d.]+)" width="([\d.]+)"', drawn)]
    assert all(width >= 4 and x + width <= 1000 for x, width in found)


def test_a_distribution_begins_with_its_first_bar_and_ends_with_its_last() -> None:
    edges = [0.0, *(10 ** (part / 10) for part in range(60))]
    shares = [0.0] * 61
    shares[31], shares[41] = 0.4, 0.6
    drawn = histogram(edges, shares, "c-run", "Run time")
    assert drawn.count("<rect") == 2
    assert "1 s to" in drawn
    assert "60.0%" in drawn
    assert histogram(edges, [0.0] * 61, "c-run", "Run time") == ""


# ---- colors ----------------------------------------------------------------------------------------------------------


def luminance(color: str) -> float:
    parts = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_every_color_stands_out_from_the_panel(dark: bool) -> None:
    found = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", styles(dark=dark)))
    assert found.keys() == dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", styles())).keys()
    panel = luminance(PANELS[dark])
    for name, color in found.items():
        light, dim = sorted((panel, luminance(color)), reverse=True)
        assert (light + 0.05) / (dim + 0.05) >= 3.0, f"{name} {color}: WCAG AA asks for 3 of what is drawn"


def test_every_cause_has_a_color_and_only_what_went_well_is_green() -> None:
    classes = {
        name: variable
        for selectors, variable in re.findall(r"([^{}]*)\{ --c: var\(--(\w+)\); \}", styles())
        for name in re.findall(r"\.c-(\w+)", selectors)
    }
    assert classes.keys() >= NAMED
    assert [name for name, variable in classes.items() if variable == "done"] == ["done"]
    for dark in (False, True):
        for name, color in re.findall(r"--([\w-]+): (#[0-9a-f]{6})", styles(dark=dark)):
            red, green, blue = (int(color[place : place + 2], 16) for place in (1, 3, 5))
            assert name == "done" or not green > 1.15 * max(red, blue), f"{name} is green"


def test_names_that_others_chose_share_the_free_colors_in_order() -> None:
    names = ColorNames(["rejected", "fraud", "no_stock", "fraud", *map(str, range(20))])
    assert [names[one] for one in ("rejected", "fraud", "no_stock", "19")] == [
        "c-rejected", "c-free1", "c-free2", "c-other",
    ]  # fmt: skip
