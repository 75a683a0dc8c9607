"""Anybody's table as series."""

from dataclasses import replace
from pathlib import Path

import pytest

from scalelab.answers.prediction.table import NODES, describe_table
from scalelab.errors import UsageError
from scalelab.predict.extrapolate import extrapolate
from scalelab.predict.scaling_table import (
    Columns,
    ScalingSeries,
    _find_kind,
    find_doubts,
    find_growing_work,
    is_flat,
    read_table,
)
from scalelab.predict.table_columns import (
    _are_proportional,
    _has_own,
    _round_off,
    choose_values,
    find_direction,
    has_counts,
    is_companion,
    leave_out_copies,
    make_long,
    strip_count,
)
from scalelab.predict.table_file import read_tables, read_value, try_count


@pytest.fixture
def write(tmp_path):
    def write_text(text):
        path = tmp_path / "table.csv"
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


def test_columns_are_told_by_their_names(write):
    path = write("model,batch,gpus,img_per_s,source\na,32,1,10,x\na,32,2,19,x\nb,32,1,5,x\nb,32,2,9,x\n")
    found = read_table(path, Columns())
    assert [one.series.label for one in found] == ["a", "b"]
    assert found[1].series.throughput == {1: 5, 2: 9}


def test_times_become_throughputs(write):
    (found,) = read_table(write("devices,epoch_seconds\n1,20\n2,10\n"), Columns())
    assert found.series.is_time
    assert found.series.stretch == {1: 1, 2: 1}


def test_a_throughput_of_each_rank_is_multiplied(write):
    (found,) = read_table(write("gpus,tok_per_s_gpu\n8,100\n16,95\n"), Columns())
    assert found.series.throughput == {8: 800, 16: 1520}


def test_numbers_that_grow_with_ranks_do_not_tell_jobs_apart(write):
    (found,) = read_table(write("gpus,global_batch,throughput\n1,32,10\n2,64,19\n4,128,37\n"), Columns())
    assert found.series.ranks == (1, 2, 4)


def test_a_size_that_is_there_twice_is_its_median(write):
    (found,) = read_table(write("ranks,throughput\n1,10\n1,12\n1,11\n2,20\n"), Columns())
    assert found.series.throughput[1] == 11


def test_utilization_is_read_where_it_is(write):
    (found,) = read_table(write("ranks,throughput,mfu_pct\n1,10,120\n2,20,60\n"), Columns())
    assert found.utilization == {1: 1.2, 2: 0.6}


@pytest.mark.parametrize("text", ["ranks;throughput\n1;10\n2;19\n", "ranks\tthroughput\n1\t10\n2\t19\n"])
def test_other_separators_are_read(write, text):
    assert read_table(write(text), Columns())[0].series.throughput == {1: 10, 2: 19}


def test_columns_can_be_said(write):
    path = write("kind,n,a_per_s,b_per_s\nx,1,10,100\ny,2,20,150\n")
    (found,) = read_table(path, Columns(ranks="n", value="b_per_s", by=()))
    assert found.series.throughput == {1: 100, 2: 150}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no table"),
        ("ranks,throughput\n", "has no table"),
        ("ranks,throughput\n1,10,3\n", "line 2: 3 fields"),
        ("ranks,throughput\n1,fast\n", "line 2: throughput must be a number, got 'fast'"),
        ("ranks,throughput\n1.5,10\n", "integer"),
        ("ranks,throughput\n1,0\n", "> 0"),
        ("ranks,ranks\n1,0\n", "unique"),
        ("cats,throughput\n1,10\n", "--ranks-column"),
        ("ranks,colour\n1,10\n", "--value-column"),
    ],
)
def test_what_is_no_table_is_refused_by_name(write, text, words):
    path = write(text)
    with pytest.raises(UsageError, match=words) as caught:
        read_table(path, Columns())
    assert "table.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("header", "rows", "value", "is_per_rank"),
    [
        ("Number of GPUs,images/sec", "1,100\n2,190\n4,360", 360.0, False),
        ("n_chips,tokens/sec/GPU", "1,100\n2,95\n4,90", 360.0, True),
        ("world_size,samples_per_second_per_device", "1,100\n2,95\n4,90", 360.0, True),
        ("workers,images/s/worker", "1,100\n2,\n4,90", 360.0, True),
        ("Total number of NVIDIA A100 GPUs,images/s", "1,100\n2,190\n4,360", 360.0, False),
        ("Number of TPU v4 chips;examples/s per chip", "1;1.100,0\n2;1.050,5\n4;90,0", 360.0, True),
    ],
)
def test_headers_that_people_write_are_read(tmp_path, header, rows, value, is_per_rank):
    path = tmp_path / "table.csv"
    path.write_text(f"{header}\n{rows}\n")
    (found,) = read_table(path, Columns())
    assert found.series.throughput[4] == pytest.approx(value)
    assert found.series.is_per_rank is is_per_rank
    assert found.series.restore(4, value) == pytest.approx(90.0 if is_per_rank else value)


