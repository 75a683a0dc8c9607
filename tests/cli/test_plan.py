"""`scalelab plan` as a user types it: the answer, its formats, and what is refused."""

from __future__ import annotations

import json

import pytest

from scalelab.cli.app import run_verb
from scalelab.cli.plan import choose_batch, read_number
from scalelab.errors import UsageError
from scalelab.launch.fake import FakeLauncher
from scalelab.predict.transformer_shape import GPT2_SMALL, choose_shape
from scalelab.runs import experiment

SMALL = ("plan", "--model", "gpt2-small", "--device", "h100-sxm", "--devices", "8", "--tokens", "10B")


def read_tables(capsys, *arguments):
    """The tables of a plan by heading, from its JSON."""
    assert run_verb([*arguments, "--json", "-"]) == 0
    document = json.loads(capsys.readouterr().out)
    return {section["heading"]: section for section in document["sections"]}, document


def find_values(table, key):
    place = [column["key"] for column in table["columns"]].index(key)
    return [row[place]["value"] for row in table["rows"]]


def test_a_plan_prints_layouts_memory_and_days(capsys):
    assert run_verb([*SMALL, "--full"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "tensor",
        "MFU",
        "B per device, with",
        "device-hours",
        "matrix products",
        "Linear rule",
        "80 % interval",
    ):
        assert words in text


def test_a_plan_is_one_screen(capsys):
    assert run_verb([*SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(("num_devices", "warns"), [(128, False), (256, True)])
def test_zero_3_over_more_replicas_than_were_checked_warns(capsys, num_devices, warns):
    asked = ("plan", "--model", "llama3-8b", "--tensor", "1", "--pipeline", "1", "--zero", "3", "--micro-batch", "1")
    _, document = read_tables(capsys, *asked, "--devices", str(num_devices), "--global-batch-size", "256")
    assert ("unchecked-layout" in {one["kind"] for one in document["cautions"]}) == warns


def test_the_worked_example_is_a_trillion_on_ten_trillion_tokens(capsys):
    asked = ("plan", "--parameters", "1T", "--tokens", "10T", "--devices", "3072", "--global-batch-size", "3072")
    sections, document = read_tables(
        capsys, *asked, "--tensor", "8", "--pipeline", "64", "--activation-checkpointing", "full"
    )
    (days,) = find_values(sections["Whole training run"]["tables"][0], "days")
    # 1.6 million steps of about 100 s, as published for this shape before attention was fused.
    assert 1400 < days < 2200
    linear = find_values(sections["Linear rule"]["tables"][0], "days")
    assert linear[0] == pytest.approx(28_545_911, rel=0.02)
    assert linear[-1] == pytest.approx(days)
    found = {one["kind"]: one["values"] for one in document["findings"]}
    assert found["cost"]["days"]["value"] == pytest.approx(days)
    assert found["linear-rule"]["ratio"] == pytest.approx(linear[0] / days)


def test_a_sweep_has_a_row_for_every_size_and_a_chart(capsys):
    sections, document = read_tables(capsys, *SMALL, "--global-batch-size", "64", "--sweep-devices", "1", "8", "64")
    section = sections["Other device counts"]
    assert find_values(section["tables"][0], "devices") == [1, 8, 64]
    drawn = {layer["mark"]["type"]: layer["data"]["values"] for layer in section["charts"][0]["spec"]["layer"]}
    assert [point["ranks"] for point in drawn["point"]] == [1, 8, 64]
    days = find_values(section["tables"][0], "days")
    assert [point["days"] for point in drawn["point"]] == pytest.approx(days, rel=1e-5)
    (finding,) = (one for one in document["findings"] if one["kind"] == "diminishing-returns")
    assert finding["values"]["num_devices"] in (1, 8, 64)


def test_a_mixture_of_experts_shows_expert_parallelism_and_what_a_token_uses(capsys):
    asked = ("plan", "--model", "gpt2-small", "--experts", "8", "--devices", "8", "--tensor", "1", "--expert", "8")
    sections, _ = read_tables(capsys, *asked, "--zero", "1")
    assert set(find_values(next(iter(sections.values()))["tables"][0], "expert")) == {8}
    assert "expert-parallel all-to-all" in find_values(sections["Step of the fastest layout"]["tables"][0], "part")


def test_a_device_can_be_declared(capsys):
    declared = (
        "--device-peak", "100T", "--device-memory", "40GB", "--device-bandwidth", "1TB/s", "--device-link", "100GB/s",
        "--devices-per-node", "4", "--node-link", "100gbit",
    )  # fmt: skip
    sections, _ = read_tables(capsys, "plan", "--model", "gpt2-small", "--devices", "4", *declared)
    (cost,) = find_values(sections["Whole training run"]["tables"][0], "dollars")
    assert cost is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "gpt2-small", "--device", "h900"), "unknown device 'h900'"),
        (("--model", "gpt3"), "unknown model 'gpt3'"),
        ((), "in exactly one way"),
        (("--model", "gpt2-small", "--parameters", "1B"), "in exactly one way"),
        (("--model", "gpt2-small", "--width", "512"), "--width is not used with --model"),
        (("--parameters", "7B", "--gated"), "--gated is not used with --parameters"),
        (("--layers", "4"), "--layers needs --width and --heads"),
        (("--model", "gpt2-small", "--devices", "0"), "--devices must be"),
        (("--model", "gpt2-small", "--node-link", "0GB/s"), "--node-link must be"),
        (("--model", "gpt2-small", "--node-link", "fast"), "--node-link 'fast' is not a valid rate"),
        (("--model", "gpt2-small", "--device-memory", "0GB"), "memory must be finite and > 0, got 0"),
        (("--model", "gpt2-small", "--tensor", "5", "--devices", "10"), "12 heads cannot be split over tensor 5"),
        (("--model", "gpt2-small", "--pipeline", "13", "--devices", "26"), "12 layers cannot be split"),
        (("--model", "gpt2-small", "--dropout", "1"), "--dropout must be ≥ 0 and < 1, got 1"),
        (("--model", "gpt2-small", "--context", "0"), "--context must be at least 1, got 0"),
        (("--model", "mixtral-8x7b", "--experts-per-token", "9"), "--experts-per-token must be ≤ --experts .8., got 9"),
        (("--model", "gpt2-small", "--experts", "0"), "--experts must be at least 1, got 0"),
        (("--parameters", "7B", "--experts", "8"), "chooses a shape without experts"),
        (("--model", "mixtral-8x7b", "--expert", "16", "--devices", "16"), "8 experts cannot be split over expert 16"),
        (("--model", "gpt2-small", "--dtype", "float8"), "data type of a100-80gb 'float8'"),
        (("--parameters", "1T", "--devices", "8"), "nothing fits"),
        (("--parameters", "many"), "--parameters 'many' is not a number"),
        (("--model", "gpt2-small", "--tokens", "0"), "--tokens must be"),
        (("--model", "gpt2-small", "--device", "v100"), "data type of v100 'bfloat16'"),
    ],
)
def test_the_impossible_is_refused_with_the_reason(arguments, words):
    with pytest.raises(UsageError, match=words):
        run_verb(["plan", *arguments])


