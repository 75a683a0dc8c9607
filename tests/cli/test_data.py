"""`scalelab data` as a user types it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scalelab.cli.data.command import main, read_escapes
from scalelab.data.shards import open_shard
from scalelab.errors import UnknownName, UsageError
from tests.data.shared import SHARED_DATA, needs


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "poem.txt"
    path.write_text("roses are red\n" * 100)
    return path


def test_the_verbs_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "tokenize" in capsys.readouterr().out
    assert main([]) == 2


def test_an_unknown_verb_is_answered_with_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown data command 'tokenise'.*Did you mean 'tokenize'"):
        main(["tokenise"])


def test_a_text_becomes_shards_and_the_next_command_is_printed(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = text.parent / "shards"
    assert main(["tokenize", str(text), "--out", str(out), "--tokens-per-shard", "700"]) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [
        "poem_train_000001.bin",
        "poem_train_000002.bin",
        "poem_val_000000.bin",
    ]
    assert "1400 tokens" in printed
    assert "vocabulary 256 (bytes)" in printed
    last = printed.splitlines()[-1]
    assert last == f"scalelab train --workload gpt2 --data tokens --data-path '{out}/poem_*.bin' --vocabulary 256"


def test_the_beginning_of_a_text_is_named_as_such(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = text.parent / "shards"
    assert main(["tokenize", str(text), "--out", str(out), "--test-share", "0", "--max-tokens", "1000"]) == 0
    printed = capsys.readouterr().out
    assert "1000 tokens from the beginning of 1.40 kB of text" in printed
    assert len(open_shard(out / "poem_train_000001.bin")) == 1000


def test_a_name_that_ends_in_bin_names_the_shards(text: Path) -> None:
    out = text.parent / "deep" / "verse.bin"
    assert main(["tokenize", str(text), "--out", str(out), "--test-share", "0", "--format", "v7"]) == 0
    (path,) = out.parent.iterdir()
    assert path.name == "verse_train_000001.bin"
    assert open_shard(path).kind == "v7"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.txt"], "absent.txt does not exist"),
        ([], "no FILE to tokenize: name at least one"),
        (["TEXT", "--test-share", "1"], "--test-share must be"),
        (["TEXT", "--test-tokens", "-1"], "--test-tokens must be"),
        (["TEXT", "--max-tokens", "0"], "--max-tokens must be"),
        (["TEXT", "--tokens-per-shard", "0"], "--tokens-per-shard must be"),
        (["TEXT", "--tokenizer", "gpt2"], "needs GPT-2's encoder.json as --vocab and its vocab.bpe as --merges"),
        (["TEXT", "--tokenizer", "words"], "--tokenizer"),
        (["TEXT", "--separator", ";"], "--separator ; needs --tokenizer gpt2"),
        (
            ["TEXT", "--tokenizer", "gpt2", "--vocab", "a", "--merges", "b", "--separator", ""],
            "--separator must not be empty",
        ),
        (["TEXT", "--out", "TEXT"], "is a file: use a directory"),
        (["TEXT", "--form", "v1"], "--form"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(text: Path, arguments: list[str], words: str) -> None:
    given = [argument.replace("TEXT", str(text)) for argument in arguments]
    out = [] if "--out" in arguments else ["--out", str(text.parent / "out")]
    with pytest.raises(UsageError) as refused:
        main(["tokenize", *given, *out])
    assert words in str(refused.value)
    assert not (text.parent / "out").exists()


def test_escapes_are_read_as_a_shell_passes_them_on() -> None:
    assert read_escapes(r"\n\n") == "\n\n"
    assert read_escapes("–—é\\t") == "–—é\t"
    with pytest.raises(UsageError, match="--separator"):
        read_escapes("\\x1")


MEMORY = """
import sys
from pathlib import Path
from scalelab.cli.data.command import main
main(["tokenize", sys.argv[1], "--out", sys.argv[2]])
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""
"""Prints the peak of its own memory last; `getrusage` would carry over that of the process it was forked from."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    peaks = []
    for num_megabytes in (8, 48):
        path = tmp_path / f"{num_megabytes}.txt"
        path.write_bytes(b"0123456789abcde\n" * (num_megabytes << 16))
        command = [sys.executable, "-c", MEMORY, str(path), str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]) * 1024)
    assert peaks[1] - peaks[0] < 8 << 20


REAL = ("text/tinyshakespeare.txt", "gpt2_bpe/encoder.json", "gpt2_bpe/vocab.bpe", "token_shards")


@needs(*REAL)
def test_the_published_shards_of_tinyshakespeare_come_out_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    text, vocab, merges, shards = (SHARED_DATA / name for name in REAL)
    files = ["--vocab", str(vocab), "--merges", str(merges)]
    cut = ["--separator", r"\n\n", "--test-tokens", "32768"]
    assert main(["tokenize", str(text), "--out", str(tmp_path), "--tokenizer", "gpt2", *files, *cut]) == 0
    for split, name in (("train", "train_000001"), ("val", "val_000000")):
        ours = tmp_path / f"tinyshakespeare_{name}.bin"
        assert ours.read_bytes() == (shards / f"tiny_shakespeare_{split}.bin").read_bytes()
