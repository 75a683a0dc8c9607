"""Store the reports that pages show: the newest run of every study, and of every recipe, in a directory of runs.

    python docs/generate_reports.py RUNS_DIR [NAME …]

The document is derived from the raw samples, as `scalelab report` does it, and stored without the names of the machine.

To retake a report, run its command with `--runs-dir RUNS_DIR` on two cores with a load below 0.2 (`scalelab doctor`),
one at a time, then this program. Times are for two quiet cores, within a factor of about three; all of them take about
an hour. A control that is not "no difference" means that the machine was not quiet: take it again.

    batch-scaling     scalelab run batch-scaling --workload lenet                                            2 min
    batch-size        scalelab run batch-size --workload lenet                                               1 min
    collectives       scalelab run collectives                                                               4 min
    comm-volume       scalelab run comm-volume --workload lenet                                              1 min
    compile           scalelab run compile --workload lenet                                                  3 min
    delay             scalelab run delay --workload lenet                                                    1 min
    dimensions        scalelab run dimensions --workload mlp --dim 256 --depth 2
                          --vary dim=128,256,512 depth=2,4 --grid                                            1 min
    dtypes            scalelab run dtypes --workload lenet                                                   1 min
    io-formats        scalelab run io-formats --formats memory npy hdf5 hdf5-gzip --rounds 8                 4 min
    large-batch       scalelab run large-batch --workload lenet --data digits --epochs 3                     2 min
    layouts           scalelab run layouts --workload gpt2 --size tiny --dropout 0 --ranks 4
                          --global-batch-size 8 --rounds 6 --steps 12                                        3 min
    loader-workers    scalelab run loader-workers --workload lenet --data digits --workers 0 1               1 min
    max-batch         scalelab run max-batch --workload lenet --memory-limit 400MB                           1 min
    memory            scalelab run memory --workload lenet                                                   1 min
    model-size        scalelab run model-size                                                                1 min
    network           scalelab run network --workload lenet                                       (as root)  4 min
    optimizers        scalelab run optimizers --workload lenet                                               1 min
    quantize          scalelab quantize                                                                      1 min
    reproducibility   scalelab run reproducibility --workload lenet                                          1 min
    straggler         scalelab run straggler --workload lenet                                                1 min
    strategies        scalelab run strategies --workload lenet                                               1 min
    strong-scaling    scalelab run strong-scaling --workload gpt2 --size tiny --global-batch-size 8
                          --ranks 1 2 --profile-steps 3                                                      3 min
    throughput        scalelab run throughput --workload gpt2 --size tiny                                    1 min
    train             scalelab train --workload lenet --data digits --epochs 2                               1 min
    weak-scaling      scalelab run weak-scaling --workload lenet --batch-size-per-rank 64 --ranks 1 2             1 min
    gpt2              scalelab reproduce gpt2 --size small                                                   4 min
    parallelism       scalelab reproduce parallelism                                                         3 min
    polaris           scalelab reproduce polaris --size small                                     (as root)  6 min
    quantization      scalelab reproduce quantization                                                        1 min
    resnet            scalelab reproduce resnet --size small                                                 7 min
    scaling           scalelab reproduce scaling --size small                                                6 min

Pages whose report was taken with scalelab 0.1.0, or on a busy machine, say so: drop that from the page when its report
is retaken.
"""

from __future__ import annotations

import gzip
import re
import sys
from dataclasses import replace
from pathlib import Path

from scalelab.records.store import RunStore, find_runs
from scalelab.report.document import Document, render_json
from scalelab.studies.catalogue import derive_document

REPORTS = Path(__file__).parent / "reports"
LEFT_OUT = ("host", "git")
"""Parts of the environment that are left out."""


def main(runs_dir: str, *wanted: str) -> None:
    newest: dict[str, RunStore] = {}
    for path in find_runs(Path(runs_dir)):
        store = RunStore.open(path)
        name = str(store.record.fields.get("recipe") or store.record.study)
        newest[name] = store
    REPORTS.mkdir(exist_ok=True)
    for name, store in newest.items():
        if not wanted or name in wanted:
            text = clean_text(render_json(clean_document(derive_document(store))), runs_dir)
            (REPORTS / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
            print(f"{name}: {store.name}")  # noqa: T201


def clean_document(document: Document) -> Document:
    kept = tuple((name, value) for name, value in document.environment if name not in LEFT_OUT)
    return replace(document, environment=kept)


def clean_text(text: str, runs_dir: str) -> str:
    """The same without the directory that the runs lie in."""
    shorter = text.replace(f" --runs-dir {runs_dir}", "").replace(f"{Path(runs_dir).absolute()}/", "")
    return re.sub(r"/(?:tmp|home|root|Users|work)/[\w./-]*/", "", shorter)


if __name__ == "__main__":
    main(*sys.argv[1:])
