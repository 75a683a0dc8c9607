"""Which columns of a published table hold the rank count, the measured values and the job.

Names decide where they can. Where they cannot, the numbers do: rank counts as headers (`Model | 1 GPU | 8 GPUs`) make a
wide table long; a column of another name that grows with the ranks in every job is a throughput, and one that falls is
the time of a fixed job; GPUs that stay while nodes grow are GPUs of a node. Several columns of one kind (`Throughput
- FP32`, `Throughput - mixed precision`) are a series each; those in proportion to each other (samples/s beside
tokens/s) are one measurement, and the column with the most digits is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from scalelab.errors import UsageError
from scalelab.predict.table_file import Row, is_missing, read_value, try_count, try_number

RANK_NAMES = (
    *("ranks", "gpus", "devices", "world_size", "workers", "processes", "accelerators", "chips", "tpus", "cards"),
    *("ipus", "npus", "hpus", "xpus", "gcds", "dcus", "gaudis", "procs", "tasks", "replicas", "learners", "trainers"),
    *("nproc", "ntasks", "np", "world", "dp", "dp_size", "data_parallel_size", "data_parallel", "cores", "cpus"),
    *("tpu_cores",),
)
NODE_NAMES = ("nodes", "machines", "hosts", "servers", "instances", "vms")
SINGULAR = (
    *("gpu", "device", "rank", "worker", "chip", "card", "accelerator", "process", "n", "p", "hardware", "platform"),
    *("count",),
)
RANK_PREFIXES = re.compile(r"^(total_)?(number_of|num|nb|no_of|no|n|total|count_of)_(of_)?")
HARDWARE = re.compile(
    r"^((nvidia|amd|intel|google|cuda|tpu|gpu|physical|active|training|compute|parallel|worker|mi\d+x?|[abhglptv]\d+\w*?)_)+"
    r"(?=[a-z]+s$)"
)
"""Of `A100 GPUs` and `TPU v4 chips`."""
COUNT_SUFFIX = re.compile(r"_(counts?|used|total|nums?|number)$")
UNITS_PER_NODE = r"(gpus?|ranks?|devices?|process(es)?|chips?|tasks?|accelerators?|cards?)"
PER_NODE_PATTERN = re.compile(
    rf"^(num_|n_|number_of_)?{UNITS_PER_NODE}(_num|_count)?_?(per_|/)_?(node|machine|host|server|instance)s?$"
)
SECOND = r"s(ec(ond)?s?)?"
RATE_PATTERN = re.compile(
    rf"throughput|throuthput|per_{SECOND}(_|\b|$)|per {SECOND}\b|/ ?{SECOND}(?![a-z])|(samples|tokens|images)_s(_|\b)"
    r"|(img|seq)_s(_|\b)|\bspeed\b|_speed|speed_|(?<![a-z])(rate|fps|tps|wps|ips|qps|tgs)(?![a-z])|tok(ens)?ps|performance",
    re.IGNORECASE,
)
OTHER_RATE = re.compile(
    r"[kmgt]i?b(it|yte)?s?/ ?s|bandwidth|learning|hit_rate|error|accura|infer|eval|valid|latency|dropout"
    r"|i/o|peak|theor|ideal|linear",
    re.IGNORECASE,
)
TIME_PATTERN = re.compile(
    r"time|seconds|\b(sec|secs|hours|hrs|minutes|mins|days)\b|_s$|_ms$|\bms\b|epoch_s|iter|latency|duration|_h$|_min$",
    re.IGNORECASE,
)
PART_TIME = re.compile(
    r"comm|\bdata|load|compute|forward|backward|fwd|bwd|\bio\b|compil|startup|idle|wait|sync|valid|eval|infer|date"
    r"|stamp|p9\d|time to acc|optim|std|stdev|iterations|num_iter|\biters\b|max_iter|limit",
    re.IGNORECASE,
)
RELATIVE_PATTERN = re.compile(r"speed-?[_ ]?up|efficien|scaling|\bratio|relative|normali[sz]ed", re.IGNORECASE)
FIXED_PATTERN = re.compile(r"epoch|train|total|hour|hrs|days|_h$|min(ute)?s?\b|_min$", re.IGNORECASE)
"""Of times: a whole job, not a step."""
DEVICE_TIME = re.compile(
    r"(gpu|device|chip|node|core|tpu|accelerator|card)s?[ _*·-]*(h(ou)?rs?|h|days?)\b", re.IGNORECASE
)
"""Times the number of devices."""
STEP_PATTERN = re.compile(r"step|iter|batch", re.IGNORECASE)
STEP_RATE = re.compile(rf"(step|iter(ation)?|it|batch(es)?)s?[ _]*(/|per)[ _]*{SECOND}", re.IGNORECASE)
SHARE_PATTERN = re.compile(r"mfu|hfu|pct_peak|percent_of_peak|utili[sz]ation", re.IGNORECASE)
JOB_PATTERN = re.compile(
    r"batch|seq|length|hidden|layers|heads|width|depth|precision|bits|\bbs\b|\bbsz\b|\bmbs\b", re.IGNORECASE
)
SPLIT_PATTERN = re.compile(r"^(tp|pp|cp|ep|tensor|pipeline|context|expert|zero)([ _-]|$)", re.IGNORECASE)
"""How a model is split: another job only where one size was run in several ways."""
NAMED_JOB = re.compile(r"model|network|params|architecture|dataset|workload|backbone", re.IGNORECASE)
WHOLE_PATTERN = re.compile(r"global|total|aggregate|accum|flops|effective", re.IGNORECASE)
BATCH_PATTERN = re.compile(r"batch|\bbs\b|\bbsz\b|\bmbs\b|\bgbs\b", re.IGNORECASE)
DEVICES = r"(gpu|rank|device|worker|chip|accelerator|process|tpu|core|card|ipu|npu|hpu|gcd|node|replica|proc)"
PER_RANK_PATTERN = re.compile(
    rf"per[_ -]s[_ -]{DEVICES}|(?<!multi)(?<!num)_gpu$|per[_ -]{DEVICES}s?(?![a-z])|/ ?{DEVICES}s?(?![a-z])|\btgs\b",
    re.IGNORECASE,
)
PLAIN_NAMES = ("value", "throughput", "x", "y")
REMARK = re.compile(
    r"date|note|comment|remark|link|url|\blogs?\b|(^|_)id$|host|commit|seed|trial|\brun\b|index|file|path"
    r"|node_?list|command|script|checkpoint|source|^(run|job|exp(eriment)?)[_ -]?(name)?$",
    re.IGNORECASE,
)
"""Free text: another job only where one size was run with several of these."""
OUTCOME = re.compile(
    r"accura|flop|dice|top-?[15]|iou|loss|bleu|perplex|\bppl|auc|\bm?ap\b|\bf1\b|score|rouge|\br[12l]\b|final|error"
    r"|memory|vram|cost|overhead|accum|speed-?[_ ]?up|scaling|efficien",
    re.IGNORECASE,
)
"""What a job gave or follows from its size: never what distinguishes jobs."""
NEITHER = re.compile(
    r"mem|loss|acc|lr|param|batch|cost|price|power|watt|temp|util|size|steps|epochs?$|seed|vram|[mg]b\b|[mg]ib\b|flops?\b|score|map\b|bleu"
    r"|layers|hidden|heads|length|mfu|hfu|ratio|std|error|delta|overhead|accum|tp\b|pp\b|stage|rank|id\b|year|version",
    re.IGNORECASE,
)


BANDWIDTH = re.compile(r"\b(bus|alg)[ _]?(bw|bandwidth)", re.IGNORECASE)


def make_plain(name: str) -> str:
    """A column name in lower case, words joined by _."""
    return re.sub(r"[^a-z0-9/]+", "_", name.lower().replace("#", "num ")).strip("_")


def strip_count(name: str) -> str:
    """`gpus` of Number of GPUs, n_gpus, gpu_num, #GPUs and GPU count; a plain `gpu` is the kind of device."""
    plain = make_plain(re.sub(r"[(\[].*", "", name) or name)
    bare = HARDWARE.sub("", COUNT_SUFFIX.sub("", RANK_PREFIXES.sub("", plain)))
    if re.fullmatch(r"[abhlv]\d{2,3}s", bare):
        return "gpus"
    return f"{bare}s" if bare != plain and f"{bare}s" in (*RANK_NAMES, *NODE_NAMES) else bare


