"""Layouts in which people publish scaling tables, read as they are."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from scalelab.errors import UsageError
from scalelab.predict.extrapolate import extrapolate
from scalelab.predict.scaling_table import Columns, read_table
from scalelab.predict.table_file import find_time_unit, read_value, try_count


class Layout(NamedTuple):
    text: str
    stretch: dict[int, float]
    """Of the first series."""
    kind: str
    """`total`, `per rank`, `time` of one job, or `weak time` of a step whose batch grows."""
    num_series: int = 1


LAYOUTS = {
    "images per second": Layout(
        "Number of GPUs,images/sec\n1,100\n2,190\n4,360\n", {1: 1, 2: 1.0526, 4: 1.1111}, "total"
    ),
    "tokens per second and GPU": Layout(
        "GPUs,tokens/sec/GPU\n8,5000\n16,4800\n32,4500\n", {8: 1, 16: 1.0417, 32: 1.1111}, "per rank"
    ),
    "chips": Layout("n_chips,examples_per_second_per_chip\n16,900\n64,870\n", {16: 1, 64: 1.0345}, "per rank"),
    "per device": Layout("num_devices,samples_per_sec_per_device\n1,50\n8,45\n", {1: 1, 8: 1.1111}, "per rank"),
    "per worker": Layout("# workers,throughput (img/s/worker)\n1,200\n2,180\n", {1: 1, 2: 1.1111}, "per rank"),
    "thousands": Layout('gpus,tokens/s\n8,"12,000"\n16,"23,040"\n', {8: 1, 16: 1.0417}, "total"),
    "semicolons": Layout("GPU count;Throughput [samples/s]\n1;100\n2;180\n", {1: 1, 2: 1.1111}, "total"),
    "tabs": Layout("world_size\ttrain_samples_per_second\n1\t10\n4\t32\n", {1: 1, 4: 1.25}, "total"),
    "Markdown": Layout(
        "Some words before.\n\n| GPUs | img/sec |\n|-----:|--------:|\n| 1 | 100 |\n| 2 | 190 |\n\nAnd after.\n",
        {1: 1, 2: 1.0526},
        "total",
    ),
    "Markdown with bold and links": Layout(
        "| Model | **#GPUs** | Throughput (tok/s) |\n| --- | :-: | --- |\n| [a](x) | 1 | **41527.0** |\n"
        "| [a](x) | 8 | 295,000 |\n| [b](y) | 1 | 10 |\n| [b](y) | 8 | 70 |\n",
        {1: 1, 8: 1.1262},
        "total",
        2,
    ),
    "weak scaling step times": Layout(
        "ranks,batch_size,step_ms\n1,32,100\n2,64,104\n4,128,106\n", {1: 1, 2: 1.04, 4: 1.06}, "weak time"
    ),
    "weak scaling by batch per GPU": Layout(
        "nproc,batch_per_gpu,iteration time (ms)\n1,32,100\n2,32,104\n4,32,106\n", {1: 1, 2: 1.04, 4: 1.06}, "weak time"
    ),
    "time of an epoch": Layout("gpus,epoch time (s)\n1,400\n2,210\n4,112\n", {1: 1, 2: 1.05, 4: 1.12}, "time"),
    "time to train": Layout("n_gpus,time_min\n16,1993\n64,521\n", {16: 1, 64: 1.0457}, "time"),
    "an empty cell": Layout("gpus,images/s,memory\n1,100,\n2,,3\n4,360,9\n", {1: 1, 4: 1.1111}, "total"),
    "a dash for what was not run": Layout("gpus,images/s\n1,100\n2,-\n4,n/a\n8,700\n", {1: 1, 8: 1.1429}, "total"),
    "constant columns": Layout(
        "gpu,precision,seq_len,gpus,tok/s\nA100,bf16,2048,8,800\nA100,bf16,2048,16,1500\n", {8: 1, 16: 1.0667}, "total"
    ),
    "the count in the name": Layout(
        "platform,n_gpus,throughput\nA100,1,395\n2x A100,2,780\n4x A100,4,1500\n", {1: 1, 2: 1.0128, 4: 1.0533}, "total"
    ),
    "nodes of several GPUs": Layout(
        "nodes,gpus_per_node,total_gpus,samples/sec\n1,8,8,800\n2,8,16,1500\n", {8: 1, 16: 1.0667}, "total"
    ),
    "nodes alone, GPUs per node beside": Layout(
        "machines,gpus_per_machine,samples_s_per_gpu\n1,1,122\n1,8,110\n4,8,100\n",
        {1: 1, 8: 1.1091, 32: 1.22},
        "per rank",
    ),
    "counts as headers": Layout(
        "Model,1 GPU,2 GPUs,4 GPUs\nresnet,100,190,360\nvgg,50,80,120\n", {1: 1, 2: 1.0526, 4: 1.1111}, "total", 2
    ),
    "models as headers": Layout(
        "GPUs,InceptionV3,ResNet-50\n1,142,219\n8,1136,1734\n64,8400,13000\n", {1: 1, 8: 1, 64: 1.0819}, "total", 2
    ),
    "a number behind": Layout(
        "node_num,gpu_num,samples/s\n1,1,100\n1,4,380\n2,8,700\n", {1: 1, 4: 1.0526, 8: 1.1429}, "total"
    ),
    "GPUs of every node": Layout(
        "nodes,gpus,img/s\n1,8,800\n2,8,1500\n4,8,2900\n", {8: 1, 16: 1.0667, 32: 1.1034}, "total"
    ),
    "Markdown with a precision to a column": Layout(
        "|GPUs|Batch size / GPU|Top1 - mixed precision|Throughput - FP32|Throughput - mixed precision|Weak scaling|\n"
        "|---|---|---|---|---|---|\n|1|128|77.1|412 img/s|1270 img/s|1.00x|\n|8|128|77.3|3170 img/s|9510 img/s|7.69x\n",
        {1: 1, 8: 1.0397},
        "total",
        2,
    ),
    "a batch that all ranks share": Layout(
        "gpus,batch size per gpu,samples/s\n1,64,100\n2,32,180\n4,16,300\n", {1: 1, 2: 1.1111, 4: 1.3333}, "total"
    ),
    "times of hours and minutes": Layout(
        "GPUs,Time to train\n1,20:04:48\n4,5h 8m 56s\n8,2 hrs 35 min\n", {1: 1, 4: 1.0257, 8: 1.0293}, "time"
    ),
    "hardware that names its count": Layout(
        "Hardware,tokens/s\n8x A100,12.0k\n16x A100,23.1k\n", {8: 1, 16: 1.039}, "total"
    ),
    "a spread behind the number": Layout(
        "# GPUs,samples/s,peak memory\n1,100 ± 2,3.1 GB\n2,190 ± 4,3.2 GB\n", {1: 1, 2: 1.0526}, "total"
    ),
    "a date and a remark": Layout(
        "date,gpus,img/s,notes\n2022-05-18,1,100,first\n2022-05-19,2,190,after the fix\n2022-05-20,4,ERROR,hangs\n",
        {1: 1, 2: 1.0526},
        "total",
    ),
    "a title and a comment above": Layout(
        "Results of May\n# all runs\ngpus,img/s\n1,100\n2,190\n", {1: 1, 2: 1.0526}, "total"
    ),
    "columns kept apart by spaces": Layout(
        "GPUs   img/s   loss\n1      100     2.3\n2      190     2.3\n", {1: 1, 2: 1.0526}, "total"
    ),
    "a speedup alone": Layout("GPUs,Speedup\n1,1.0x\n2,1.9x\n4,3.6x\n", {1: 1, 2: 1.0526, 4: 1.1111}, "total"),
    "steps per second": Layout(
        "gpus,global batch,steps/s\n1,32,10\n2,64,9.5\n4,128,9\n", {1: 1, 2: 1.0526, 4: 1.1111}, "per rank"
    ),
    "decimal commas": Layout("GPUs;Zeit pro epoch (s)\n1;100,5\n2;55,2\n", {1: 1, 2: 1.0985}, "time"),
    "times with units of their own": Layout(
        "gpus,step time\n1,1.2 s\n2,620 ms\n4,330 ms ± 2\n", {1: 1, 2: 1.0333, 4: 1.1}, "time"
    ),
    "hours beside minutes and clocks": Layout(
        "GPUs,training time\n8,12.5 h\n16,390 min\n32,3h 25m\n64,1:45:00\n",
        {8: 1, 16: 1.04, 32: 1.0933, 64: 1.12},
        "time",
    ),
    "thousands before a unit": Layout(
        "GPUs,Throughput\n8,12.3k tok/s\n16,24000 tok/s\n32,46.1k tok/s\n", {8: 1, 16: 1.025, 32: 1.0672}, "total"
    ),
    "a rate per GPU in its cells": Layout(
        "GPUs,Throughput\n8,3200 tok/s/GPU\n64,3100 tok/s/GPU\n", {8: 1, 64: 1.0323}, "per rank"
    ),
    "nodes times GPUs": Layout(
        "Config,samples/s\n1x8,800\n2x8,1550\n4x8,3000\n", {8: 1, 16: 1.0323, 32: 1.0667}, "total"
    ),
    "systems that end in their count": Layout("System,img/s\nA100x1,100\nA100 x8,770\n", {1: 1, 8: 1.039}, "total"),
    "an efficiency alone": Layout(
        "GPUs,Scaling efficiency\n1,100%\n8,96%\n64,90%\n", {1: 1, 8: 1.0417, 64: 1.1111}, "per rank"
    ),
    "fewer passes on more ranks": Layout(
        "GPUs,micro batch,grad acc,iteration time [s]\n8,4,32,12.0\n16,4,16,6.2\n32,4,8,3.3\n",
        {8: 1, 16: 1.0333, 32: 1.1},
        "time",
    ),
    "other marks between thousands": Layout(
        "GPUs,img/s\n1,1'234\n2,2_400\n4,4’700\n", {1: 1, 2: 1.0283, 4: 1.0502}, "total"
    ),
    "measures in rows": Layout(
        "GPUs,1,2,4\nimages/sec,100,190,360\nefficiency,100%,95%,90%\n", {1: 1, 2: 1.0526, 4: 1.1111}, "total"
    ),
    "device-hours": Layout("GPUs,GPU hours\n8,100\n16,104\n32,110\n", {8: 1, 16: 1.04, 32: 1.1}, "weak time"),
    "device-hours beside time": Layout(
        "GPUs,GPU-hours,Time (h)\n8,80,10\n16,83.2,5.2\n32,89.6,2.8\n", {8: 1, 16: 1.04, 32: 1.12}, "time"
    ),
    "one size split in two ways": Layout(
        "TP,PP,GPUs,tokens/s\n1,1,8,800\n1,1,16,1570\n2,1,8,700\n2,1,16,1300\n", {8: 1, 16: 1.0191}, "total", 2
    ),
    "another split on every size": Layout(
        "TP,GPUs,tokens/s\n1,8,800\n2,16,1500\n4,32,2800\n", {8: 1, 16: 1.0667, 32: 1.1429}, "total"
    ),
    "an ideal beside": Layout(
        "GPUs,Ideal,Measured\n1,100,100\n2,200,190\n4,400,360\n", {1: 1, 2: 1.0526, 4: 1.1111}, "total"
    ),
    "a line of averages": Layout("GPUs,img/s\n1,100\n2,190\nAverage,145\n", {1: 1, 2: 1.0526}, "total"),
    "a speedup beside": Layout(
        "GPUs,Images/sec,Speedup,Efficiency\n1,300,1.0x,100%\n2,588,1.96x,98%\n", {1: 1, 2: 1.0204}, "total"
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_published_layout_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    path = tmp_path / ("table.md" if "Markdown" in name else "table.csv")
    path.write_text(layout.text, encoding="utf-8")
    found = read_table(path, Columns())
    assert len(found) == layout.num_series
    series = found[0].series
    assert series.stretch == pytest.approx(layout.stretch, rel=1e-3)
    kinds = {"per rank": series.is_per_rank, "time": series.is_time and series.work_per_rank is None}
    kinds |= {"weak time": series.work_per_rank is not None, "total": not series.is_per_rank and not series.is_time}
    assert [kind for kind, is_so in kinds.items() if is_so] == [layout.kind]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_answer_has_the_meaning_of_the_header(name: str, tmp_path: Path) -> None:
    """What a column per device, or of one step, says of twice as many ranks is again per device, or of one step."""
    layout = LAYOUTS[name]
    path = tmp_path / ("table.md" if "Markdown" in name else "table.csv")
    path.write_text(layout.text, encoding="utf-8")
    series = read_table(path, Columns())[0].series
    last = series.ranks[-1]
    (twice,) = extrapolate(series, [2 * last])
    value = series.restore(2 * last, twice.throughput.value) / series.restore(last, series.throughput[last])
    expected = {"total": 2.0, "per rank": 1.0, "time": 0.5, "weak time": 1.0}[layout.kind]
    assert value == pytest.approx(expected, rel=0.15)
    assert 0 < twice.throughput.low < twice.throughput.value < twice.throughput.high


def test_times_of_mixed_units_are_in_seconds_and_all_need_one(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("gpus,step time\n1,1.2 s\n2,620 ms\n4,330 ms\n", encoding="utf-8")
    series = read_table(path, Columns())[0].series
    assert series.unit == "step time [s]"
    assert [series.restore(size, series.throughput[size]) for size in (1, 2, 4)] == pytest.approx([1.2, 0.62, 0.33])
    path.write_text("gpus,step time\n1,1200 ms\n2,620 ms\n", encoding="utf-8")
    assert read_table(path, Columns())[0].series.unit == "step time"
    path.write_text("gpus,step time\n1,1.2 s\n2,620 ms\n4,330\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"line 4: step time needs a unit as other rows have one, got 330"):
        read_table(path, Columns())


def test_sizes_that_are_nodes_leave_no_node(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("Nodes,samples/s\n1,800\n2,1550\n4,3000\n", encoding="utf-8")
    assert read_table(path, Columns())[0].series.node_size == 1


def test_excels_unicode_text_is_read(tmp_path: Path) -> None:
    path = tmp_path / "table.txt"
    path.write_bytes("GPUs\timg/s\n1\t100\n2\t190\n".encode("utf-16"))
    assert read_table(path, Columns())[0].series.throughput == {1: 100, 2: 190}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("620 ms", 1e-3), ("1.2 s", 1), ("1.2sec", 1), ("3 seconds", 1), ("7 us", 1e-6), ("7 µs", 1e-6), ("5 min", 60),
        ("2 mins", 60), ("12.5 h", 3600), ("3 hrs", 3600), ("30 days", 86400), ("2 d", 86400), ("330 ms ± 2", 1e-3),
        ("330 ± 2 ms", 1e-3), ("1,200 ms (3 runs)", 1e-3), ("3h 25m", 1), ("1:45:00", 1), ("12", None), ("12k", None),
        ("300 img/s", None), ("5 m", None),
    ],
)  # fmt: skip
def test_a_cell_may_say_its_unit_of_time(text: str, seconds: float | None) -> None:
    assert find_time_unit(text) == seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12.3k tok/s", 12300), ("1.5M tokens/s", 1.5e6), ("12.3k", 12300), ("2B", 2e9), ("1'234", 1234),
        ("1_234.5", 1234.5), ("1 234 567", 1234567), ("12.3k GB", None), ("7B model", None),
    ],
)  # fmt: skip
def test_a_cell_may_count_in_thousands(text: str, value: float | None) -> None:
    assert read_value(text) == value


@pytest.mark.parametrize(
    ("text", "count"),
    [("A100x8", 8), ("A100 x 16", 16), ("x4", 4), ("2x8", 16), ("8x A100", 8), ("DGX", None), ("v3-8", None)],
)
def test_a_count_may_stand_before_or_behind(text: str, count: float | None) -> None:
    assert try_count(text) == count