def test_minutes_beside_hours_are_no_millions(write):
    (found,) = read_table(write("gpus,time per epoch\n1,1h 20m\n2,42m\n4,00:22:30\n"), Columns())
    assert found.series.is_time
    assert {ranks: 1 / rate for ranks, rate in found.series.throughput.items()} == pytest.approx(
        {1: 4800, 2: 2520, 4: 1350}
    )


@pytest.mark.parametrize(
    "text",
    [
        '[{"gpus": 1, "img/s": 10.5}, {"gpus": 2, "img/s": null}, {"gpus": 4, "img/s": 40}]',
        '{"gpus": 1, "img/s": 10.5}\n{"gpus": 4, "img/s": 40}\n',
    ],
)
def test_json_is_read_as_records_or_lines(write, text):
    (found,) = read_table(write(text), Columns())
    assert found.series.throughput == {1: 10.5, 4: 40}


def test_columns_of_one_kind_are_a_series_each_and_copies_are_left_out(write):
    text = "gpus,samples/s,tokens/s,fp16 tokens/s\n1,1,1210,2500\n2,2,2380,4100\n4,5,4700,9000\n"
    found = read_table(write(text), Columns())
    assert [one.series.unit for one in found] == ["tokens/s", "fp16 tokens/s"]
    assert found[1].series.throughput == {1: 2500, 2: 4100, 4: 9000}


def test_every_table_of_a_page_is_read_under_its_heading(tmp_path):
    path = tmp_path / "page.md"
    table = "| GPUs | img/s |\n|---|---|\n| 1 | {} |\n| 2 | 190 |\n"
    path.write_text(
        f"# Setup\n\n| flag | use |\n|---|---|\n| a | b |\n\n## A\n\n{table.format(100)}\n## B\n\n{table.format(97)}"
    )
    assert [one.series.label for one in read_table(path, Columns())] == ["A", "B"]


def test_what_was_concluded_from_numbers_is_said(write):
    (found,) = read_table(write("gpus,step time (ms)\n1,100\n2,104\n4,106\n"), Columns())
    assert found.series.stretch == pytest.approx({1: 1.0, 2: 1.04, 4: 1.06})
    assert "weak scaling" in found.notes[0]


def test_times_of_a_batch_that_grows_are_not_those_of_one_job(tmp_path):
    path = tmp_path / "weak.csv"
    path.write_text("gpus,global_batch,step_ms\n1,32,100\n2,64,104\n4,128,106\n")
    (found,) = read_table(path, Columns())
    assert found.series.stretch == pytest.approx({1: 1.0, 2: 1.04, 4: 1.06})
    (far,) = extrapolate(found.series, [32])
    assert 100 < found.series.restore(32, far.throughput.value) < 150


