"""How a script is executed: where a step ends on request, and the one line about a script that cannot be measured."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

from scalelab.errors import UsageError
from scalelab.launch.agreement import Assignment, copy_for_script
from scalelab.records.tasks import Script
from scalelab.records.trial import Block, StepKind
from scalelab.worker.script import runner
from scalelab.worker.script.execution import find_function, run_prelude
from scalelab.worker.script.refusal import OWN_PROCESSES, describe_wait, find_hint, find_step
from scalelab.worker.script.runner import ScriptFinished, giving_up, run_script
from scalelab.worker.script.session import ScriptSession
from tests.worker.script.scripts import make_script_trial
from tests.worker.script.test_session import Kept

OWN_OPTIMIZER = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

model = nn.Linear(8, 2)

class Trainer:
    def step(self, inputs):
        model(inputs).sum().backward()
        model.zero_grad()

for _ in range({epochs}):
    for (inputs,) in DataLoader(TensorDataset(torch.randn(12, 8)), 4):
        Trainer().step(inputs)
"""


@pytest.fixture
def own_main(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script becomes `__main__`, with its own arguments and path."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")


def execute(
    directory: Path,
    step_at: str,
    epochs: int = 100,
    text: str = OWN_OPTIMIZER,
    blocks: Sequence[Block] = (Block(StepKind.CLEAN, 7),),
) -> Kept:
    path = directory / "mine.py"
    path.write_text(text.replace("{epochs}", str(epochs)))
    kept = Kept()
    session = ScriptSession(blocks, 0, directory / "trace.json", kept, 4, step_at=step_at)
    run_script(Script(target=str(path), directory=str(directory), step_at=step_at), session, directory / "rank0.log")
    return kept


@pytest.mark.usefixtures("own_main")
@pytest.mark.parametrize("step_at", ["dataloader", "mine:Trainer.step"])
def test_steps_end_where_they_are_said_to(step_at: str, tmp_path: Path) -> None:
    kept = execute(tmp_path, step_at)
    assert [one.step for one in kept] == list(range(7))
    assert all(one.loss is not None for one in kept), "an epoch's end is not a step"


@pytest.mark.usefixtures("own_main")
def test_the_step_of_an_optimizer_of_ones_own_is_the_optimizer_s_phase(tmp_path: Path) -> None:
    lines = "    def zero_grad(self):\n        model.zero_grad()\n\n    def step(self, inputs):\n        pass\n"
    own = OWN_OPTIMIZER.partition("    def step")[0] + lines
    loop = "for _ in range(100):\n    model(torch.randn(4, 8)).sum().backward()\n    Trainer().step(None)\n"
    blocks = (Block(StepKind.CLEAN, 4), Block(StepKind.PHASES, 2))
    kept = execute(tmp_path, "mine:Trainer.step", text=own + loop, blocks=blocks)
    assert all(one.optimizer_seconds for one in kept if one.kind is StepKind.PHASES)


@pytest.mark.usefixtures("own_main")
def test_a_function_that_an_evaluation_calls_too_ends_no_step_there(tmp_path: Path) -> None:
    text = OWN_OPTIMIZER.replace("class", "def get(batch):\n    return batch\n\nclass")
    text = text.replace("Trainer().step(inputs)", "Trainer().step(get(inputs))")
    text += "    with torch.no_grad():\n        model.eval()(get(inputs))\n    model.train()\n"
    kept = execute(tmp_path, "mine:get", text=text)
    assert len(kept) == 7
    assert all(one.loss is not None for one in kept[1:])


CLEARING_UP = """
import torch
from torch import nn

model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for _ in range({epochs}):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
finally:
    open("/nowhere/queue")
"""


@pytest.mark.usefixtures("own_main")
def test_an_error_after_the_last_step_is_only_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(execute(tmp_path, "optimizer", text=CLEARING_UP)) == 7
    assert "FileNotFoundError" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        execute(tmp_path, "optimizer", epochs=5, text=CLEARING_UP)


