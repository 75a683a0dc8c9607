"""The studies by name: where each class is, its title and its question.

A class is imported when it is first needed, so that `scalelab run --help` and `scalelab show` load none of them. A
study need not be listed here: `file.py:Class` and `package.module:Class` name one of your own, and a run remembers
where its class was.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scalelab.errors import DamagedRun, ScalelabError, UnknownName, UsageError
from scalelab.records.trial import from_builtins

if TYPE_CHECKING:
    from scalelab.records.store import RunRecord, RunStore
    from scalelab.report.document import Document
    from scalelab.studies.shared.study import Study


class StudyEntry(NamedTuple):
    """A study before it is imported."""

    place: str
    """Module and class."""
    title: str
    question: str


STUDIES: dict[str, StudyEntry] = {
    "strong-scaling": StudyEntry(
        "scalelab.studies.scaling.study:StrongScaling",
        "Strong scaling",
        "How much faster does the same job get with more ranks?",
    ),
    "weak-scaling": StudyEntry(
        "scalelab.studies.scaling.study:WeakScaling",
        "Weak scaling",
        "How much more work gets done in the same time with more ranks?",
    ),
    "model-size": StudyEntry(
        "scalelab.studies.model_size:ModelSize",
        "Model size",
        "Does communication or compute dominate, and does model size decide it?",
    ),
    "delay": StudyEntry(
        "scalelab.studies.delay:Delay",
        "Injected delay",
        "How does a fixed delay per step change the speedup, and does Amdahl's law predict it?",
    ),
    "straggler": StudyEntry(
        "scalelab.studies.straggler:Straggler",
        "Straggler",
        "Which rank is slow, in which phase, and what does it cost?",
    ),
    "network": StudyEntry(
        "scalelab.studies.network.study:Network", "Network", "How much does the network link between ranks cost?"
    ),
    "strategies": StudyEntry(
        "scalelab.studies.strategies.study:Strategies",
        "Strategies",
        "Which strategy is fastest, and what does each cost in memory, idle time and variance?",
    ),
    "layouts": StudyEntry(
        "scalelab.studies.strategies.layouts:Layouts",
        "Layouts",
        "Which layout (data, sharded, tensor, pipeline) is fastest, and what does each cost?",
    ),
    "comm-volume": StudyEntry(
        "scalelab.studies.comm_volume.study:CommVolume",
        "Communication volume",
        "How many bytes do DDP and FSDP send in a step, and does theory agree?",
    ),
    "collectives": StudyEntry(
        "scalelab.studies.collectives.study:Collectives",
        "Collectives",
        "What latency and bandwidth does each collective reach?",
    ),
    "memory": StudyEntry(
        "scalelab.studies.memory.study:Memory", "Memory", "How much memory does a step take, what for, and does it fit?"
    ),
    "large-batch": StudyEntry(
        "scalelab.studies.large_batch.study:LargeBatch",
        "Large batch",
        "What does a large batch cost in accuracy, and what wins it back?",
    ),
    "loader-workers": StudyEntry(
        "scalelab.studies.loader_workers:LoaderWorkers",
        "Loader workers",
        "How many worker processes should prepare the batches?",
    ),
    "io-formats": StudyEntry(
        "scalelab.studies.io_formats.study:IoFormats", "I/O formats", "How fast is each storage format, and why?"
    ),
    "optimizers": StudyEntry(
        "scalelab.studies.optimizers:Optimizers", "Optimizers", "What does the optimizer cost in time and memory?"
    ),
    "compile": StudyEntry(
        "scalelab.studies.compile:Compile",
        "Compilation",
        "Is the compiled model faster, and after how many steps does compiling pay?",
    ),
    "dimensions": StudyEntry(
        "scalelab.studies.dimensions:Dimensions",
        "Dimensions",
        "How do time and memory grow with the dimensions of model and data?",
    ),
    "dtypes": StudyEntry(
        "scalelab.studies.dtypes:Dtypes",
        "Data types",
        "Which data type is fastest here, what does it save, and does it still train?",
    ),
    "reproducibility": StudyEntry(
        "scalelab.studies.reproducibility:Reproducibility",
        "Reproducibility",
        "What does a seed fix, and how far can a step time be trusted?",
    ),
    "throughput": StudyEntry(
        "scalelab.studies.throughput:Throughput",
        "Throughput",
        "How many tokens per second, and how long would a larger model train?",
    ),
    "batch-size": StudyEntry(
        "scalelab.studies.batch_size:BatchSize",
        "Batch size",
        "How do throughput and memory grow with the batch, and where do they end?",
    ),
    "max-batch": StudyEntry(
        "scalelab.studies.max_batch.study:MaxBatch", "Max batch", "What is the largest batch that fits into memory?"
    ),
    "batch-scaling": StudyEntry(
        "scalelab.studies.batch_scaling:BatchScaling",
        "Batch scaling",
        "How does the gain from more ranks depend on the batch, and where does it saturate?",
    ),
    "quantize": StudyEntry(
        "scalelab.studies.quantize.study:QuantizeStudy",
        "Quantization",
        "What does int8 cost in accuracy, what does it gain, and which layer is to blame?",
    ),
}
"""What `scalelab run` offers."""

OTHERS = {
    "compare": "scalelab.answers.interleaved:Interleaved",
    "metered": "scalelab.answers.metered:MeteredRun",
    "pooled": "scalelab.answers.pooled:PooledRuns",
    "train": "scalelab.answers.train:TrainStudy",
    "reproduce": "scalelab.recipes.reproduce:Reproduce",
}
"""Kinds of runs that another verb makes."""

OLD_NAMES = {"imbalance": "straggler", "links": "network", "messages": "comm-volume"}
"""Names of studies in 0.1, which still work and are in the runs of then."""


def find_name(name: str) -> str:
    """What a study is called now."""
    return OLD_NAMES.get(name, name)


def find_command(name: str) -> str:
    """What starts a run of this kind: `scalelab run compile`, `scalelab train`."""
    return f"scalelab {name}" if name in OTHERS else f"scalelab run {name}"


def load_study(name: str) -> type[Study]:
    """The class of a study that `scalelab run` takes, by name or place; an unknown name lists the known ones."""
    if ":" in name:
        return load_own(name)
    if find_name(name) not in STUDIES:
        raise UnknownName("study", name, STUDIES, "Your own: scalelab run file.py:Class.")
    return load_kind(name)


def load_kind(name: str) -> type[Study]:
    """The class that a run was made by: a study or another kind of run."""
    entry = STUDIES.get(find_name(name))
    place = entry.place if entry else OTHERS.get(name)
    if place is None:
        raise UnknownName("study", name, [*STUDIES, *OTHERS])
    module, _, kind = place.partition(":")
    found: type[Study] = getattr(importlib.import_module(module), kind)
    return found


def load_own(place: str) -> type[Study]:
    """A study class of the user's own: `file.py:Class` or `package.module:Class`."""
    from scalelab.studies.shared.study import Study

    source, _, name = place.rpartition(":")
    try:
        module = load_file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except ScalelabError:
        raise
    except Exception as error:
        failure = UsageError(f"{source} cannot be imported: {type(error).__name__}: {error}")
        raise failure from error
    found = getattr(module, name, None)
    known = [key for key, kind in vars(module).items() if is_own_study(kind, module.__name__)]
    if not inspect.isclass(found) or not issubclass(found, Study):
        raise UnknownName(f"study class in {source}", name, known, "A study is a subclass of scalelab.Study.")
    return found