@pytest.mark.parametrize(
    ("values", "direction"),
    [
        ((1.0, 1.0, 1.21, 1.21), 1),
        ((1.0, 1.0, 1.19, 1.19), 0),
        ((1.0, 2.0, 1.5, 3.0), 1),  # each of two jobs by half
        ((1.0, 2.0, 1.1, 3.0), 0),  # one of them by a tenth
        ((1.21, 1.21, 1.0, 1.0), -1),
        ((1.19, 1.19, 1.0, 1.0), 0),
        ((12.0, 12.0, 10.0, 10.0), 0),  # not more than a fifth
        ((10.0, 10.0, 12.0, 12.0), 0),
    ],
)
def test_a_column_grows_or_falls_by_a_fifth_or_not_at_all(values: tuple[float, ...], direction: int) -> None:
    rows = [{"ranks": ranks, "value": str(value)} for ranks, value in zip("1144", values, strict=True)]
    assert find_direction(rows, "ranks", "value") == direction


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("nodes,gpus_per_node,images/s\n1,4,100\n2,4,190\n", 4),
        ("nodes,gpus,images/s\n1,2,50\n1,4,100\n2,8,190\n4,16,360\n", 4),
        ("nodes,gpus,images/s\n1,4,100\n2,4,190\n", 4),
        ("gpus,images/s\n1,50\n2,100\n", None),
        ("nodes,gpus,images/s\n2,8,100\n4,12,190\n", None),
    ],
)
def test_ranks_of_a_node_are_read_where_a_table_says_them(write, text, size):
    assert {one.series.node_size for one in read_table(write(text), Columns())} == {size}


@pytest.mark.parametrize(
    ("header", "last", "is_doubted"),
    [("images/s", 390, True), ("images/s per GPU", 390, False), ("images/s", 700, False)],
)
def test_a_throughput_that_does_not_grow_looks_like_one_of_a_device(write, header, last, is_doubted):
    (found,) = read_table(write(f"gpus,{header}\n1,400\n8,{last}\n"), Columns())
    assert found.series.looks_per_rank == is_doubted


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12.3k", 12300),
        ("2 M", 2e6),
        ("1.5b", 1.5e9),
        ("3G", 3e9),
        ("~4k", 4000),
        ("7", 7),
        ("k", None),
        ("fast", None),
    ],
)
def test_a_number_may_be_in_thousands(text, value):
    assert read_value(text) == (value if value is None else pytest.approx(value))