def choose_ranks(path: Path, rows: Sequence[Row]) -> str:
    """The column of rank counts: by its name, or else a singular name over counts, or else nodes."""
    names = list(rows[0])
    plain = {strip_count(name): name for name in reversed(names)}
    kinds = [[known for known in RANK_NAMES if known in plain and _has_counts(rows, plain[known])]]
    kinds.append([known for known in SINGULAR if known in plain and _has_counts(rows, plain[known], fewest=2)])
    kinds.append([known for known in (*NODE_NAMES, *RANK_NAMES) if known in plain])
    found = next((plain[known] for kind in kinds for known in kind), None)
    if found is None:  # cells that count: 1x8, 2 nodes x 8 GPUs, A100x4
        worded = [name for name in names if _has_counts(rows, name, fewest=2) and not _is_numeric(rows, name)]
        found = worded[0] if len(worded) == 1 else None
    if found is None:
        raise UsageError(f"{path}: no column name looks like ranks ({', '.join(names)}): use --ranks-column NAME")
    return found


def _has_counts(rows: Sequence[Row], name: str, fewest: int = 0) -> bool:
    counts = [try_count(row[name]) for row in rows if not is_missing(row[name])]
    return bool(counts) and None not in counts and len(set(counts)) >= fewest


def count_all_ranks(rows: Sequence[Row]) -> Sequence[Row]:
    """Rows with a column of all ranks where a table has nodes, and ranks of each node."""
    names = list(rows[0])
    plain = {strip_count(name): name for name in reversed(names)}
    nodes = next((plain[known] for known in NODE_NAMES if known in plain), None)
    per_node = next((name for name in names if PER_NODE_PATTERN.match(make_plain(name))), None)
    counted = next((plain[known] for known in RANK_NAMES if known in plain), None)
    if nodes is None or (per_node is None and counted is None):
        return rows
    if counted is not None:
        if not _stays_by_node(rows, nodes, counted):
            return rows
        per_node = counted
    assert per_node is not None
    kept = [name for name in names if name not in (nodes, per_node)]
    counts = [(try_count(row[nodes]) or 0) * (try_count(row[per_node]) or 0) for row in rows]
    products = [{"ranks": f"{count:.0f}" if count else ""} for count in counts]
    return [{**product, **{name: row[name] for name in kept}} for product, row in zip(products, rows, strict=True)]