@pytest.mark.parametrize(
    ("text", "number"), [("7B", 7e9), ("1T", 1e12), ("1.5e9", 1.5e9), ("124,439,808", 124439808), ("312t", 3.12e14)]
)
def test_large_numbers_are_read_as_people_write_them(text, number):
    assert read_number("parameters", text) == pytest.approx(number)


@pytest.mark.parametrize("devices", [1, 8, 24, 3072])
def test_the_usual_batch_can_be_divided_over_the_devices(devices):
    for model in (GPT2_SMALL, choose_shape(7e10)):
        batch = choose_batch(model, devices)
        odd = devices // (devices & -devices)
        assert batch % odd == 0
        assert 1.4e6 < batch * model.sequence < 1.2e7


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "llama3-8b", "--global-batch-size", "8"), "no workload has 32 layers"),
        (
            (
                "--model",
                "gpt2-tiny",
            ),
            "set a batch for this machine",
        ),
    ],
)
def test_a_plan_that_cannot_be_confirmed_here_says_why(flags, message):
    with pytest.raises(UsageError, match=message):
        run_verb(["plan", *flags, "--devices", "4", "--confirm"])


def test_a_confirmed_plan_shows_what_was_measured_beside_it(capsys, tmp_path, monkeypatch):
    launcher = FakeLauncher(lambda trial: 0.01 * trial.global_batch / trial.num_ranks)
    monkeypatch.setattr(experiment, "choose_launcher", lambda *_: launcher)
    asked = ("plan", "--model", "gpt2-tiny", "--devices", "2", "--global-batch-size", "8", "--confirm")
    sections, document = read_tables(capsys, *asked, "--dtype", "float32", "--runs-dir", str(tmp_path))
    measured, beside = sections["Confirmed here"]["tables"]
    assert 2 <= len(find_values(measured, "run")) <= 3
    assert sorted(find_values(beside, "run")) == sorted(find_values(measured, "run"))
    assert [one for one in document["findings"] if one["kind"] == "plan-ranking"]
