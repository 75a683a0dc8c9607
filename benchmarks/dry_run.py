"""How near the time that `--dry-run` expects is to the time that a run then takes.

python benchmarks/dry_run.py

Each row plans and then runs a study in a directory of its own: a built-in workload, a workload of the user's own, a
script. The bar: real over expected between 0.5 and 2 for every row. A machine whose load changes may miss it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scalelab.units import parse_seconds

BAR = 2.0
SHORT = ["--ranks", "1", "--rounds", "3", "--steps", "15", "--no-control"]
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
    "mlp": ["--workload", "mlp", "--dim", "512", "--depth", "2"],
    "own workload": ["--workload", "own.py:build"],
    "script": ["--", "train.py", "{batch_per_rank}"],
}


def call(words: list[str], directory: Path) -> str:
    command = [sys.executable, "-m", "scalelab", "run", "strong-scaling", *SHORT, *words]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-400:]}")
    return done.stdout


def main() -> int:
    ratios = []
    print(f"{'study of':<16}{'expected [s]':>14}{'real [s]':>12}{'real / expected':>18}")
    for name, words in ROWS.items():
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place)
            (directory / "own.py").write_text(OWN)
            (directory / "train.py").write_text(SCRIPT)
            text = call(["--dry-run", *words], directory)
            found = re.search(r"about (.*?) \(from", text)
            assert found, text
            expected = parse_seconds(found[1])
            start = time.perf_counter()
            call(words, directory)
            real = time.perf_counter() - start
        ratios.append(real / expected)
        print(f"{name:<16}{expected:>14.1f}{real:>12.1f}{ratios[-1]:>18.2f}")
    worst = max(max(ratio, 1 / ratio) for ratio in ratios)
    print(f"dry_run: worst factor {worst:.2f} (bar {BAR:.0f})")
    return 0 if worst <= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
