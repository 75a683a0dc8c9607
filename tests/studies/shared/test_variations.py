"""Options as they are typed to be varied: each value has the option's type, and what cannot be read is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from scalelab.errors import UsageError
from scalelab.studies.shared.job import Job
from scalelab.studies.shared.variations import parse_options, parse_variation, read_base, read_variations


def test_a_set_of_options_is_read_by_their_types() -> None:
    assert parse_options("dim=256,depth=2", "mlp") == {"dim": 256, "depth": 2}
    assert parse_options("dropout=0, d-model=64", "transformer") == {"dropout": 0.0, "d_model": 64}
    assert parse_options("size=small,sequence=128", "gpt2") == {"size": "small", "sequence": 128}


def test_a_variation_has_names_and_values() -> None:
    found = parse_variation("features+d_model=256,512", "transformer")
    assert (found.names, found.values) == (("features", "d_model"), (256, 512))
    assert found.assign(256) == {"features": 256, "d_model": 256}
    assert found.label == "features = d_model"


@pytest.mark.parametrize(
    ("text", "workload", "words"),
    [
        ("dmi=3", "mlp", "Did you mean 'dim'? Known: depth, dim"),
        ("dim=wide", "mlp", "'wide' is not a valid dim of mlp"),
        ("dim", "mlp", "use a form such as dim=256,512"),
        ("dim=", "mlp", "use a form such as"),
        ("dim=1,,2", "mlp", "use a form such as"),
        ("dim=2,2", "mlp", "a value twice"),
        ("size=huge", "gpt2", "'huge' is not a valid size"),
        ("d_model+dropout=1", "transformer", "different kinds"),
        ("sequence=null", "gpt2", "leave it out"),
    ],
)
def test_what_cannot_be_read_is_refused_with_the_flag_and_the_text(text: str, workload: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_variations("vary", [text], workload)
    assert str(caught.value).startswith(f"--vary '{text}'")
    assert words in str(caught.value)


@pytest.mark.parametrize(("text", "words"), [("dim", "use a form"), ("dim=1,dim=2", "twice"), ("dim=1,x=2", "Known")])
def test_a_set_that_cannot_be_read_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_options(text, "mlp")


def test_a_dimension_is_given_once() -> None:
    with pytest.raises(UsageError, match="give all its values at once"):
        read_variations("vary", ["dim=1", "dim=2"], "mlp")


def test_options_of_a_file_of_the_users_own_have_the_types_that_it_declares(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("def build(batch_size, width: int = 4, rate=0.5, **more):\n    ...\n")
    name = f"{file}:build"
    assert parse_options("width=8,rate=1,other=3,word=x", name) == {"width": 8, "rate": 1.0, "other": 3, "word": "x"}
    job = Job(workload=name, options={"rate": 0.25})
    assert read_base(["width", "rate", "other"], job) == {"width": 4, "rate": 0.25, "other": None}


def test_the_base_is_what_the_job_says_or_the_default() -> None:
    assert read_base(["dim", "depth"], Job(workload="mlp", options={"dim": 8})) == {"dim": 8, "depth": 6}