def test_rows_are_as_long_as_the_header(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("| GPUs | img/s | note |\n|---|---|---|\n| 1 | 100 |\n| 2 | 190 | a | b |\n")
    (table,) = read_tables(path)
    assert table.rows == [{"GPUs": "1", "img/s": "100", "note": ""}, {"GPUs": "2", "img/s": "190", "note": "a"}]


def test_what_cannot_be_read_says_why(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_tables(tmp_path)
    (tmp_path / "table.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read: not a text file"):
        read_tables(tmp_path / "table.bin")


def test_two_rows_in_proportion_are_no_copy_and_three_are():
    rows = [{"img/s": str(100 * n), "tok/s": str(900 * n)} for n in (1, 2, 3)]
    assert leave_out_copies(rows[:2], ["img/s", "tok/s"]) == ["img/s", "tok/s"]
    assert len(leave_out_copies(rows, ["img/s", "tok/s"])) == 1


def test_a_part_of_the_step_is_read_where_it_is_the_only_time(write):
    (found,) = read_table(write("gpus,forward time (s)\n1,8\n2,4\n4,2\n"), Columns())
    assert found.series.throughput[4] / found.series.throughput[1] == pytest.approx(4)


def test_rows_that_end_in_empty_cells_lose_them_and_others_are_refused(write):
    (table,) = read_tables(write("gpus,img/s,\n1,100,,\n2,190,,,\n4,\n"))
    assert table.rows == [{"gpus": "1", "img/s": "100"}, {"gpus": "2", "img/s": "190"}, {"gpus": "4", "img/s": ""}]
    with pytest.raises(UsageError, match="line 2: 3 fields for 2 columns"):
        read_tables(write("gpus,img/s\n1,100,7\n"))


def test_headers_that_are_rank_counts_become_rows_from_one_rank_on():
    wide = [{"model": "a", "1": "100", "2": "190"}]
    assert make_long(wide, "img/s") == [
        {"ranks": "1", "model": "a", "img/s": "100"}, {"ranks": "2", "model": "a", "img/s": "190"}
    ]  # fmt: skip
    for headers in (("0", "2"), ("1", "01"), ("1",)):  # no ranks; the same twice; only one
        rows = [dict.fromkeys(headers, "5")]
        assert make_long(rows, "img/s") is rows


def test_a_number_that_moves_counts_unless_its_name_says_what_it_is():
    rows = [{"gpus": str(n), "result": str(100 * n), "memory": str(10 * n)} for n in (1, 2, 4)]
    assert choose_values(Path("table.csv"), rows, "gpus") == ["result"]
    with pytest.raises(UsageError, match="none of gpus, memory looks like the measured value"):
        choose_values(Path("table.csv"), [{"gpus": row["gpus"], "memory": row["memory"]} for row in rows], "gpus")


def test_a_missing_count_does_not_hide_the_column_of_ranks(write):
    (found,) = read_table(write("gpus,ranks note,img/s\n1,a,100\n2,b,190\n-,c,-\n4,d,370\n"), Columns())
    assert found.series.throughput == {1: 100, 2: 190, 4: 370}


@pytest.mark.parametrize(
    ("text", "count"),
    [("n4_g8", 32.0), ("4n_8g", 32.0), ("2n8g", 16.0), ("2x8", 16.0), ("3 nodes x 4 GPUs", 12.0), ("x", None)],
)
def test_nodes_times_devices_are_ranks(text: str, count: float | None) -> None:
    assert try_count(text) == count


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({1: 10.0, 2: 10.0}, True),
        ({2: 10.0, 3: 10.0}, False),  # less than twice the ranks
        ({1: 10.0, 2: 10.0, 3: 10.0}, True),
        ({1: 10.0, 2: 9.1}, True),
        ({1: 10.0, 2: 9.0}, False),  # a tenth less
        ({1: 10.0, 2: 8.0, 4: 10.0}, False),
        ({1: 10.0, 2: 20.0, 4: 12.0}, True),
        ({1: 1.0, 4: 1.99}, True),
        ({1: 1.0, 4: 2.0}, False),  # the root of how the ranks grow
        ({1: 10.0, 2: 20.0, 4: 25.0}, False),
    ],
)
def test_numbers_are_flat_if_they_stay_over_twice_the_ranks(values, expected):
    assert is_flat(values) is expected


def make_rows(ranks=("1", "2", "4"), **columns):
    return [
        {"gpus": count, **{name.replace("_", " "): cells[place] for name, cells in columns.items()}}
        for place, count in enumerate(ranks)
    ]


@pytest.mark.parametrize(
    ("columns", "value", "work"),
    [
        ({"batch_per_gpu": ("32", "32", "32")}, "step time", 32.0),
        ({"batch_per_gpu": ("32", "32", "16")}, "step time", None),
        ({"batch_per_gpu": ("32", "32", "32")}, "total time", None),
        ({"batch": ("32", "64", "128")}, "step time", 32.0),
        ({"batch": ("32", "32", "32")}, "step time", None),
        ({"batch": ("32", "64", "128"), "accum": ("4", "2", "1")}, "step time", None),
        ({"batch": ("32", "64", "128"), "accum": ("2", "2", "2")}, "step time", 32.0),
    ],
)
def test_work_grows_where_each_rank_keeps_its_batch(columns, value, work):
    assert find_growing_work(make_rows(**columns), "gpus", value) == work


def test_a_series_is_doubted_beyond_a_tenth_of_gain_or_all_of_the_peak():
    series = ScalingSeries(label="job", throughput={1: 1.0, 2: 2.19})
    assert find_doubts(series, {1: 1.0, 4: 1.35}) == []  # 4 ranks are not in it
    (doubt,) = find_doubts(series, {2: 1.01})
    assert (doubt.ranks, doubt.utilization) == (2, 1.01)
    (jump,) = find_doubts(ScalingSeries(label="job", throughput={1: 1.0, 2: 2.22}))
    assert (jump.ranks, jump.gain) == (2, pytest.approx(0.11))


