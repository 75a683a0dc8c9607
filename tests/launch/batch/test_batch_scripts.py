"""Job scripts: what Slurm and PBS would make of them, checked by Slurm itself and by a strict reader of directives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scalelab.errors import LaunchFailed, UsageError
from scalelab.launch.batch.jobscripts import (
    JobRequest,
    make_executor,
    make_job,
    name_attributes,
    render_launch,
    render_script,
)
from scalelab.launch.batch.site import Site, read_site
from scalelab.recipes.polaris.jobs import write_script
from scalelab.records.launchers import Scheduler
from tests.pbs import NotAccepted, read_directives
from tests.slurm import Cluster

EXAMPLES = Path(__file__).parents[3] / "examples" / "sites"


def make_request(directory: Path, **fields: object) -> JobRequest:
    defaults: dict[str, object] = {
        "name": "scalelab-run",
        "num_nodes": 2,
        "ranks_per_node": 4,
        "cores_per_rank": 8,
        "has_gpus": False,
        "arguments": ("-m", "scalelab", "resume", "RUN"),
        "directory": directory,
        "batch_directory": directory / "batch",
    }
    return JobRequest(**(defaults | fields))  # type: ignore[arg-type]


def render(scheduler: Scheduler, site: Site, directory: Path, **fields: object) -> str:
    request = make_request(directory, **fields)
    return render_script(make_executor(scheduler, directory / "batch"), make_job(request, site, scheduler))


def test_polaris_gets_what_its_documentation_asks_for(tmp_path: Path) -> None:
    found = read_directives(render("pbs", read_site(EXAMPLES / "polaris.toml"), tmp_path))
    wanted = ["walltime=0:30:0", "select=2:system=polaris", "place=scatter", "filesystems=home:eagle"]
    assert found["l"] == wanted
    assert found["q"] == ["debug"]
    assert found["A"] == ["PROJECT"]
    assert found["N"] == ["scalelab-run"]


def test_aurora_selects_by_number_alone(tmp_path: Path) -> None:
    found = read_directives(render("pbs", read_site(EXAMPLES / "aurora.toml"), tmp_path))
    assert "select=2" in found["l"]


@pytest.mark.parametrize("has_gpus", [False, True])
def test_without_a_chunk_pbs_is_told_cores_and_ranks(tmp_path: Path, has_gpus: bool) -> None:
    found = read_directives(render("pbs", Site(), tmp_path, has_gpus=has_gpus))
    assert f"select=2:ncpus=32:mpiprocs=4{':ngpus=4' * has_gpus}" in found["l"]
    assert "place=scatter" in found["l"]
    assert not {"A", "q"} & set(found)


def test_further_directives_of_pbs_stand_beside_ours(tmp_path: Path) -> None:
    site = Site(directives=("l=singularity_fakeroot=true", "k=doe", "r=n"), placement="free", filesystems="home")
    found = read_directives(render("pbs", site, tmp_path))
    assert "singularity_fakeroot=true" in found["l"]
    assert (found["k"], found["r"]) == (["doe"], ["n"])


def test_the_script_of_the_recipe_is_accepted() -> None:
    found = read_directives(write_script())
    assert {"select=2:system=polaris", "place=scatter", "filesystems=home:eagle"} < set(found["l"])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('#PBS -N="x"', "-N does not take '=x'"),
        ("#PBS -Z 5", "-Z is not known"),
        ("#PBS -N my job", "'job' is no option"),
        ('#PBS -N "my job"', "does not take 'my job'"),
        ("#PBS -l select=two", "select does not take 'two'"),
        ("#PBS -l select=2 -l nodes=2", "cannot stand beside"),
        ("#PBS -l place=everywhere", "place does not take"),
        ("#PBS -l walltime=1:90:00", "walltime does not take"),
        ("#PBS -l walltime=60\n#PBS -l walltime=70", "asked for twice"),
        ("#PBS -q a\n#PBS -q b", "-q is given twice"),
        ("#PBS-V", "no blank"),
        ("#PBS -A", "has no value"),
        ("echo\n#PBS -V", "after the first command"),
    ],
)
def test_the_reader_of_directives_is_strict(line: str, words: str) -> None:
    with pytest.raises(NotAccepted, match=words):
        read_directives(f"#!/bin/bash\n{line}\n")


def test_the_templates_own_resources_would_not_do(tmp_path: Path) -> None:
    """Why the resources are left out: with them, PSI/J's own executor asks twice for nodes."""
    from psij.executors.batch.pbs import PBSJobExecutor

    from scalelab.launch.batch.executors import Pbs

    site = read_site(EXAMPLES / "polaris.toml")
    executor = make_executor("pbs", tmp_path / "batch")
    assert isinstance(executor, Pbs)
    executor.generate_submit_script = super(Pbs, executor).generate_submit_script  # type: ignore[method-assign]
    assert issubclass(Pbs, PBSJobExecutor)
    with pytest.raises(NotAccepted, match="asked for twice"):
        read_directives(render_script(executor, make_job(make_request(tmp_path), site, "pbs")))