def find_node_size(rows: Sequence[Row]) -> int | None:
    """Ranks of a node, where one column says so or rank counts over nodes always do; None: the table does not."""
    names = list(rows[0])
    plain = {strip_count(name): name for name in reversed(names)}
    nodes = next((plain[known] for known in NODE_NAMES if known in plain), None)
    counted = next((plain[known] for known in RANK_NAMES if known in plain), None)
    per_node = next((name for name in names if PER_NODE_PATTERN.match(make_plain(name))), None)
    if per_node is None and nodes is not None and counted is not None and _stays_by_node(rows, nodes, counted):
        per_node = counted
    if per_node is not None:  # a job may leave part of its only node idle
        sizes = {count for row in rows if (count := try_count(row[per_node]))}
        return int(max(sizes)) if sizes else None
    if nodes is None or counted is None:
        return None
    pairs = [(try_count(row[nodes]), try_count(row[counted])) for row in rows]
    quotients = {ranks / place for place, ranks in pairs if place and ranks and place > 1}
    found = quotients.pop() if len(quotients) == 1 else 0.0
    return int(found) if found >= 1 and found == int(found) else None


def _stays_by_node(rows: Sequence[Row], nodes: str, counted: str) -> bool:
    """Whether the count stays while nodes grow: then it is of one node."""
    largest: dict[float, float] = {}
    for row in rows:
        if (place := try_count(row[nodes])) and (count := try_count(row[counted])):
            largest[place] = max(largest.get(place, 0), count)
    return len(largest) > 1 and len(set(largest.values())) == 1