@pytest.mark.parametrize(("ranks", "is_doubted"), [((1, 2), True), ((4, 8), True), ((2, 3), False)])
def test_a_throughput_looks_like_one_of_a_device_from_twice_the_ranks_on(ranks, is_doubted):
    series = ScalingSeries(label="job", throughput=dict.fromkeys(ranks, 10.0))
    assert series.looks_per_rank is is_doubted
    assert not replace(series, is_time=True).looks_per_rank
    assert not replace(series, is_per_rank=True).looks_per_rank


def test_the_tables_own_column_comes_back():
    whole = ScalingSeries(label="job", throughput={2: 10.0})
    assert whole.restore(4, 20.0) == 20.0
    assert replace(whole, is_per_rank=True).restore(4, 20.0) == 20.0 / 4
    assert replace(whole, is_time=True).restore(4, 20.0) == 1 / 20
    assert replace(whole, is_time=True, work_per_rank=8.0).restore(4, 20.0) == 8 * 4 / 20
    assert whole.throughput_at(6, 1.5) == 10 / 2 * 6 / 1.5


@pytest.mark.parametrize(
    ("text", "value", "ends"), [("1.25", 1.25, (1.245, 1.255)), ("12", 12.0, (11.5, 12.5)), ("0", 0.0, (0.0, 0.5))]
)
def test_a_printed_number_may_be_half_a_digit_off(text, value, ends):
    assert _round_off(text, value) == pytest.approx(ends)


@pytest.mark.parametrize(
    ("last", "expected"), [("1050", True), ("1070", False), ("1000", True)], ids=["5 %", "7 %", "the same"]
)
def test_columns_in_proportion_within_six_percent_are_one(last, expected):
    rows = [{"a": "1000", "b": text} for text in ("1000", "1000", last)]
    assert _are_proportional(rows, "a", "b") is expected
    assert _are_proportional([{"a": "1", "b": "0"}] * 3, "a", "b")  # half of the last digit may hide it


def test_a_plain_name_is_the_value_only_among_throughputs():
    rows = make_rows(value=("5", "9", "7"), **{"images/sec": ("100", "190", "360")})
    assert choose_values(Path("table.csv"), rows, "gpus") == ["images/sec"]
    rows = make_rows(throughput=("5", "9", "16"), **{"images/sec": ("100", "190", "270")})
    assert choose_values(Path("table.csv"), rows, "gpus") == ["throughput"]


@pytest.mark.parametrize(
    ("texts", "expected"), [(("64k",) * 3, True), (("64k", "32k", "16k"), True), (("64k", "64k", "16k"), False)]
)
def test_texts_of_a_batch_belong_to_sizes_if_there_are_as_many_or_one(texts, expected):
    assert _has_own(make_rows(batch=texts), "gpus", "batch") is expected


@pytest.mark.parametrize(
    ("name", "cells", "expected"),
    [
        ("hidden", ("64", "64", "64"), True),
        ("hidden", ("64", "128", "256"), True),
        ("hidden", ("64", "64", "32"), False),
        ("batch", ("64", "32", "16"), True),
        ("batch", ("64", "128", "256"), True),
        ("batch", ("64", "64", "32"), False),
    ],
)
def test_a_number_that_stays_or_follows_from_the_ranks_is_a_companion(name, cells, expected):
    assert is_companion(make_rows(**{name: cells}), "gpus", name) is expected
    twice = make_rows(("1", "1", "2"), **{name: ("64", "32", "64")})
    assert not is_companion(twice, "gpus", name)


def test_only_the_first_column_may_have_no_name(write):
    (table,) = read_tables(write(",gpus,img/s\na,1,100\n"))
    assert table.rows == [{"column 1": "a", "gpus": "1", "img/s": "100"}]
    with pytest.raises(UsageError, match="column names must be unique and not empty"):
        read_tables(write("gpus,,img/s\n1,a,100\n"))


