"""`samples.csv`: what is read back is the very value measured, and what was changed is refused."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scalelab.errors import DamagedRun
from scalelab.records.observations import Fetch, Transfer
from scalelab.records.samples import (
    COLUMNS,
    FIRST_COLUMNS,
    parse_fetches,
    parse_samples,
    parse_transfers,
    read_partial_fetches,
    read_partial_transfers,
    read_raw,
    render_raw,
    render_samples,
    render_transfers,
    sha256_of,
)
from scalelab.records.trial import StepKind, StepSample
from tests.records import draw_samples

SAMPLE = StepSample(0, 3, StepKind.PHASES, 12.5, 0.1, 0.01, 0.02, 0.03, 0.04, 0.7)


def spell(sample: StepSample) -> list[str]:
    """Every bit of every field; `repr` tells -0.0 from 0.0, and nan equals nan."""
    return [repr(value) for value in sample]


@given(st.lists(draw_samples(), max_size=5))
@settings(deadline=None)
def test_samples_read_back_are_the_ones_written_to_the_last_bit(samples: list[StepSample]) -> None:
    assert [spell(sample) for sample in parse_samples(render_samples(samples))] == [spell(sample) for sample in samples]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1 / 3, None])
def test_losses_of_every_sort_are_kept(loss: float | None) -> None:
    (back,) = parse_samples(render_samples([SAMPLE._replace(loss=loss)]))
    assert repr(back.loss) == repr(loss)


def test_what_was_not_timed_is_an_empty_field() -> None:
    text = render_samples([StepSample(1, 0, StepKind.CLEAN, 0.25, 0.5)])
    assert text.splitlines() == [",".join(COLUMNS), "1,0,clean,0.25,0.5" + "," * 10]


def test_any_reader_of_csv_can_read_it() -> None:
    (row,) = csv.DictReader(render_samples([SAMPLE]).splitlines())
    assert row["kind"] == "phases"
    assert float(row["step_seconds"]) == SAMPLE.step_seconds


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the header is None"),
        ("rank,step\n", "the header is"),
        ("HEADER0,3,clean,1.0\n", "a line has 4 fields, not 15"),
        ("HEADER0,3,clean,1.0,0.1,,,,,,,,,,,\n", "a line has 16 fields, not 15"),
        ("HEADER0,3,clean,,0.1,,,,,,,,,,\n", "a step has no time"),
        ("HEADER0,3,clean,1.0,,,,,,,,,,,\n", "a step has no time"),
        ("HEADER0,3,clean,1.0,nan,,,,,,,,,,\n", "a step has no time"),
        ("HEADER0,3,clean,1.0,inf,,,,,,,,,,\n", "a step has no time"),
        ("HEADER0,3,sparkling,1.0,0.1,,,,,,,,,,\n", "sparkling"),
        ("HEADERzero,3,clean,1.0,0.1,,,,,,,,,,\n", "zero"),
        ("HEADER0,3,clean,1.0,0.1,,,,,,,,,,bad\n", "bad"),
    ],
)
def test_a_line_that_is_no_sample_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_samples(text.replace("HEADER", render_samples([])))


@given(st.text(max_size=40))
@settings(deadline=None)
def test_no_text_at_all_makes_the_reader_fail_otherwise(text: str) -> None:
    try:
        samples = parse_samples(render_samples([]) + text)
    except ValueError:
        return
    assert all(isinstance(sample, StepSample) for sample in samples)


def write_file(directory: Path, text: str) -> tuple[Path, str]:
    path = directory / "samples.csv"
    path.write_text(text, encoding="utf-8")
    return path, sha256_of(text.encode())


def test_a_file_with_its_checksum_and_count_is_read(tmp_path: Path) -> None:
    path, checksum = write_file(tmp_path, render_samples([SAMPLE, SAMPLE]))
    assert read_raw(path, checksum, 2) == [SAMPLE, SAMPLE]


@pytest.mark.parametrize("num_bytes", [0, 1, 50, -1])
def test_a_file_that_was_cut_anywhere_is_refused(tmp_path: Path, num_bytes: int) -> None:
    path, checksum = write_file(tmp_path, render_samples([SAMPLE, SAMPLE]))
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(DamagedRun, match=r"samples\.csv does not match the checksum in its result"):
        read_raw(path, checksum, 2)


def test_a_digit_changed_by_hand_is_noticed(tmp_path: Path) -> None:
    path, checksum = write_file(tmp_path, render_samples([SAMPLE]))
    path.write_text(path.read_text().replace("12.5", "12.6"))
    with pytest.raises(DamagedRun, match=r"samples\.csv"):
        read_raw(path, checksum, 1)


def test_a_result_without_checksum_vouches_for_no_file(tmp_path: Path) -> None:
    path, _ = write_file(tmp_path, render_samples([SAMPLE]))
    with pytest.raises(DamagedRun, match=r"samples\.csv"):
        read_raw(path, None, 1)


def test_a_wrong_number_of_samples_is_named(tmp_path: Path) -> None:
    path, checksum = write_file(tmp_path, render_samples([SAMPLE]))
    with pytest.raises(DamagedRun, match=r"samples\.csv has 1 samples, but its result lists 2"):
        read_raw(path, checksum, 2)


def test_a_file_that_was_written_damaged_is_named(tmp_path: Path) -> None:
    path, checksum = write_file(tmp_path, "nothing of the sort\n")
    with pytest.raises(DamagedRun, match=r"samples\.csv is damaged: the header is"):
        read_raw(path, checksum, 0)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DamagedRun, match=r"samples\.csv cannot be read: No such file"):
        read_raw(tmp_path / "samples.csv", "0" * 64, 0)


def test_a_file_from_before_the_last_gradient_was_timed_is_read() -> None:
    header = ",".join(FIRST_COLUMNS)
    (sample,) = parse_samples(f"{header}\n0,3,phases,1.0,0.5,0.1,0.1,0.2,0.1,2.5\n")
    assert (sample.loss, sample.ready_seconds) == (2.5, None)


TRANSFERS = [Transfer(0, "all_reduce", 64, 0, 10, 12.5, 1 / 3), Transfer(1, "all_reduce", 64, 0, 10, 12.6, 5e-324)]


def test_transfers_read_back_are_the_ones_written_to_the_last_bit() -> None:
    assert parse_transfers(render_transfers(TRANSFERS)) == TRANSFERS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the header is None"),
        (render_samples([]), "the header is"),
        ("HEADER0,all_reduce,64,0,1,0.0\n", "a line has 6 fields, not 7"),
        ("HEADER0,all_reduce,64,0,1,0.0,nan\n", "a timing has no time"),
        ("HEADER0,all_reduce,64,0,0,0.0,1.0\n", "a timing has no time"),
        ("HEADER0,all_reduce,many,0,1,0.0,1.0\n", "many"),
    ],
)
def test_a_line_that_is_no_timing_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_transfers(text.replace("HEADER", render_transfers([])))


def test_transfers_whose_file_was_changed_are_refused(tmp_path: Path) -> None:
    path, text = tmp_path / "transfers.csv", render_transfers(TRANSFERS)
    path.write_text(text)
    assert read_raw(path, sha256_of(text.encode()), 2) == TRANSFERS
    with pytest.raises(DamagedRun, match=r"transfers\.csv has 2 transfers, but its result lists 3"):
        read_raw(path, sha256_of(text.encode()), 3)
    path.write_text(text[:-3])
    with pytest.raises(DamagedRun, match=r"transfers\.csv does not match the checksum in its result"):
        read_raw(path, sha256_of(text.encode()), 2)


def test_a_timing_that_was_cut_by_the_end_of_its_rank_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rank0.transfers.csv"
    path.write_text(render_transfers(TRANSFERS)[:-3])
    assert read_partial_transfers(path) == TRANSFERS[:1]
    assert read_partial_transfers(tmp_path / "none") == []


def test_batches_of_a_stored_set_come_back_as_they_were_and_a_cut_line_is_dropped(tmp_path: Path) -> None:
    lines = [Fetch(rank, "shuffled", "batch", "warm", 1, 2, 32, 0.1, 1 / 3, 1e-7) for rank in (0, 1)]
    text = render_raw("fetches", lines)
    assert parse_fetches(text) == lines
    alone = lines[0]._replace(num_samples=1)
    assert parse_fetches(render_raw("fetches", [alone])) == [alone]
    with pytest.raises(ValueError, match="a batch has no time"):
        parse_fetches(render_raw("fetches", [alone._replace(num_samples=0)]))
    file = tmp_path / "rank0.fetches.csv"
    file.write_text(text[:-4])
    assert read_partial_fetches(file) == lines[:1]
    for wrong in (text.replace("shuffled,batch", "shuffled"), text.replace("1e-07", "nan"), text.replace("rank,", "")):
        with pytest.raises(ValueError, match=r"header|fields|no time"):
            parse_fetches(wrong)