def is_own_study(kind: Any, module: str) -> bool:
    from scalelab.studies.shared.study import Study

    return inspect.isclass(kind) and issubclass(kind, Study) and kind.__module__ == module


def load_file(path: Path) -> Any:
    """Import a Python file once, with the files beside it importable, as `python file.py` would."""
    place = path.expanduser().resolve()
    if not place.is_file():
        raise UsageError(f"there is no file {place}")
    name = f"scalelab_own_{place.stem}_{abs(hash(str(place)))}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(place.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(place.parent))
    return module


def read_study(store: RunStore) -> Study:
    """The study that a run was made by."""
    record: RunRecord = store.record
    if record.study_class and not store.is_own:
        raise UsageError(
            f"{store.name} was not made here, and its study is code, {record.study_class}: read it, then"
            f" scalelab resume {store.path} --trust"
        )
    kind = load_own(record.study_class) if record.study_class else load_kind(record.study)
    try:
        return from_builtins(record.fields, kind)
    except (ValueError, UsageError) as error:
        raise DamagedRun(f"{store.path / 'run.json'} is damaged: {error}") from error


def read_answer(store: RunStore, *, refresh: bool = False) -> Document:
    """The stored document; recomputed if there is none yet, or on `refresh`."""
    from scalelab.report.document import read_document

    text = None if refresh else store.read_document_text()
    if text is not None:
        try:
            return read_document(text)
        except DamagedRun as error:
            raise DamagedRun(f"{store.path / 'document.json'}: {error}; --refresh recomputes it") from error
    from scalelab.runs.experiment import conclude_run  # it loads the analysis

    return conclude_run(store, read_study(store))


def derive_document(store: RunStore) -> Document:
    """The answer from the raw samples; the stored one, with a caution, if the user's own class cannot be imported."""
    from scalelab.report.document import read_document
    from scalelab.report.findings import CautionKind
    from scalelab.runs.experiment import conclude_run

    try:
        study = read_study(store)
    except UsageError as error:
        text = store.read_document_text() if store.record.study_class else None
        if text is None:
            raise
        stored = read_document(text)
        kind = CautionKind("stored-answer", "the study's class cannot be imported; the answer is the stored one")
        caution = kind("", f"this is the stored answer: {error}", f"restore {store.record.study_class}")
        return replace(stored, cautions=(caution, *stored.cautions))
    return conclude_run(store, study)
