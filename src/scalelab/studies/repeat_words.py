"""Why seeds and why warm-up, in words with numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scalelab.studies.repeats import TEN, Repeats
from scalelab.units import format_interval, format_quantity, format_share


def summarise_repeats(repeats: Repeats, seeds: Mapping[int, int | None]) -> tuple[str, ...]:
    """The findings; `seeds` has the first step that differs under every other seed."""
    return tuple(_find_sentences(repeats, seeds))


def _find_sentences(repeats: Repeats, seeds: Mapping[int, int | None]) -> Iterator[str]:
    yield from _describe_losses(repeats)
    yield from _describe_seeds(seeds)
    if repeats.launches:
        yield from _describe_warmup(repeats)
        yield from _describe_ways(repeats)
        yield from _describe_spread(repeats)


def _describe_losses(repeats: Repeats) -> Iterator[str]:
    num_launches = len(repeats.launches)
    if num_launches < 2:
        return
    if repeats.unequal_step is None:
        yield (
            f"The same seed gives the same training: the losses of {num_launches} launches are bit-equal in all"
            f" {repeats.num_steps} steps."
        )
    else:
        yield (
            f"The same seed does not give the same training: of {num_launches} launches the losses differ from step"
            f" {repeats.unequal_step} on."
        )


def _describe_seeds(seeds: Mapping[int, int | None]) -> Iterator[str]:
    differing = [step for step in seeds.values() if step is not None]
    same = [seed for seed, step in seeds.items() if step is None]
    if differing:
        yield f"Another seed gives another training: losses differ from step {min(differing)} on."
    if same:
        listed = ", ".join(map(str, same))
        yield f"Seed {listed} gave the very same losses: the seed reaches neither weights nor data."


def _describe_warmup(repeats: Repeats) -> Iterator[str]:
    last = repeats.dropped - 1
    which = f"steps 0 to {last} take" if last else "step 0 takes"
    alone = f"; step 0 alone {format_quantity('ratio', repeats.compare_step(0))} times" if last else ""
    yield f"Why warm-up: {which} {format_interval('ratio', repeats.first_ratio)} times as long as the rest{alone}."
    error = repeats.mean_ratio.map(lambda ratio: ratio - 1)
    more = "longer" if error.value >= 0 else "shorter"
    size = format_quantity("share", error.map(lambda ratio: -ratio) if error.value < 0 else error)
    yield f"A mean that includes them is {size} {more} than one that leaves them out."
    found = repeats.warmup
    if not found.is_settled:
        yield f"The steps have not settled after {found.num_steps}: none of these numbers is that of a steady training."
    elif found.num_steps > repeats.dropped:
        yield f"The steps show a warm-up of {found.num_steps}: dropping {repeats.dropped} is too few."
    else:
        yield f"The steps show a warm-up of {found.num_steps}: dropping {repeats.dropped} is enough."


def _describe_ways(repeats: Repeats) -> Iterator[str]:
    ways = {way.label: way.step for way in repeats.ways}
    ten, ours = ways.get(f"mean of {TEN} settled steps"), repeats.ways[-1].step
    if ten is None or ten.half_width is None or ours.half_width is None:
        return
    yield (
        f"A mean of {TEN} settled steps of one launch falls within ± {format_share(ten.half_width / ten.value)}; the"
        f" median of {len(repeats.launches)} launches is known to ± {format_share(ours.half_width / ours.value)}."
    )


def _describe_spread(repeats: Repeats) -> Iterator[str]:
    spread = repeats.spread
    if spread is None:
        yield "One launch cannot say how launches differ."
        return
    needs = []
    for precision in (0.01, 0.05):
        expected, least, most = repeats.count_launches(precision)
        number = "–" if expected is None else str(expected)
        limits = f"{'–' if least is None else least} to {'–' if most is None else most}"
        needs.append(f"± {format_share(precision)} takes {number} launches ({limits})")
    yield f"Launches differ by {format_interval('share', spread)} (standard deviation): {', '.join(needs)}."
