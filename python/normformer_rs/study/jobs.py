"""Makes a study's runs in jobs of submitit, which are Slurm's jobs or processes of this machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._optional import require
from ..errors import InputError
from ..loop.progress import write
from .declared import Study


def work(study: Study, output: Path, jobs: int, settings: Mapping[str, Any], **how: Any) -> None:
    """Makes the study's runs in `jobs` jobs that share its output folder, and waits until all jobs have ended.

    Args:
        settings: settings of submitit's executor, such as `slurm_partition` and `timeout_min`. `cluster` is "slurm" or
            "local"; the default is Slurm if it is installed.
        how: the same options as for `Study.run`.

    Errors: InputError for a setting that submitit does not know; the first error that a job raises; ImportError without
    submitit.
    """
    submitit: Any = require("submitit", "--jobs")
    executor_settings = dict(settings)
    executor = submitit.AutoExecutor(folder=str(output / "jobs"), cluster=executor_settings.pop("cluster", None))
    try:
        executor.update_parameters(**{"name": "normformer_rs", **executor_settings})
    except (NameError, TypeError, ValueError, AssertionError) as error:
        raise InputError(f"--job-setting: submitit does not take these settings: {error}") from error
    submitted = [executor.submit(_make, study, output, how) for _ in range(jobs)]
    write(f"jobs: {', '.join(job.job_id for job in submitted)}; their logs are in {output / 'jobs'}")
    for job in submitted:
        job.result()


def _make(study: Study, output: Path, how: Mapping[str, Any]) -> None:
    """Makes the study's runs inside one job. `how`: options of `run`; a job shows no progress bar."""
    from .command import run

    run(study, output, **{**how, "progress": False})
