"""Seconds, bytes, rates and shares: the only place where a number becomes text.

Everything inside scalelab is in base units: seconds, bytes, per second, ratios in [0, 1]. All numbers of a table's
column share one unit and one number of decimals:

    unit       the largest in which the median magnitude is at least 1
    decimals   with intervals, enough for ± to show one or two significant digits; without, three significant digits of
               the median. The smallest entry may add one decimal; no entry has more than six digits.

Whether ± gets a second digit follows the Particle Data Group (Review of Particle Physics, Introduction, section 5.3,
"Rounding"): two digits up to 354, one from 355 on, since 1 for 1.4 would be wrong by almost half. It gets none beyond
two decimals of a ratio or a whole percent. A nonzero ± never prints as zero: it is rounded up.

Unknown is None and prints as "–", like nan and the infinities. A minus is U+2212, as wide as a digit; numbers of five
digits and more are grouped with the narrow no-break space U+202F.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

Quantity = Literal[
    "text", "count", "seconds", "bytes", "rate", "ratio", "share", "number", "loss", "accuracy", "epochs", "latency",
    "bandwidth"
]  # fmt: skip
"""What a number is. A rate is per second, a share is a ratio printed in percent, a number has no unit. Latency and
bandwidth are seconds and bytes per second in fixed units, µs and GB/s."""

UNKNOWN = "–"
PLUS_MINUS = " ± "
GROUP_SEPARATOR = "\u202f"
MAX_DIGITS = 6
"""Further digits are noise."""
MAX_DECIMALS = 12


class Measured(Protocol):
    """A value with its interval, such as `scalelab.analysis.estimate.Estimate`."""

    @property
    def value(self) -> float: ...
    @property
    def half_width(self) -> float | None: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class Unit:
    """How the numbers of one column are printed."""

    symbol: str = ""
    """What stands in the column's header; empty: nothing."""
    factor: float = 1.0
    """How many base units one of it is: 0.001 for ms."""
    decimals: int = 0

    @property
    def suffix(self) -> str:
        """What follows every number: percent is part of the number, other units stand in the header."""
        return " %" if self.symbol == "%" else ""


_SCALES: Mapping[Quantity, Sequence[tuple[str, float, float]]] = {
    "seconds": (
        ("ns", 1e-9, 0.0), ("µs", 1e-6, 1e-6), ("ms", 1e-3, 1e-3), ("s", 1.0, 1.0), ("min", 60.0, 120.0),
        ("h", 3600.0, 7200.0),
    ),
    "bytes": (("B", 1.0, 0.0), ("kB", 1e3, 1e3), ("MB", 1e6, 1e6), ("GB", 1e9, 1e9), ("TB", 1e12, 1e12)),
    "rate": (("", 1.0, 0.0), ("k", 1e3, 1e5), ("M", 1e6, 1e6), ("G", 1e9, 1e9), ("T", 1e12, 1e12)),
    "share": (("%", 0.01, 0.0),),
    "accuracy": (("%", 0.01, 0.0),),
    "latency": (("µs", 1e-6, 0.0),),
    "bandwidth": (("GB/s", 1e9, 0.0),),
}  # fmt: skip
"""Symbol, factor and the smallest magnitude it is used for, ascending."""

_USUAL_DECIMALS: Mapping[Quantity, int] = {"ratio": 2, "share": 0}
"""The most decimals that a second digit of ± may add."""

_FIXED_DECIMALS: Mapping[Quantity, int] = {"loss": 4, "accuracy": 2, "epochs": 2}
"""Figures compared digit by digit with those of another run; fewer where intervals leave fewer."""