def test_what_names_a_job_or_does_not_grow_is_no_measured_value():
    rows = make_rows(params=("5", "9", "17"), result=("100", "190", "370"))
    assert choose_values(Path("table.csv"), rows, "gpus") == ["result"]
    with pytest.raises(UsageError, match="looks like the measured value"):
        choose_values(Path("table.csv"), make_rows(relative=("1", "1", "1")), "gpus")
    assert choose_values(Path("table.csv"), make_rows(relative=("1", "2", "4")), "gpus") == ["relative"]


def test_rows_of_nothing_do_not_make_a_copy():
    rows = [{"a": "100", "b": "900"}, {"a": "200", "b": "1800"}, {"a": "0", "b": "0"}]
    assert not _are_proportional(rows, "a", "b")


@pytest.mark.parametrize(("last", "is_doubted"), [(10.9, True), (11.1, False)])
def test_a_throughput_looks_like_one_of_a_device_below_a_tenth_more(last, is_doubted):
    assert ScalingSeries(label="job", throughput={1: 10.0, 2: last}).looks_per_rank is is_doubted


def test_a_name_in_brackets_is_the_name_and_behind_one_it_is_not():
    assert [strip_count(name) for name in ("GPUs (n)", "(gpus)", "#GPUs", "gpu")] == ["gpus", "gpus", "gpus", "gpu"]


def test_a_plain_value_is_a_time_if_it_falls_and_that_is_said():
    falls, notes = _find_kind(make_rows(value=("8", "4", "2")), ("gpus", "value"), None)
    assert (falls, len(notes)) == (True, 1)
    assert _find_kind(make_rows(throughput=("8", "4", "2")), ("gpus", "throughput"), None) == (False, [])


def test_descriptions_have_counts_if_fewer_are_left_without_them():
    assert has_counts(make_rows(device=("1x A100", "2x A100", "4x A100")), "device", "gpus")
    assert not has_counts(make_rows(device=("a", "b", "c")), "device", "gpus")


@pytest.mark.parametrize(
    ("text", "throughput"),
    [
        (
            "GPUs;Time/epoch (min);notes\n1;60;\n2;30;\n4;20;node 1\n8;10;node 1\n",
            {1: 1 / 60, 2: 1 / 30, 4: 0.05, 8: 0.1},
        ),
        (
            "run_name,gpus,img/s\nexp_1gpu,1,10\nexp_2gpu,2,19\nexp_4gpu_retry,4,36\nexp_4gpu,4,\n",
            {1: 10, 2: 19, 4: 36},
        ),
    ],
)
def test_free_text_that_tells_no_two_rows_of_one_size_apart_splits_no_job(write, text, throughput):
    (found,) = read_table(write(text), Columns())
    assert found.series.throughput == pytest.approx(throughput)


def test_free_text_that_tells_rows_of_one_size_apart_is_another_job(write):
    found = read_table(write("gpus,img/s,notes\n1,10,fp32\n2,19,fp32\n1,20,fp16\n2,38,fp16\n"), Columns())
    assert [one.series.label for one in found] == ["fp32", "fp16"]


@pytest.mark.parametrize(("header", "word"), [("nodes", "node"), ("gpus", "rank"), ("nodes,gpus_per_node", "rank")])
def test_a_table_of_nodes_is_answered_in_nodes(write, header, word):
    cells = [",".join([str(size), "4"][: header.count(",") + 1]) for size in (1, 2)]
    (found,) = read_table(write(f"{header},seq/s\n{cells[0]},10\n{cells[1]},19\n"), Columns())
    assert found.series.size_word == word
    document = describe_table([found], [64], "table.csv", is_forced=False)
    assert [one.kind for one in document.cautions if one.kind == NODES.name] == [NODES.name] * (word == "node")
    assert f"on 64 {word}s," in document.summary[0]
    assert document.tables[0].columns[0].header == f"{word}s"


def test_a_table_of_collectives_is_no_training(write):
    with pytest.raises(UsageError, match=r"measures collectives \('busbw_gbs'\).*--link"):
        read_table(write("n_gpus,bytes,time_us,busbw_gbs\n2,1024,44,23.7\n4,1024,80,19.1\n"), Columns())