@pytest.mark.usefixtures("own_main")
def test_what_cannot_be_measured_is_said_in_one_line(tmp_path: Path) -> None:
    seen = r"the script ended without a step \(seen: 1 trained module, 3 backward passes, 0 optimizer calls\): "
    with pytest.raises(ScriptFinished, match=f"{seen}say where a step ends: --step-at dataloader, or --step-at mod"):
        execute(tmp_path, "optimizer", epochs=1)
    plain = OWN_OPTIMIZER.replace("DataLoader(TensorDataset(torch.randn(12, 8)), 4)", "[(torch.randn(4, 8),)] * 3")
    for step_at, absent in (("optimizer", r"torch\.optim\.Optimizer"), ("dataloader", "DataLoader")):
        with pytest.raises(ScriptFinished, match=f"{seen}it uses no {absent}: name a function that runs once in every"):
            execute(tmp_path, step_at, epochs=1, text=plain)
    unused = plain.replace("class", "def rest():\n    pass\n\nclass")
    with pytest.raises(ScriptFinished, match=f"{seen}the function that --step-at names did not return: name one that"):
        execute(tmp_path, "mine:rest", epochs=1, text=unused)
    with pytest.raises(ScriptFinished, match="its data loader gave no batch: check that the data set is larger"):
        execute(tmp_path, "optimizer", text=OWN_OPTIMIZER.replace(", 4)", ", 16, drop_last=True)"))
    with pytest.raises(ScriptFinished, match="the script needs a GPU, and there is none here"):
        execute(tmp_path, "optimizer", text="raise TypeError('this hook requires CUDA 11+')")
    with pytest.raises(UsageError, match=r"--step-at mine:nothing: mine\.py defines no nothing there"):
        execute(tmp_path, "mine:nothing")
    with pytest.raises(UsageError, match=r"--step-at json:nothing: module 'json' has no attribute 'nothing'"):
        find_function("json:nothing")
    script = Script(target="/package/train.py")
    hints = {
        "attempted relative import with no known parent package": "the script imports from its own package: run it as a"
        " module, -- -m PACKAGE.train",
        "No module named 'wandb'": "the script imports what is not installed here: install it beside torch, or add your"
        " own to PYTHONPATH",
    }
    written = "the script found what an earlier trial wrote: run each trial in a copy of the directory, --scratch"
    hints["expected out/config.yaml to NOT exist"] = hints["[Errno 17] File exists: 'out'"] = written
    gpu = "the script needs a GPU, and there is none here: pass its own flags for the CPU and gloo, if it has them"
    hints["Torch not compiled with CUDA enabled"] = gpu
    hints["module 'torch._C' has no attribute '_cuda_setDevice'"] = gpu
    hints["CUDA required"] = gpu
    hints["Cannot access accelerator device when none is available."] = gpu
    assert {words: find_hint(words, script) for words in hints} == hints
    assert find_hint("something else", script) == ""
    module = Script(target="mine.train", is_module=True)
    absent = "there is no module mine.train here: start in the directory that has its package, or install it"
    for words in ("No module named mine.train", "Error while finding module specification for 'mine.train' (Modu…)"):
        assert find_hint(words, module) == absent


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "def train_step(x): ...\nclass Lion:\n    def step(self): ...\n    def zero_grad(self): ...",
            "mine:Lion.step",
        ),
        ("class Env:\n    def step(self): ...\ndef update_weights(): ...", "mine:update_weights"),
        ("def steps(): ...", "library:Adam.step"),
    ],
)
def test_what_looks_like_a_step_is_named(
    text: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = ModuleType("library")
    library.__dict__["Adam"] = type("Adam", (), {"step": len, "zero_grad": len, "__module__": "library"})
    monkeypatch.setattr(sys, "modules", {"library": library})
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert find_step(Script(target=str(path))) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def get_batch(): ...\nnn.utils.clip_grad_norm_(parameters, 1.0)", "torch.nn.utils:clip_grad_norm_"),
        ("def batchify(): ...\ndef get_batch(): ...", "mine:get_batch"),
        ("def batchify(): ...", ""),
    ],
)
def test_what_a_loop_calls_once_per_step_is_named(
    text: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "modules", {})
    path = tmp_path / "mine.py"
    path.write_text(text)
    assert find_step(Script(target=str(path))) == found