def choose_unit(
    quantity: Quantity,
    values: Iterable[float | Measured | None],
    scaled_as: Iterable[float | Measured | None] = (),
) -> Unit:
    """One unit and one number of decimals for a whole column; unknown values do not count.

    `scaled_as`: numbers that choose the unit instead, where any of them is known.
    """
    pairs = [_split_measured(value) for value in values]
    others = sorted(abs(number) for number, _ in map(_split_measured, scaled_as) if number)
    numbers = sorted(abs(number) for number, _ in pairs if number)
    widths = sorted(width for number, width in pairs if number is not None and width and width > 0)
    symbol, factor = _choose_scale(quantity, statistics.median_high(others or numbers or widths or [1.0]))
    numbers, widths = _scale_all(numbers, factor), _scale_all(widths, factor)
    if not (numbers or widths) or quantity in ("text", "count") or symbol == "B":
        return Unit(symbol=symbol, factor=factor)
    if quantity in _FIXED_DECIMALS:
        fewer = [max(0, _decimals_for_widths(quantity, widths))] if widths else []
        return Unit(symbol=symbol, factor=factor, decimals=min([_FIXED_DECIMALS[quantity], *fewer]))
    wanted = _decimals_for_widths(quantity, widths) if widths else _decimals_for_values(quantity, numbers)
    affordable = MAX_DIGITS - _count_integer_digits(max(numbers + widths))
    return Unit(symbol=symbol, factor=factor, decimals=max(0, min(wanted, affordable, MAX_DECIMALS)))


def _split_measured(entry: float | Measured | None) -> tuple[float | None, float | None]:
    """The value and the half-width of an entry, each None unless it is finite."""
    if entry is None or isinstance(entry, int | float):
        return _convert(entry, 1.0), None
    return _convert(entry.value, 1.0), _convert(entry.half_width, 1.0)


def _convert(value: float | None, factor: float) -> float | None:
    """A value in a unit; None if it is unknown or overflows."""
    try:
        converted = math.nan if value is None else value / factor
    except OverflowError:
        return None
    return converted if math.isfinite(converted) else None


def _scale_all(values: Iterable[float], factor: float) -> list[float]:
    """The values in a unit, without zeros."""
    converted = (_convert(value, factor) for value in values)
    return [value for value in converted if value]


def _choose_scale(quantity: Quantity, magnitude: float) -> tuple[str, float]:
    """The symbol and the factor for a magnitude, rounded first: 999.9 ms prints as 1 s."""
    scales = _SCALES.get(quantity, (("", 1.0, 0.0),))
    rounded = float(f"{magnitude:.2e}")
    symbol, factor, _ = [scale for scale in scales if scale[2] <= rounded][-1]
    return symbol, factor


def _decimals_for_widths(quantity: Quantity, widths: Sequence[float]) -> int:
    """Enough for the median width to show one or two digits, and one more if the smallest would show none."""
    median = statistics.median_low(widths)
    one_digit = 1 - _count_integer_digits(median)
    deserves_two = _split_digits(median)[0] < 3.55
    decimals = max(one_digit, min(one_digit + deserves_two, _USUAL_DECIMALS.get(quantity, MAX_DECIMALS)))
    return min(max(decimals, 1 - _count_integer_digits(widths[0])), max(decimals, 0) + 1)


def _decimals_for_values(quantity: Quantity, values: Sequence[float]) -> int:
    """Three digits of the median, one more if the smallest would show none; whole percents from 2 % on."""
    if quantity == "share":
        return 0 if values[-1] >= 2 else 2 - _count_integer_digits(values[-1])
    if quantity in ("number", "bytes") and all(float(value).is_integer() for value in values):
        return 0
    decimals = 3 - _count_integer_digits(statistics.median_high(values))
    return min(max(decimals, 1 - _count_integer_digits(values[0])), max(decimals, 0) + 1)


def _count_integer_digits(value: float) -> int:
    """The digits before the point: 3 for 413, 0 for 0.41, -1 for 0.041; 0.9999 counts as 1.00."""
    return _split_digits(value)[1] + 1


def _split_digits(value: float) -> tuple[float, int]:
    """A value as it looks with three significant digits: 4.13 and the exponent 2 for 413."""
    digits, exponent = f"{value:.2e}".split("e")
    return float(digits), int(exponent)