HEADER_COUNT = re.compile(
    rf"(?:.*\bn\s*=\s*)?(\d+)\s*[x×*-]?\s*(?:(?:{DEVICES[1:-1]})s?\b.*|[avhp]\d{{2,3}}.*|[x×])?|(?:{DEVICES[1:-1]})s?\s*[=:]\s*(\d+)",
    re.IGNORECASE,
)


def make_long(rows: Sequence[Row], heading: str) -> Sequence[Row]:
    """A table whose headers are rank counts, with a row for each of them; where its rows are measures, turned over."""
    counts: dict[str, int] = {}
    for name in rows[0]:
        if (found := HEADER_COUNT.fullmatch(name.strip())) and all(
            is_missing(row[name]) or read_value(row[name]) is not None for row in rows
        ):
            counts[name] = int(found[1] or found[2] or found[found.lastindex or 1])
    if len(set(counts.values())) < 2 or len(set(counts.values())) < len(counts) or min(counts.values()) < 1:
        return rows
    kept = [name for name in rows[0] if name not in counts]
    if len(kept) == 1 and all(_is_measure(row[kept[0]]) for row in rows):
        return [{"ranks": str(count), **{row[kept[0]]: row[name] for row in rows}} for name, count in counts.items()]
    bracketed = (found[1] for name in counts if (found := re.search(r"[(\[](.+)[)\]]", name)))
    measured = (text for text in (heading, *kept, *bracketed) if RATE_PATTERN.search(text) or TIME_PATTERN.search(text))
    unit = next(measured, "value")
    unit = unit if unit not in kept else f"{unit} "
    return [
        {"ranks": str(count), **{name: row[name] for name in kept}, unit: row[column]}
        for row in rows
        for column, count in counts.items()
    ]


def _is_measure(name: str) -> bool:
    return any(pattern.search(name) for pattern in (RATE_PATTERN, TIME_PATTERN, RELATIVE_PATTERN, SHARE_PATTERN))


def choose_values(path: Path, rows: Sequence[Row], ranks_name: str) -> list[str]:
    """Throughputs of all ranks, or else times, throughputs of each rank, or what grows or falls with the ranks."""
    names = list(rows[0])
    if name := next(filter(BANDWIDTH.search, names), None):
        advice = "pass its rate to `scalelab predict RUN --link`, or use --value-column NAME"
        raise UsageError(f"{path} measures collectives ({name!r}), not training: {advice}")
    others = [name for name in names if name != ranks_name and not SHARE_PATTERN.search(name)]
    others = [name for name in others if is_measured(rows, name) and not NAMED_JOB.search(name)] or others
    absolute = [name for name in others if not RELATIVE_PATTERN.search(name)]
    rates = [name for name in absolute if RATE_PATTERN.search(name) and not BATCH_ONLY.search(name)]
    rates = [name for name in rates if not OTHER_RATE.search(name)] or rates
    rates = [name for name in rates if not STEP_RATE.search(name)] or rates
    whole = [name for name in rates if not PER_RANK_PATTERN.search(name)]
    times = [name for name in absolute if TIME_PATTERN.search(name) and not RATE_PATTERN.search(name)]
    times = [name for name in times if not PART_TIME.search(name)] or (times if len(times) == 1 else [])
    times = [name for name in times if not DEVICE_TIME.search(name)] or times
    plain = [name for name in absolute if name.lower().strip() in PLAIN_NAMES]
    moving = [name for name in absolute if not NEITHER.search(name) and find_direction(rows, ranks_name, name)]
    moving = [name for name in moving if not OTHER_RATE.search(name)] or moving
    relative = [name for name in others if RELATIVE_PATTERN.search(name)]
    relative = [name for name in relative if "efficien" in name.lower() or find_direction(rows, ranks_name, name) > 0]
    flops = [name for name in absolute if re.search("flop", name, re.IGNORECASE)]
    exact = [name for name in plain if name in (whole or plain)]
    choices = exact if len(exact) == 1 else whole or plain or times or rates or moving or flops[:1] or relative[:1]
    if not choices:
        raise UsageError(f"{path}: none of {', '.join(names)} looks like the measured value: use --value-column NAME")
    return leave_out_copies(rows, choices)