@pytest.mark.usefixtures("own_main")
@pytest.mark.parametrize(
    ("code", "printed", "reason"),
    [
        (
            2,
            "usage: mine.py [-h] [--lr LR]\n\x1b[31mmine.py: error: unrecognized arguments: --lrr 1\x1b[0m\n",
            "the script did not take its arguments (exit code 2); it printed: mine.py: error: unrecognized arguments:"
            " --lrr 1",
        ),
        (2, "", "the script did not take its arguments (exit code 2), and printed nothing"),
        (
            2,
            "mine.py: error: the following arguments are required: --local-rank\n",
            "the script did not take its arguments (exit code 2); it printed: mine.py: error: the following arguments"
            " are required: --local-rank (pass it {local_rank})",
        ),
        (
            1,
            "Error executing job\nValueError: bad data\nSet FULL_ERROR=1 for more\n",
            "the script exited with code 1 after 0 of 7 planned steps; it printed: ValueError: bad data",
        ),
        (
            1,
            "first\nno such data\n\n",
            "the script exited with code 1 after 0 of 7 planned steps; it printed: no such data",
        ),
    ],
)
def test_a_script_that_exits_is_quoted(code: int, printed: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text(printed)
    with pytest.raises(ScriptFinished) as caught:
        execute(tmp_path, "optimizer", text=f"import os\nos._exit({code})")
    assert str(caught.value) == reason
    assert (caught.value.__cause__ is None) == (code == 2), "no frames of argparse"


def spin() -> None:
    while True:
        pass


def test_a_script_without_a_step_is_given_up_before_the_time_limit(tmp_path: Path) -> None:
    session = ScriptSession((Block(StepKind.CLEAN, 7),), 0, tmp_path / "trace.json", Kept(), 4)
    with pytest.raises(runner.GivenUp), giving_up(session, 0.001):
        spin()


def test_a_script_that_only_waits_is_quoted(tmp_path: Path) -> None:
    session = ScriptSession((Block(StepKind.CLEAN, 7),), 0, tmp_path / "trace.json", Kept(), 4)
    log = tmp_path / "rank0.log"
    log.write_text("tokenizing\n")
    script = Script(target="/package/train.py")
    words = describe_wait(20.0, session, log, script, has_children=False)
    assert words.startswith(
        "no step was seen in 20.0 s, and no training; the last line it printed: tokenizing: raise --timeout"
        " if it takes long to begin; processes that it starts are not watched"
    )
    seen = "no step was seen in 20.0 s (seen: 0 trained modules, 0 backward passes, 0 optimizer calls)"
    assert describe_wait(20.0, session, log, script, has_children=True) == f"{seen}: {OWN_PROCESSES}"


def test_a_scratch_copy_leaves_out_runs_and_hidden_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train.py", "data/set.csv", ".git/config", "__pycache__/train.pyc", "runs/one/trials/a/trial.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    trial = tmp_path / "runs" / "one" / "trials" / "a"
    copy_for_script(tmp_path, trial)
    copied = trial / "workdir"
    assert sorted(str(one.relative_to(copied)) for one in copied.rglob("*") if one.is_file()) == [
        "data/set.csv",
        "train.py",
    ]
    monkeypatch.setattr("scalelab.launch.agreement.MOST_COPIED_BYTES", 7)
    with pytest.raises(UsageError, match=r"--scratch copies at most 7 B, .* has 8 B: start in a directory without"):
        copy_for_script(tmp_path, trial)


def test_a_prelude_runs_the_script_up_to_its_import_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", os.environ.copy())
    path = tmp_path / "train.py"
    path.write_text(
        "import os, sys\n"
        "os.environ['OF_THE_SCRIPT'] = ' '.join(sys.argv[1:]) + os.environ['WORLD_SIZE']\n"
        "import torch.no_module_that_is_loaded\n"
        "open('after.txt', 'w').close()\n"
    )
    trial = make_script_trial(path, "--lr", num_ranks=2)
    assert isinstance(trial.task, Script)
    before = (Path.cwd(), sys.argv, list(sys.path), list(sys.meta_path))
    run_prelude(trial, trial.task, Assignment(directory=str(tmp_path), rank=1, cores=(), local_rank=1))
    assert os.environ["OF_THE_SCRIPT"] == "--lr2"
    assert not (tmp_path / "after.txt").exists()
    assert (Path.cwd(), sys.argv, sys.path, sys.meta_path) == before