def format_value(value: float | None, unit: Unit) -> str:
    """A number in a unit, without its symbol except %: "413.0", "96 %"."""
    number = _convert(value, unit.factor)
    return UNKNOWN if number is None else _format_number(number, unit.decimals) + unit.suffix


def _format_number(number: float, decimals: int) -> str:
    """A finite number with a fixed number of decimals; what rounds to zero has no sign."""
    if abs(number) >= 1e15:
        return f"{number:.2e}".replace("-", "−")
    digits = f"{abs(number):,.{decimals}f}".replace(",", GROUP_SEPARATOR if abs(number) >= 9999.5 else "")
    is_negative = number < 0 and any(digit in "123456789" for digit in digits)
    return "−" + digits if is_negative else digits


NARROW, LOPSIDED = 0.25, 1.5
"""An interval wider than this share of the number that reaches so many times as far to one side has no useful ±."""
WIDE, UNEVEN = 0.5, 1.2
"""Nor has one that is wider still and reaches so many times as far."""


def format_estimate(estimate: Measured | None, unit: Unit) -> str:
    """A value with its interval, "413.0 ± 2.0", or the value alone where there is no interval.

    The ends of an interval that is wide and lopsided: "1.43 (0.55 to 1.55)", where ± would be "1.43 ± 0.88".
    """
    if estimate is None:
        return UNKNOWN
    size, width = abs(estimate.value), estimate.half_width or 0.0
    if width > NARROW * size and _is_lopsided(estimate, UNEVEN if width > WIDE * size else LOPSIDED):
        return _format_ends(estimate, _refine(estimate.low, 1, unit))
    number, half_width = _convert(estimate.value, unit.factor), _convert(estimate.half_width, unit.factor)
    if number is None or half_width is None:
        is_rounded = unit.symbol != "%" and number is not None and not number.is_integer()
        return format_value(estimate.value, _refine(estimate.value, 3, unit) if is_rounded else unit)
    shown = max(half_width, 10.0**-unit.decimals) if half_width > 0 else 0.0
    return PLUS_MINUS.join(_format_number(part, unit.decimals) for part in (number, shown)) + unit.suffix


MORE_DECIMALS = 2
"""That a number and its ends may have beyond those of its column, so that the lower end does not print as 0."""


def _refine(number: float | None, digits: int, unit: Unit) -> Unit:
    """So many digits for a number that its column would leave fewer, as 1.95 and not 2, within MORE_DECIMALS."""
    wanted = digits - _count_integer_digits(number / unit.factor) if number else 0
    return replace(unit, decimals=max(unit.decimals, min(wanted, unit.decimals + MORE_DECIMALS)))