BATCH_ONLY = re.compile(r"^(global|micro|local|mini|total)?[_ -]?batch", re.IGNORECASE)


def leave_out_copies(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Without columns in proportion to another, within the digits that tables print; the one with most digits stays."""
    kept: list[str] = []
    for name in sorted(names, key=lambda name: -sum(len(re.sub(r"\D", "", row[name])) for row in rows)):
        same = [other for other in kept if _leave_out_unit(other) == _leave_out_unit(name)]
        if not any(_are_proportional(rows, name, other) for other in same):
            kept.append(name)
    return [name for name in names if name in kept]


def _leave_out_unit(name: str) -> str:
    return re.sub(rf"[(\[][^)\]]*[)\]]|\w+ ?/ ?{SECOND}\b|\w+[ _]per[ _]{SECOND}(\b|(?=_))", "", name.lower()).strip(
        " _-"
    )


def _are_proportional(rows: Sequence[Row], name: str, other: str) -> bool:
    """Whether one quotient explains every row within 3 % and what rounding hides."""
    low, high, num = 0.0, math.inf, 0
    for row in rows:
        first, second = read_value(row[name]), read_value(row[other])
        if first is None or second is None or (first <= 0 and second <= 0):
            continue
        (least, most), (fewest, largest) = _round_off(row[name], first), _round_off(row[other], second)
        low, high = max(low, least / largest), min(high, most / fewest if fewest > 0 else math.inf)
        num += 1
    return num > 2 and low < 1.06 * high


def _round_off(text: str, value: float) -> tuple[float, float]:
    """From where to where a printed number may have been rounded."""
    digits = re.search(r"\.(\d+)", text)
    half = 0.5 * 10.0 ** -(len(digits[1]) if digits else 0)
    return max(value - half, 0.0), value + half


def find_direction(rows: Sequence[Row], ranks_name: str, name: str) -> int:
    """1: the numbers grow with the ranks, by a fifth and more over all; −1: they fall; 0: neither."""
    pairs = sorted(
        (count, value) for row in rows if (count := try_count(row[ranks_name])) and (value := read_value(row[name]))
    )
    if len({count for count, _ in pairs}) < 2 or min(value for _, value in pairs) <= 0:
        return 0
    first = [value for count, value in pairs if count == pairs[0][0]]
    last = [value for count, value in pairs if count == pairs[-1][0]]
    if min(last) > 1.2 * max(first) or (len(first) == len(last) and min(map(lambda a, b: a / b, last, first)) > 1.2):
        return 1
    return -1 if max(last) * 1.2 < min(first) else 0


def is_measured(rows: Sequence[Row], name: str) -> bool:
    cells = [row[name] for row in rows if not is_missing(row[name])]
    return not cells or sum(read_value(cell) is not None for cell in cells) > len(cells) / 2


def choose_descriptive(rows: Sequence[Row], ranks_name: str, taken: Iterable[str]) -> tuple[str, ...]:
    """The columns that identify the job of a row."""
    texts, numbers = [], []
    for name in rows[0]:
        is_numeric = _is_numeric(rows, name) and not NAMED_JOB.search(name)
        is_measure = RATE_PATTERN.search(name) or TIME_PATTERN.search(name) or RELATIVE_PATTERN.search(name)
        if name in taken or SHARE_PATTERN.search(name) or (is_measure and _is_numeric(rows, name)):
            continue
        if OUTCOME.search(name) or (BATCH_PATTERN.search(name) and not is_numeric and _has_own(rows, ranks_name, name)):
            continue
        if not is_numeric and strip_count(name) not in NODE_NAMES:
            texts.append(name)
        elif is_numeric and JOB_PATTERN.search(name) and not WHOLE_PATTERN.search(name):
            numbers.append(name)
    texts = _leave_out_remarks(rows, ranks_name, texts)
    jobs = _group_jobs(rows, ranks_name, texts)
    own = [name for name in rows[0] if SPLIT_PATTERN.search(name) and _repeat_ways(jobs.values(), ranks_name, name)]
    own += [name for name in numbers if not all(is_companion(job, ranks_name, name) for job in jobs.values())]
    return tuple(name for name in rows[0] if name in (*texts, *own))


def _leave_out_remarks(rows: Sequence[Row], ranks_name: str, texts: Sequence[str]) -> list[str]:
    """Without free text that would leave no job with two sizes, or that never tells two rows of one size apart."""
    if not _repeat_sizes(rows, ranks_name, texts):
        texts = [name for name in texts if not REMARK.search(name) or len({row[name] for row in rows}) < len(rows) / 2]
    plain = [name for name in texts if not REMARK.search(name)]
    jobs = _group_jobs(rows, ranks_name, plain).values()
    return [name for name in texts if name in plain or _repeat_ways(jobs, ranks_name, name)]


def _group_jobs(rows: Sequence[Row], ranks_name: str, by: Sequence[str]) -> dict[tuple[str, ...], list[Row]]:
    jobs: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        jobs.setdefault(tuple(leave_out_count(row[name], row[ranks_name]) for name in by), []).append(row)
    return jobs


def _has_own(rows: Sequence[Row], ranks_name: str, name: str) -> bool:
    """Whether there are as many texts as sizes at least: `64k`, `32k`, `16k`; or one."""
    texts = {row[name] for row in rows}
    return len(texts) == 1 or len(texts) >= len({row[ranks_name] for row in rows})


def _repeat_sizes(rows: Sequence[Row], ranks_name: str, by: Sequence[str]) -> bool:
    """Whether some job has two sizes."""
    return any(len({row[ranks_name] for row in job}) > 1 for job in _group_jobs(rows, ranks_name, by).values())


def _repeat_ways(jobs: Iterable[Sequence[Row]], ranks_name: str, name: str) -> bool:
    """Whether a job was run on one size with several of these numbers."""
    pairs = [{(row[ranks_name], row[name]) for row in job} for job in jobs]
    return any(len(found) > len({size for size, _ in found}) for found in pairs)


def is_companion(rows: Sequence[Row], ranks_name: str, name: str) -> bool:
    """Whether a number stays in a job, or follows from the rank count as a batch that all ranks share does."""
    pairs = {(try_count(row[ranks_name]), try_number(row[name])) for row in rows}
    known = [(ranks, value) for ranks, value in pairs if ranks and value]
    if len({ranks for ranks, _ in known}) < len(known):
        return len({value for _, value in known}) == 1
    if not BATCH_PATTERN.search(name):
        return find_share(rows, ranks_name, name) is not None or len({value for _, value in known}) <= 1
    return any(len({round(value * ranks**power, 6) for ranks, value in known}) <= 1 for power in (0, -1, 1))


def find_share(rows: Sequence[Row], ranks_name: str, name: str) -> float | None:
    """What each rank has of a number that grows in proportion to the ranks; None: it does not."""
    pairs = [(try_count(row[ranks_name]), try_number(row[name])) for row in rows]
    shares = {round(value / ranks, 6) for ranks, value in pairs if ranks and value}
    return shares.pop() if len(shares) == 1 and len({ranks for ranks, _ in pairs if ranks}) > 1 else None


def leave_out_count(text: str, ranks: str) -> str:
    """A description without the rank count of its row: `2x A100` and `A100` are one series."""
    count = try_count(ranks)
    if count is None or try_number(text) is not None:
        return text
    return re.sub(rf"((?<![\w.])|(?<=dp)){count:.0f}( ?[x×*] ?|(?![\w.]))", "", text).strip()


def has_counts(rows: Sequence[Row], name: str, ranks_name: str) -> bool:
    """Whether fewer descriptions are left without the rank counts in them."""
    return len({leave_out_count(row[name], row[ranks_name]) for row in rows}) < len({row[name] for row in rows})


def _is_numeric(rows: Sequence[Row], name: str) -> bool:
    return all(try_number(row[name]) is not None for row in rows if not is_missing(row[name]))