@pytest.mark.parametrize(
    "site",
    [
        Site(),
        Site(wall_time="00:05:00", queue="debug", directives=("nice=5", "comment=x")),
        Site(account="project", setup=("true",)),
    ],
    ids=["plain", "directives", "account"],
)
def test_slurm_itself_accepts_the_script(slurm: Cluster, tmp_path: Path, site: Site) -> None:
    file = tmp_path / "script.sh"
    file.write_text(render("slurm", site, tmp_path, num_nodes=1, ranks_per_node=2, cores_per_rank=1))
    done = slurm.run("sbatch", "--test-only", str(file))
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


def test_slurm_itself_refuses_a_script_for_ninety_nine_nodes(slurm: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "script.sh"
    file.write_text(render("slurm", Site(), tmp_path, num_nodes=99))
    assert slurm.run("sbatch", "--test-only", str(file)).returncode != 0


def test_slurm_is_asked_for_gpus_unless_the_site_does(tmp_path: Path) -> None:
    assert '#SBATCH --gpus-per-node="4"' in render("slurm", Site(), tmp_path, has_gpus=True)
    own = render("slurm", Site(directives=("gres=gpu:a100:4",)), tmp_path, has_gpus=True)
    assert "gpus-per-node" not in own
    assert '#SBATCH --gres="gpu:a100:4"' in own
    assert "--gpu" not in render("slurm", Site(), tmp_path)


def test_lsf_gets_nodes_ranks_queue_and_minutes(tmp_path: Path) -> None:
    script = render("lsf", Site(queue="batch", account="project", wall_time="90min"), tmp_path)
    for line in ("-nnodes 2", "-n 8", "-W 1:30", '-q "batch"', '-P "project"', '-J "scalelab-run"'):
        assert f"#BSUB {line}\n" in script


def test_the_launch_script_sets_up_and_then_runs_scalelab(tmp_path: Path) -> None:
    site = Site(setup=("export NAME=worth",), container='apptainer exec --bind "$NAME" x.sif', python="python3")
    request = make_request(tmp_path, arguments=("-c", "import os; print(os.environ['SCALELAB_RANK_PREFIX'])"))
    request.batch_directory.mkdir()
    request.launch_file.write_text(render_launch(request, site))
    subprocess.run(["bash", str(request.launch_file)], check=True)
    assert request.log_file.read_text() == 'apptainer exec --bind "worth" x.sif\n'
    assert "export SCALELAB_RANK_PYTHON" in request.launch_file.read_text()
    assert f"exec {sys.executable} -c" in request.launch_file.read_text()


def test_without_a_container_the_sites_python_runs_scalelab(tmp_path: Path) -> None:
    text = render_launch(make_request(tmp_path), Site(python="/opt/python"))
    assert "exec /opt/python -m scalelab resume RUN" in text
    assert "SCALELAB_RANK" not in text


def test_a_login_shell_is_used_only_for_set_up_lines(tmp_path: Path) -> None:
    assert " /bin/bash -l " in render("slurm", Site(setup=("module load x",)), tmp_path)
    assert " -l " not in render("slurm", Site(), tmp_path)


def test_a_path_that_would_break_in_a_script_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "my runs"
    with pytest.raises(UsageError, match=r"cannot be used in a job script.*--runs-dir"):
        render("slurm", Site(), place)


def test_a_directive_may_come_several_times() -> None:
    named = name_attributes("lsf", [("R", "a"), ("R", "b"), ("q", "c")])
    assert named == {"lsf.R": "a", "lsF.R": "b", "lsf.q": "c"}
    with pytest.raises(UsageError, match="more than 8 times"):
        name_attributes("pbs", [("l", "x")] * 9)


def test_without_psij_the_way_to_get_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scalelab.launch.batch.jobscripts.installed_version", lambda name: None)
    with pytest.raises(LaunchFailed, match=r"pip install 'scalelab\[cluster\]'"):
        make_executor("slurm", tmp_path)


def test_without_psij_everything_but_submission_works() -> None:
    script = "import sys; sys.modules['psij'] = None; import scalelab.runs.experiment, scalelab.recipes.feasibility"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
