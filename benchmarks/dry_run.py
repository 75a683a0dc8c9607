"""How near the time that `--dry-run` expects is to the time that a run then takes.

python benchmarks/dry_run.py

Each row plans, runs and plans again a study in its own directory: of a built-in workload, of a workload of the
user's own, of a script. Expected is the geometric mean of both plans. The bar: real over expected between 0.5 and 2 for
every row.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scalelab.checks import parse_seconds

BAR = 2.0
SHORT = ["--rounds", "3", "--steps", "15", "--no-control"]
ONE_RANK = ["--ranks", "1", *SHORT]
OWN = """
import torch
from torch import nn

def build(batch_size, rank):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, [(torch.randn(batch_size, 512), torch.randint(10, (batch_size,)))], nn.CrossEntropyLoss()
"""
SCRIPT = """
import sys
import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
if torch.distributed.is_initialized():
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(20_000, 512), torch.randint(10, (20_000,)))
for _ in range(100):
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=int(sys.argv[1])):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
ROWS = {
    "strong-scaling of mlp": ["strong-scaling", *ONE_RANK, "--workload", "mlp", "--dim", "512", "--depth", "2"],
    "strong-scaling of own": ["strong-scaling", *ONE_RANK, "--workload", "own.py:build"],
    "weak-scaling of own": ["weak-scaling", *ONE_RANK, "--workload", "own.py:build"],
    "throughput of own": ["throughput", *SHORT[:4], "--workload", "own.py:build", "--batch-size-per-rank", "256"],
    "batch-size of own": ["batch-size", *SHORT[:4], "--workload", "own.py:build", "--batches", "8", "512"],
    "strong-scaling of script": ["strong-scaling", *ONE_RANK, "--", "train.py", "{batch_per_rank}"],
}


def call(words: list[str], directory: Path) -> str:
    command = [sys.executable, "-m", "scalelab", "run", *words]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-400:]}")
    return done.stdout


def expect(words: list[str], directory: Path) -> float:
    """The seconds that a dry run says, by trying: earlier runs are out of its sight."""
    study, *others = words
    text = call([study, "--dry-run", "--runs-dir", "elsewhere", *others], directory)
    found = re.search(r"about (.*?) \(from a try", text)
    assert found, text
    return parse_seconds(found[1])


def compare(words: list[str], directory: Path) -> tuple[float, float]:
    """Expected and real seconds; expected before and after, because the load of the machine changes meanwhile."""
    (directory / "own.py").write_text(OWN)
    (directory / "train.py").write_text(SCRIPT)
    before = expect(words, directory)
    start = time.perf_counter()
    call(words, directory)
    real = time.perf_counter() - start
    return math.sqrt(before * expect(words, directory)), real


def main() -> int:
    ratios = []
    print(f"{'study':<26}{'expected [s]':>14}{'real [s]':>12}{'real / expected':>18}")
    for name, words in ROWS.items():
        with tempfile.TemporaryDirectory() as place:
            expected, real = compare(words, Path(place))
        ratios.append(real / expected)
        print(f"{name:<26}{expected:>14.1f}{real:>12.1f}{ratios[-1]:>18.2f}", flush=True)
    worst = max(max(ratio, 1 / ratio) for ratio in ratios)
    print(f"dry_run: worst factor {worst:.2f} (bar {BAR:.0f})")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
