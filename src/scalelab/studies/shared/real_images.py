"""Real images for studies that need them: random pixels can be neither learned nor loaded.

A built-in image workload that would train on random pixels gets the digits, which are always there. A workload of the
user's own brings its own data.
"""

from __future__ import annotations

from dataclasses import replace

from scalelab.data.fashion_mnist import NUM_TRAIN
from scalelab.errors import UsageError
from scalelab.studies.shared.job import Job
from scalelab.workloads.catalogue import BUILT_IN
from scalelab.workloads.image_options import ImageOptions

DIGITS_IMAGES = 1442
CIFAR10_IMAGES_PER_FILE = 10_000
"""Training images."""

DATA_NAMES = {"digits": "digits", "cifar10": "CIFAR-10", "fashion-mnist": "Fashion-MNIST"}


def put_on_images(job: Job, why: str) -> Job:
    """The same job on real images; raises `UsageError` for a built-in workload without images."""
    if job.workload not in BUILT_IN:
        return job
    options: object = job.built_in
    if not isinstance(options, ImageOptions):
        having = [name for name, kind in BUILT_IN.items() if issubclass(kind, ImageOptions)]
        raise UsageError(f"--workload {job.workload} {why}: use {', '.join(having)} or your own file.py:build")
    if options.data != "synthetic":
        return job
    return replace(job, options={**job.options, "data": "digits"})


def name_images(job: Job) -> str:
    """What a job on real images trains on, in a word."""
    options: object = job.built_in
    return DATA_NAMES[options.data] if isinstance(options, ImageOptions) else "its own data"


def count_images(job: Job) -> int | None:
    """Training images of one epoch; None where only the workload itself knows."""
    options: object = job.built_in
    if not isinstance(options, ImageOptions):
        return None
    if options.data == "fashion-mnist":
        return NUM_TRAIN
    return DIGITS_IMAGES if options.data == "digits" else CIFAR10_IMAGES_PER_FILE * options.train_files
