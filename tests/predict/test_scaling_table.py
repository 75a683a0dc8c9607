"""Anybody's table as series."""

from pathlib import Path

import pytest

from scalelab.errors import UsageError
from scalelab.predict.extrapolate import extrapolate
from scalelab.predict.scaling_table import Columns, read_table
from scalelab.predict.table_columns import choose_values, find_direction, leave_out_copies, make_long
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
    ],
)
def test_headers_that_people_write_are_read(tmp_path, header, rows, value, is_per_rank):
    path = tmp_path / "table.csv"
    path.write_text(f"{header}\n{rows}\n")
    (found,) = read_table(path, Columns())
    assert found.series.throughput[4] == pytest.approx(value)
    assert found.series.is_per_rank is is_per_rank
    assert found.series.restore(4, value) == pytest.approx(90.0 if is_per_rank else value)


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