def _format_ends(estimate: Measured, unit: Unit) -> str:
    """`1.43 (0.55 to 1.55)`."""
    value, low, high = (format_value(number, unit) for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def _is_lopsided(estimate: Measured, limit: float) -> bool:
    low, high = estimate.low, estimate.high
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return False
    arms = sorted((estimate.value - low, high - estimate.value))
    return arms[1] > limit * arms[0] >= 0


def format_quantity(quantity: Quantity, value: float | Measured | None) -> str:
    """One number or estimate for a sentence, with its unit: "413.0 ± 2.0 ms", "1.92 ± 0.02", "64 MB"."""
    unit = choose_unit(quantity, [value])
    text = (
        format_value(value, unit) if value is None or isinstance(value, int | float) else format_estimate(value, unit)
    )
    return text if text == UNKNOWN or unit.suffix or not unit.symbol else f"{text} {unit.symbol}"


def is_known(estimate: Measured) -> bool:
    """Whether the interval is no wider than the value itself."""
    return estimate.half_width is None or estimate.half_width <= abs(estimate.value)


def format_known(quantity: Quantity, estimate: Measured) -> str:
    """An estimate for a sentence; where its interval is wider than the number, its ends: "20 ms to 90 ms".

    From an interval that reaches 0 only "at most 90 ms" follows; "unknown" stands where nothing does.
    """
    low, high = estimate.low, estimate.high
    if is_known(estimate) or low is None or high is None:
        return format_quantity(quantity, estimate)
    most = 1.0 if quantity in ("share", "accuracy") else math.inf
    if not (math.isfinite(low) and 0 < high < math.inf) or (low <= 0 and high >= most):
        return "unknown"
    highest = format_quantity(quantity, min(high, most))
    return f"at most {highest}" if low <= 0 else f"{format_quantity(quantity, low)} to {highest}"


def format_times(ratio: float | Measured) -> str:
    """A ratio before "as long" or "the memory map": "1.92 ± 0.02 times", or "an unknown number of times"."""
    said = format_quantity("ratio", ratio) if isinstance(ratio, int | float) else format_known("ratio", ratio)
    return "an unknown number of times" if said == "unknown" else f"{said} times"


def format_interval(quantity: Quantity, estimate: Measured) -> str:
    """An estimate for a sentence about the ends of its interval: "1.07 (1.01 to 1.19)"."""
    if estimate.low is None or estimate.high is None:
        return format_quantity(quantity, estimate)
    unit = choose_unit(quantity, [estimate])
    limits = (0.0, 1.0, estimate.value)
    ends = ((end, limit) for end in (estimate.low, estimate.high) for limit in limits if end != limit)
    if any(format_value(end, unit) == format_value(limit, unit) for end, limit in ends):
        unit = replace(unit, decimals=unit.decimals + 1)  # an end must not round to the limit it is compared with
    return _format_ends(estimate, unit)


def format_points(change: float, decimals: int = 2) -> str:
    """A difference of two shares in percentage points, with its sign: "−1.41"."""
    return f"{100 * change:+.{decimals}f}".replace("-", "−")


def format_seconds(seconds: float | None) -> str:
    """A time in the unit that suits it: "413 ms"."""
    return format_quantity("seconds", seconds)


def format_bytes(num_bytes: float | None) -> str:
    """A size in decimal units: "1.50 GB"."""
    return format_quantity("bytes", num_bytes)


def format_share(share: float | None) -> str:
    """A ratio in percent, for a sentence: "96 %", and below ten percent with two digits, "3.1 %"."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    size = abs(share)
    decimals = 0 if size >= 0.0995 or size == 0 else 1 if size >= 0.00095 else 2
    return format_value(share, Unit(symbol="%", factor=0.01, decimals=decimals))


def format_count(number: int, noun: str) -> str:
    """A number of things for a sentence: "1 rank", "2 ranks", "12 launches"."""
    if number == 1:
        return f"1 {noun}"
    return f"{_format_number(number, 0)} {noun}{'es' if noun.endswith(('s', 'nch', 'tch', 'x')) else 's'}"


def list_some(values: Sequence[object], most: int, rest: str = " and {} more") -> str:
    """The first of many, and how many are left out; `REST_HIDDEN` does not count them."""
    left_out = len(values) - most
    return ", ".join(map(str, values[:most])) + (rest.format(left_out) if left_out > 0 else "")


REST_HIDDEN = " …"


def format_learning_rate(rate: float | None) -> str:
    """Three digits and a power of ten, as papers and logs write it; from 1 on without the power."""
    return "–" if rate is None else f"{rate:.3g}" if rate >= 1 else f"{rate:.2e}"


def format_loss(loss: float | None) -> str:
    """Four decimals; a training run without a loss has diverged."""
    return "nan" if loss is None else f"{loss:.4f}"


def format_duration(seconds: float | None) -> str:
    """A duration in its two largest units: "1 min 20 s", "2 h", "3 d 4 h"; a negative one is unknown."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return UNKNOWN
    if seconds < 1:
        return "< 1 s"
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (symbol, factor), (minor_symbol, minor) in itertools.pairwise(units):
        count = math.floor(seconds / minor + 0.5) * minor
        if count >= factor:
            rest = count % factor // minor
            return f"{count // factor} {symbol}" + (f" {rest} {minor_symbol}" if rest else "")
    return f"{math.floor(seconds + 0.5)} s"
